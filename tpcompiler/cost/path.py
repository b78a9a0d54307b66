"""The cheapest way from one sharding to another, in collectives.

A shortest path (Dijkstra, 1959) over shardings: every edge is one collective over one axis, or over several axes as one
flattened group, or a step that moves nothing. Weights are ring wire bytes per rank; among equals the fewest steps win.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from tpcompiler._torch import sym_hint
from tpcompiler.cost.collective import wire_bytes
from tpcompiler.ir.dim_sharding import DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.ordered import sent_itemsize
from tpcompiler.ir.placements import format_placement
from tpcompiler.ir.sharding import Sharding, commute

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "hold"]


class Step(NamedTuple):
    """One collective over the flattened group of `axes`; "slice" (R -> S) and "hold" (R -> P) send nothing."""

    kind: Kind
    axes: tuple[str, ...]
    source: Sharding
    target: Sharding
    wire_bytes: int


@lru_cache(maxsize=1 << 16)
def cheapest_path(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    dynamic: frozenset[int] = frozenset(),
) -> tuple[Step, ...]:
    """The steps from `source` to `target` of a global tensor of `shape`, in order.

    Dims in `dynamic` have that size in the example only: on the way they are cut as source or target cut them, for what
    divides them in the example may not in every run.
    """
    if source == target:
        return ()
    if len(source.axes | target.axes) == 1:  # no way round is cheaper than one step, where there is one
        for step in _steps(source, source, target, shape, itemsize, mesh, dynamic):
            if step.target == target:
                return (step,)
    weight_of_byte = (len(mesh.axes) + 2) ** 3  # more than there are steps
    nearest: dict[Sharding, int] = {source: 0}
    reached: dict[Sharding, Step] = {}
    found = itertools.count()  # of equally far states the target goes first, then the first one
    open_ = [(0, True, next(found), source)]
    while (state := heapq.heappop(open_)[-1]) != target:
        for step in _steps(state, source, target, shape, itemsize, mesh, dynamic):
            far = nearest[state] + weight_of_byte * step.wire_bytes + 1
            if far < nearest.get(step.target, math.inf):
                nearest[step.target], reached[step.target] = far, step
                heapq.heappush(open_, (far, step.target != target, next(found), step.target))
    path = [reached[target]]
    while path[-1].source != source:
        path.append(reached[path[-1].source])
    return tuple(reversed(path))


def reshard_wire_bytes(source: Sharding, target: Sharding, shape: Sequence[Size], itemsize: int, mesh: Mesh) -> int:
    """Wire bytes per rank of one change of sharding; symbolic sizes count as in the example."""
    return sum(step.wire_bytes for step in steps_between(source, target, shape, itemsize, mesh))


def steps_between(
    source: Sharding, target: Sharding, shape: Sequence[Size], itemsize: int, mesh: Mesh
) -> tuple[Step, ...]:
    """The cheapest path of a value some of whose sizes may be symbolic."""
    if source == target:
        return ()
    dynamic = frozenset(d for d, size in enumerate(shape) if not isinstance(size, int))
    return cheapest_path(source, target, tuple(sym_hint(size) for size in shape), itemsize, mesh, dynamic)


def path_text(steps: Sequence[Step], mesh: Mesh) -> str:
    """The path in the form in which torch prints its own: `S(0)S(0)->RS(0)->RR`."""
    states = [steps[0].source, *(step.target for step in steps)] if steps else []
    return "->".join("".join(format_placement(p) for p in state.placements(mesh)) for state in states)


def _steps(
    state: Sharding,
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    dynamic: frozenset[int],
) -> Iterator[Step]:
    """Every step over the axes and dims that source or target cut; a way round by other dims is not looked for."""
    pending, wanted = dict(state.partial), dict(target.partial)
    dims = [d for d in range(state.ndim) if source.dims[d].axes or target.dims[d].axes]
    used = mesh.ordered(source.axes | target.axes)

    def step(kind: Kind, axes: tuple[str, ...], made: Sharding) -> Step:
        size = sent_itemsize(pending.get(axes[0], ""), itemsize)
        moved = _local_bytes(made if kind == "all_gather" else state, shape, size, mesh)
        free = kind in ("slice", "hold")
        return Step(kind, axes, state, made, 0 if free else wire_bytes(kind, moved, mesh.size(axes)))

    for axes in (some for count in range(1, len(used) + 1) for some in itertools.combinations(used, count)):
        if len({pending.get(axis) for axis in axes}) > 1:
            continue
        if axes[0] in pending:
            rest = Sharding(state.dims, tuple((a, op) for a, op in state.partial if a not in axes))
            yield step("all_reduce", axes, rest)
            for made in _grown(rest, axes, dims, target, shape, mesh, dynamic):
                yield step("reduce_scatter", axes, made)
        elif not state.axes.isdisjoint(axes):
            for dim in dims:
                stripped = _stripped(state.dims[dim], axes, shape[dim], mesh)
                if stripped is None:
                    continue
                rest = _with(state, dim, stripped)
                yield step("all_gather", axes, rest)
                for made in _grown(rest, axes, [d for d in dims if d != dim], target, shape, mesh, dynamic):
                    yield step("all_to_all", axes, made)
        elif len(axes) == 1:
            for made in _grown(state, axes, dims, target, shape, mesh, dynamic):
                yield step("slice", axes, made)
            if axes[0] in wanted and commute([wanted[axes[0]], *pending.values()]):
                partial = tuple(sorted((*state.partial, (axes[0], wanted[axes[0]]))))
                yield step("hold", axes, replace(state, partial=partial))


def _with(state: Sharding, dim: int, cut: DimSharding) -> Sharding:
    return replace(state, dims=(*state.dims[:dim], cut, *state.dims[dim + 1 :]))


def _stripped(cut: DimSharding, axes: tuple[str, ...], size: int, mesh: Mesh) -> DimSharding | None:
    """The cut without its innermost axes, which must be these; a part that they do not cut stays as it is."""
    if cut.parts:
        parts = [
            (length, _stripped(how, axes, length, mesh) if not set(axes).isdisjoint(how.axes) else how)
            for length, how in cut.parts
        ]
        if set(axes).isdisjoint(cut.axes) or any(how is None for _, how in parts):
            return None
        return DimSharding.of_parts([(length, how) for length, how in parts if how is not None])
    kept = len(cut.axes) - len(axes)
    if kept < 0 or cut.axes[kept:] != axes or not _flat(cut, kept, size, mesh):
        return None
    return _prefix(cut, kept)


def _prefix(cut: DimSharding, count: int) -> DimSharding:
    """The cut by its `count` outermost axes alone."""
    return DimSharding(cut.levels[:count])


def _flat(cut: DimSharding, first: int, size: int, mesh: Mesh) -> bool:
    """Whether the axes from this one on cut as one axis of all their ranks would."""
    single = len(cut.axes) - first == 1
    return single or (not any(level.block for level in cut.levels[first + 1 :]) and cut.is_even(size, mesh))


def _grown(
    state: Sharding,
    axes: tuple[str, ...],
    dims: Sequence[int],
    target: Sharding,
    shape: Sequence[int],
    mesh: Mesh,
    dynamic: frozenset[int],
) -> Iterator[Sharding]:
    """The state with a dim cut by these axes too, inside of the axes that cut it: as in the target, or plainly."""
    for dim in dims:
        have = state.dims[dim]
        plain = _plain(have, axes) if dim not in dynamic else None
        for cut in dict.fromkeys((_toward(have, target.dims[dim], axes, shape[dim], mesh), plain)):
            if cut is not None and (cut.parts or _flat(cut, len(have.axes), shape[dim], mesh)):
                yield _with(state, dim, cut)


def _plain(cut: DimSharding, axes: tuple[str, ...]) -> DimSharding | None:
    if cut.parts:
        return None
    return cut.inside(DimSharding.by(*axes))


def _toward(have: DimSharding, want: DimSharding, axes: tuple[str, ...], size: int, mesh: Mesh) -> DimSharding | None:
    """The first axes of what the target wants of a dim, if they are those that it has and then these."""
    if want.parts:
        parts, at = [], 0
        for length, cut in want.parts:
            piece = have.between(at, at + length, size)
            at += length
            if piece is None:
                return None
            own = tuple(axis for axis in axes if axis in cut.axes)
            if own and own != axes:
                return None
            made = _toward(piece, cut, axes, length, mesh) if own else piece
            if made is None or (own and not _flat(made, len(piece.axes), length, mesh)):
                return None
            parts.append((length, made))
        return DimSharding.of_parts(parts) if not set(axes).isdisjoint(want.axes) else None
    count = len(have.axes)
    if have.parts or want.axes[count : count + len(axes)] != axes or _prefix(want, count) != have:
        return None
    return _prefix(want, count + len(axes))


def _local_bytes(state: Sharding, shape: Sequence[int], itemsize: int, mesh: Mesh) -> int:
    """Of the first rank, which holds the most."""
    return torch.Size(state.local_shape(shape, mesh, mesh.coordinate(0))).numel() * itemsize
