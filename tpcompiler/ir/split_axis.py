"""A planned program on a mesh of which one axis has become two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpcompiler.ir import edit
from tpcompiler.ir.program import PIN, Note, PlannedProgram, Seed, pin


def on_split_axis(program: PlannedProgram, axis: str, outer: int) -> PlannedProgram:
    """The same plan, with what an axis cuts cut by both of its halves: `outer` ranks, and those inside of each.

    Before    mesh tp=8           k.weight: S(0)
    After     mesh tp_0=2,tp_1=4  k.weight: [S(0), S(0)]

    Nothing changes, but a tensor may now be cut by one of the two and be whole over the other.
    """
    mesh = program.mesh.split(axis, outer)
    both = (f"{axis}_0", f"{axis}_1")
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if node.target is pin:
            seed: Seed = node.meta[PIN]
            axes = tuple(a for old in seed.axes for a in (both if old == axis else (old,)))
            node.meta[PIN] = replace(seed, sharding=seed.sharding.over(axis, both), axes=axes)
    text = f"{axis}={program.mesh.degree(axis)} runs as {both[0]}={outer},{both[1]}={mesh.degree(both[1])}"
    return replace(
        program,
        graph=graph,
        mesh=mesh,
        seeds=_over(program.seeds, axis, both),
        kept=_over(program.kept, axis, both),
        input_shardings={name: sharding.over(axis, both) for name, sharding in program.input_shardings.items()},
        notes=(*program.notes, Note("mesh", f"{text}: ranks that differ in {both[1]} alone share some weights")),
    )


def _over(seeds: Mapping[str, Seed], axis: str, both: tuple[str, str]) -> dict[str, Seed]:
    return {name: replace(seed, sharding=seed.sharding.over(axis, both)) for name, seed in seeds.items()}
