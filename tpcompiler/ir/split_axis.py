"""A planned program on a mesh in which one axis runs as two."""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Exactly, Over
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PIN, Note, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding


def on_split_axis(program: PlannedProgram, axis: str, outer: int) -> PlannedProgram:
    """Run `axis` as two nested factors, the outer with `outer` ranks, that both shard whatever it sharded.

    Before    mesh tp=8, k.weight over tp
    After     the same mesh, k.weight over tp[::4], 2 ranks, and then tp[:4]

    Nothing changes yet, but now a tensor may be sharded by one of the two and whole over the other: `2xS(0) 4xR`.
    """
    mesh = program.mesh.split(axis, outer)
    both = mesh.parts_of(axis)
    pins = {
        node.name: own
        for node in edit.calls(program.graph)
        if node.target is pin and (own := node.meta[PIN].split_axis(axis, both)) != node.meta[PIN]
    }
    graph = edit.copy_graph(program.graph) if pins else program.graph  # for which much is known
    for node in edit.calls(graph) if pins else ():
        if node.name in pins:
            node.meta[PIN] = pins[node.name]
    inner = mesh.degree(both[1])
    text = f"{axis}={mesh.degree(axis)}: some weights in {outer} shares, each on {inner} ranks in a row"
    return replace(
        program,
        graph=graph,
        mesh=mesh,
        constraints={name: constraint.split_axis(axis, both) for name, constraint in program.constraints.items()},
        notes=(*program.notes, Note("mesh", text)),
    )


def keeps_shares(program: PlannedProgram, axis: str, outer: int) -> bool:
    """Return True if the split leaves every rank the same share of every input, pin and leaf that the caller placed.

    Five steps over tp=4 are dealt 2, 2, 1, 0; over 2 x 2 ranks they are dealt 2, 1, 1, 1.
    """
    asked = ((node, program.constraints.get(node.name) or node.meta.get(PIN)) for node in program.graph.nodes)
    placed = ((node, own.sharding) for node, own in asked if own and isinstance(own.request, Exactly | Over))
    return all(_deals_alike(sharding, edit.shape(node), program.mesh, axis, outer) for node, sharding in placed)


def _deals_alike(sharding: Sharding, shape: torch.Size, mesh: Mesh, axis: str, outer: int) -> bool:
    split = mesh.split(axis, outer)
    for cut, size in zip(sharding.dims, shape, strict=True):
        if axis not in cut.axes or cut.is_even(size, mesh):
            continue
        halves = cut.split_axis(axis, split.parts_of(axis))
        for rank in range(mesh.world_size):
            if cut.runs(size, mesh, mesh.coordinate(rank)) != halves.runs(size, split, split.coordinate(rank)):
                return False
    return True
