"""Check that ranks with equal shapes run one graph, so that only weights and a row of numbers distinguish them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tpcompiler.cost.collective import KIND_OF
from tpcompiler.cost.path import FREE, steps_along
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.text import op_name
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.unsound import Unsound


def check_alike(ranks: Sequence[Folded]) -> None:
    """Check that ranks with equal claimed shapes run one program.

    This finds anything that one rank alone does differently. Ranks with shares of another size are compared by the
    program that their graphs fold to.

    Raises:
        Unsound: two of them have programs apart, or a change claims an impossible path.
    """
    _check_paths(ranks[0])
    first: dict[Any, int] = {}
    for rank, folded in enumerate(ranks):
        other = first.setdefault(key(list(_shapes(ranks[0], rank))), rank)
        if ranks[other].program is not folded.program:
            raise Unsound(None, f"ranks {other} and {rank} hold equal shapes, and run programs apart")


def _check_paths(folded: Folded) -> None:
    """Check that each step of a claimed path leads to the next, and that its collectives are called."""
    last = {region.nodes[-1]: region for region in folded.regions.values()}
    for node, states in folded.paths.items():
        value, called = edit.outputs(folded.whole[node])[0], []
        for each in filter(edit.is_collective, last[node].nodes):
            degrees = dict(folded.mesh.parts)  # an axis that the mesh lacks is another finding
            axes = [axis for axis in folded.mesh.axes_of(str(each.args[-1])) if degrees.get(axis, 1) > 1]
            called += [(KIND_OF[op_name(each)], tuple(axes))] if axes else []
        steps = steps_along(states, value.shape, value.element_size(), folded.mesh)
        if steps is None or called != [(step.kind, step.axes) for step in steps if step.kind not in FREE]:
            way = " -> ".join(state.text(folded.mesh) for state in states)
            raise Unsound(node, f"claims to change its operand along {way}, which its collectives do not")


def _shapes(folded: Folded, rank: int) -> Iterator[Any]:
    """Yield all local shapes that differ between ranks, of values and of the steps of a change."""
    here = folded.mesh.coordinate(rank)
    for node, shardings in folded.shardings.items():
        for whole, sharding in zip(edit.outputs(folded.whole[node]), shardings, strict=True):
            yield from (
                (
                    state.local_shape(whole.shape, folded.mesh, here),
                    [[here[axis] for axis in cut.axes] for cut in state.dims if cut.spans],
                )
                for state in folded.paths.get(node, (sharding,))
                if not state.is_even(whole.shape, folded.mesh)
            )
