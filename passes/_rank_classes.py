"""Classes of ranks that run the same graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.node_placement import placement_of, reshard_of
from tpcompiler.ir.program import PlacedProgram, reshard
from tpcompiler.passes.lower_reshards import lines_of


def ranks_alike(program: PlacedProgram) -> list[tuple[int, ...]]:
    """Return classes of ranks with equal local shapes of every value, including intermediate steps of reshards.

    Even shards make one class; 7 rows over 3 ranks (3, 3, 1) make two.
    """
    classes: dict[Any, list[int]] = {}
    uneven = list(_uneven(program))
    for rank in range(program.mesh.world_size):
        classes.setdefault(key([shapes_on(rank) for shapes_on in uneven]), []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def _uneven(program: PlacedProgram) -> Iterator[Any]:
    """Yield, for everything with possibly unequal shares, a function from a rank to its local shapes."""
    mesh, visited = program.mesh, set[Any]()
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        mark = placement_of(node)
        for value, sharding in zip(edit.outputs(node), mark.shardings, strict=True):
            if not sharding.is_even(value.shape, mesh) and (what := (sharding, key(value.shape))) not in visited:
                visited.add(what)
                yield lambda rank, s=sharding, v=value: s.local_shape(v.shape, mesh, mesh.coordinate(rank))
        count_cuts = [(by, size) for groups in mark.counts.values() for group in groups for size, by in group]
        for by, total in (*(mark.local.cuts if mark.local else ()), *count_cuts):
            if not by.is_even(total, mesh):
                yield lambda rank, by=by, total=total: by.local_size(total, mesh, mesh.coordinate(rank))
        if mark.local is not None:
            yield lambda rank, local=mark.local: local.range_of(mesh, mesh.coordinate(rank)).frames
        if node.target is reshard:
            change = reshard_of(node)
            (operand,) = edit.operands(node)
            value = edit.fake(operand)
            if not all(state.is_even(value.shape, mesh) for state in change.states):
                yield lambda rank, c=change, v=value: [line.facts() for line, _ in lines_of(c, v, mesh, rank)]
