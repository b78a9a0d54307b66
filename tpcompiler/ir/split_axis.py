"""A planned program on a mesh in which one axis became two."""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Exactly, Over
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PIN, Note, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding


def on_split_axis(program: PlannedProgram, axis: str, outer: int) -> PlannedProgram:
    """Replace `axis` by two nested axes, the outer with `outer` ranks, that both shard whatever it sharded.

    Before    mesh tp=8           k.weight: S(0)
    After     mesh tp_0=2,tp_1=4  k.weight: [S(0), S(0)]

    Nothing changes yet, but now a tensor may be sharded by one of the two axes and whole over the other.
    """
    mesh = program.mesh.split(axis, outer)
    both = (f"{axis}_0", f"{axis}_1")
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if node.target is pin:
            node.meta[PIN] = node.meta[PIN].over(axis, both)
    text = f"{axis}={program.mesh.degree(axis)} runs as {both[0]}={outer},{both[1]}={mesh.degree(both[1])}"
    return replace(
        program,
        graph=graph,
        mesh=mesh,
        constraints={name: constraint.over(axis, both) for name, constraint in program.constraints.items()},
        notes=(*program.notes, Note("mesh", f"{text}: ranks that differ in {both[1]} alone share some weights")),
    )


def keeps_shares(program: PlannedProgram, axis: str, outer: int) -> bool:
    """Return True if the split leaves every rank the same share of every input, pin and leaf that the caller placed.

    Five steps over tp=4 are dealt 2, 2, 1, 0; over tp_0=2,tp_1=2 they are dealt 2, 1, 1, 1.
    """
    asked = ((node, program.constraints.get(node.name) or node.meta.get(PIN)) for node in program.graph.nodes)
    placed = ((node, own.sharding) for node, own in asked if own and isinstance(own.request, Exactly | Over))
    return all(_deals_alike(sharding, edit.shape(node), program.mesh, axis, outer) for node, sharding in placed)


def _deals_alike(sharding: Sharding, shape: torch.Size, mesh: Mesh, axis: str, outer: int) -> bool:
    split, both = mesh.split(axis, outer), (f"{axis}_0", f"{axis}_1")
    for cut, size in zip(sharding.dims, shape, strict=True):
        if axis not in cut.axes or cut.is_even(size, mesh):
            continue
        halves = cut.over(axis, both)
        for rank in range(mesh.world_size):
            if cut.runs(size, mesh, mesh.coordinate(rank)) != halves.runs(size, split, split.coordinate(rank)):
                return False
    return True
