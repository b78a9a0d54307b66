"""The fastest path from one sharding to another, in collectives.

A shortest path over shardings: every edge is one collective over one axis, or over several axes as one flattened group,
or a step that moves nothing. Weights are a machine's seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

from tpcompiler._torch import sym_hint
from tpcompiler.cost.collective import KINDS, wire_bytes
from tpcompiler.cost.machine import Link, Machine
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding, Size
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.nan_safe_reduce import sent_itemsize
from tpcompiler.ir.sharding import Sharding, commute

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "hold"]

FREE = ("slice", "hold")
EXTRA = 0.1  # of the least time of a collective: less than each one more must gain; measured times differ by as much
WIRE = Machine(1.0, math.inf, 1.0, {("", 0): [Link(0.0, 1e9)]}, name="wire bytes")  # counts bytes alone
UNIT = 1e-15  # seconds: smaller differences between paths are ties


class Step(NamedTuple):
    """One collective over the flattened group of `axes`; "slice" (R -> S) and "hold" (R -> P) send nothing.

    `copied`: bytes that it reorders in memory, and that steps over one axis each would leave in place.
    """

    kind: Kind
    axes: tuple[str, ...]
    source: Sharding
    target: Sharding
    wire_bytes: int
    copied: int = 0


Timed = tuple[Step, float]  # a step, and its seconds


@lru_cache(maxsize=1 << 16)
def cheapest_path(
    source: Sharding,
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    machine: Machine,
    dynamic: frozenset[int] = frozenset(),
) -> tuple[Step, ...]:
    """Return the fastest steps on a machine from `source` to `target`, for a global tensor of `shape`.

    Dims in `dynamic` have that size in the example only: intermediate states shard them as source or target does,
    because a divisor of the example's size may not divide it in every run.
    """
    if source == target:
        return ()
    axes, dims = _used(source, target, mesh)
    least, rest = _least_seconds(axes, machine, mesh), _without_plain(target, mesh, dynamic)

    def find_steps(state: Sharding) -> tuple[Timed, ...]:
        toward = target if len(state.partial) > 1 else rest
        return _find_steps(state, axes, dims, toward, shape, itemsize, mesh, machine, dynamic)

    @cache
    def find_rest(state: Sharding) -> float:
        return _count_collectives(state, target) * least

    return tuple(_find_shortest(source, target, find_steps, find_rest))


def _used(source: Sharding, target: Sharding, mesh: Mesh) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the axes and the dims that either shards."""
    dims = (d for d, cuts in enumerate(zip(source.dims, target.dims, strict=True)) if any(cut.axes for cut in cuts))
    return mesh.ordered(source.axes | target.axes), tuple(dims)


def _find_shortest(
    source: Sharding,
    target: Sharding,
    find_steps: Callable[[Sharding], Sequence[Timed]],
    find_rest: Callable[[Sharding], float],
) -> list[Step]:
    """Return the fastest steps; ties go to the path with the fewest wire bytes, then to the one with the fewest steps.

    The least time is found first, by A* (Hart, Nilsson and Raphael, 1968). Dijkstra's order then breaks the ties, and
    leaves out what cannot be on a path of that time.

    Args:
        find_rest: seconds that the rest of a path from a sharding takes at least; no step takes less than it saves.
    """
    if not find_rest(source):
        return _reach(source, target, find_steps, find_rest, math.inf)[1]
    least, _ = _reach(source, target, find_steps, find_rest, None)
    return _reach(source, target, find_steps, find_rest, least + 1)[1]  # a sum may be rounded up


def _reach(
    source: Sharding,
    target: Sharding,
    find_steps: Callable[[Sharding], Sequence[Timed]],
    find_rest: Callable[[Sharding], float],
    most: float | None,
) -> tuple[int, list[Step]]:
    """Return the time of a shortest path in units, and its steps.

    `most`: units that no path of interest takes more than; without it, the order is that of A*.
    """
    nearest, seconds_to = {source: (0, 0, 0)}, {source: 0.0}  # (time, wire bytes, steps), and seconds
    reached: dict[Sharding, Step] = {}
    serial = itertools.count()  # of equally distant states the target goes first, then the earliest one
    open_ = [((0, 0, 0), True, next(serial), source)]
    while (state := heapq.heappop(open_)[-1]) != target:
        for step, more in find_steps(state):
            seconds, (_, sent, count) = seconds_to[state] + more, nearest[state]
            far = round(seconds / UNIT), sent + step.wire_bytes, count + 1
            if step.target in nearest and far >= nearest[step.target]:
                continue
            whole = far[0] + math.floor(find_rest(step.target) / UNIT)
            if most is None or whole <= most:
                nearest[step.target], seconds_to[step.target], reached[step.target] = far, seconds, step
                order = (whole, *far[1:]) if most is None else far
                heapq.heappush(open_, (order, step.target != target, next(serial), step.target))
    path = [reached[target]]
    while path[-1].source != source:
        path.append(reached[path[-1].source])
    return nearest[target][0], path[::-1]


@lru_cache(maxsize=1 << 10)
def _least_seconds(axes: tuple[str, ...], machine: Machine, mesh: Mesh) -> float:
    """Return the least time of a collective over some of these axes."""
    times = (machine.collective_seconds(kind, some, 0, mesh) for kind in KINDS for some in _subsets(axes))
    return min(times, default=0.0)


@cache
def _subsets(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(itertools.chain.from_iterable(itertools.combinations(axes, n + 1) for n in range(len(axes))))


def _count_collectives(state: Sharding, target: Sharding) -> int:
    """Return how many collectives the way to the target has at least.

    A step that sends nothing takes no axis off a dim, and reduces nothing; no collective does both.
    """
    is_cut = any(not set(have.axes) <= set(want.axes) for have, want in zip(state.dims, target.dims, strict=True))
    return is_cut + (not set(state.partial) <= set(target.partial))


def step_seconds(step: Step, machine: Machine, mesh: Mesh) -> float:
    """Return the seconds of one step and of the bytes that it alone copies, 0 without a collective."""
    if step.kind in FREE:
        return 0.0
    sent = machine.collective_seconds(step.kind, step.axes, step.wire_bytes, mesh)
    return sent + 2 * step.copied / machine.memory_bandwidth


def reshard_wire_bytes(source: Sharding, target: Sharding, shape: Sequence[Size], itemsize: int, mesh: Mesh) -> int:
    """Return the least wire bytes per rank of a change of sharding; symbolic sizes count as in the example."""
    return sum(step.wire_bytes for step in steps_between(source, target, shape, itemsize, mesh, WIRE))


def steps_between(
    source: Sharding, target: Sharding, shape: Sequence[Size], itemsize: int, mesh: Mesh, machine: Machine
) -> tuple[Step, ...]:
    """Return the fastest path of a value whose sizes may be symbolic."""
    if source == target:
        return ()
    sizes, dynamic = _hints(shape)
    return cheapest_path(source, target, sizes, itemsize, mesh, machine, dynamic)


def steps_along(
    states: Sequence[Sharding], shape: Sequence[Size], itemsize: int, mesh: Mesh
) -> tuple[Step, ...] | None:
    """Return the steps of a path through these states; None if no single step leads from one state to the next."""
    sizes, dynamic = _hints(shape)
    source, target, path = states[0], states[-1], list[Step]()
    axes, dims = _used(source, target, mesh)
    for state, following in itertools.pairwise(states):
        steps = _find_steps(state, axes, dims, target, sizes, itemsize, mesh, WIRE, dynamic)
        step = next((step for step, _ in steps if step.target == following), None)
        if step is not None:
            path.append(step)
        elif state != following:
            return None
    return tuple(path)


def _hints(shape: Sequence[Size]) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the example's sizes, and the dims that have them in the example only."""
    return tuple(map(sym_hint, shape)), frozenset(d for d, size in enumerate(shape) if not isinstance(size, int))


def _without_plain(target: Sharding, mesh: Mesh, dynamic: frozenset[int]) -> Sharding:
    """Return the target without the plain cuts of `_grow`: steps are the same on the way to all such targets."""
    plain = [
        d not in dynamic and not cut.parts and cut == DimSharding.by(*mesh.ordered(cut.axes))
        for d, cut in enumerate(target.dims)
    ]
    return Sharding(tuple(WHOLE if own else cut for own, cut in zip(plain, target.dims, strict=True)), target.partial)


@lru_cache(maxsize=1 << 15)
def _find_steps(
    state: Sharding,
    used: tuple[str, ...],
    dims: tuple[int, ...],
    target: Sharding,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: Mesh,
    machine: Machine,
    dynamic: frozenset[int],
) -> tuple[Timed, ...]:
    """Return every step over these axes and dims, which source or target shard, with its seconds.

    Others make no detours.
    """
    pending, target_pending = dict(state.partial), dict(target.partial)

    def step(kind: Kind, axes: tuple[str, ...], state_after: Sharding) -> Step:
        size = sent_itemsize(pending.get(axes[0], ""), itemsize)
        if kind in FREE:
            return Step(kind, axes, state, state_after, 0)
        if kind in ("all_gather", "reduce_scatter"):  # of shares that are padded to the largest
            shares = state if kind == "all_gather" else state_after
            moved = shares.local_bytes(shape, size, mesh) * mesh.size(axes)
        elif kind == "all_to_all" and any(cut.parts for cut in state_after.dims):  # what stays whole goes to every rank
            moved = _exchanged(state, state_after, axes, shape, mesh) * size
        else:
            moved = state.local_bytes(shape, size, mesh)
        in_rows = kind in ("all_gather", "reduce_scatter") and len(axes) > 1
        copied = moved if in_rows and _reorders(state, state_after, shape, mesh) else 0
        return Step(kind, axes, state, state_after, wire_bytes(kind, moved, mesh.size(axes)), copied)

    def find() -> Iterator[Step]:
        for axes in _subsets(used):
            if len({pending.get(axis) for axis in axes}) > 1:
                continue
            if axes[0] in pending:
                rest = Sharding(state.dims, tuple((a, op) for a, op in state.partial if a not in axes))
                yield (whole := step("all_reduce", axes, rest))
                near = _grow(rest, axes, dims, target, shape, mesh, dynamic)
                for state_after in itertools.chain(near, _grow_apart(rest, axes, target, shape, mesh, dynamic)):
                    scattered = step("reduce_scatter", axes, state_after)
                    if scattered.wire_bytes < whole.wire_bytes:  # or else a slice of the sum does
                        yield scattered
            elif state.axes.issuperset(axes):
                if target.has_spans and (spanning := _into_spans(state, axes, target, dynamic)) is not None:
                    yield _exchange(state, spanning, axes, shape, itemsize, mesh)
                if (gathered := _strip_dims(state, axes, shape, mesh, dynamic)) is None:
                    continue
                yield step("all_gather", axes, gathered)
                others = [d for d in dims if gathered.dims[d] == state.dims[d]]
                is_one = len(others) == len(dims) - 1
                for state_after in _grow(gathered, axes, others, target, shape, mesh, dynamic) if is_one else ():
                    yield step("all_to_all", axes, state_after)
            elif len(axes) == 1:  # several axes slice one by one
                for state_after in _grow(state, axes, dims, target, shape, mesh, dynamic):
                    yield step("slice", axes, state_after)
                for dim in dims:
                    if target.dims[dim].spans and target.dims[dim].axes == axes and not state.dims[dim].axes:
                        yield step("slice", axes, state.with_dim(dim, target.dims[dim]))
                if axes[0] in target_pending and commute([target_pending[axes[0]], *pending.values()]):
                    partial = tuple(sorted((*state.partial, (axes[0], target_pending[axes[0]]))))
                    yield step("hold", axes, Sharding(state.dims, partial))

    extra = EXTRA * _least_seconds(used, machine, mesh)
    return tuple((each, step_seconds(each, machine, mesh) + extra * (each.kind not in FREE)) for each in find())


def _into_spans(state: Sharding, axes: tuple[str, ...], target: Sharding, dynamic: frozenset[int]) -> Sharding | None:
    """Return the state with one dim in the target's spans, if these axes alone shard it and each rank has one run."""
    for dim, (have, want) in enumerate(zip(state.dims, target.dims, strict=True)):
        is_run = not have.spans and not have.parts and not any(level.block for level in have.levels)
        if want.spans and is_run and dim not in dynamic and set(have.axes) == set(want.axes) == set(axes):
            return state.with_dim(dim, want)
    return None


def _exchange(
    state: Sharding, after: Sharding, axes: tuple[str, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh
) -> Step:
    """Return the all_to_all in which ranks send each other the elements that their spans lack; a slice if none does.

    It sends as much as its busiest rank.
    """
    (dim,) = (at for at, have in enumerate(state.dims) if have != after.dims[at])
    have, want = (list(spans_of(each.dims[dim], shape[dim], mesh)) for each in (state, after))
    lacks = [[len(overlap(own, other)) * (at != to) for to, other in enumerate(want)] for at, own in enumerate(have)]
    whole = state.with_dim(dim, DimSharding())
    row = math.prod(whole.local_shape(shape, mesh, mesh.coordinate(0))) // max(shape[dim], 1)
    most = max([*map(sum, lacks), *map(sum, zip(*lacks, strict=True))])
    return Step("all_to_all" if most else "slice", axes, state, after, most * row * itemsize)


def _exchanged(state: Sharding, after: Sharding, axes: Sequence[str], shape: Sequence[int], mesh: Mesh) -> int:
    """Return the number of elements that the first rank has for all of its group."""
    have, ranks = state.local_shape(shape, mesh, mesh.coordinate(0)), mesh.groups(axes)[0]
    wanted = (after.local_shape(shape, mesh, mesh.coordinate(rank)) for rank in ranks)
    return sum(math.prod(map(min, have, want)) for want in wanted)


def spans_of(cut: DimSharding, size: int, mesh: Mesh) -> Iterator[range]:
    """Yield the run of elements that each rank of a dim's axes holds, in the order of their group."""
    for here in DimSharding.by(*mesh.ordered(cut.axes)).coordinates(mesh):
        start, length = cut.share(size, mesh, here)
        yield range(start, start + length)


def overlap(one: range, other: range) -> range:
    """Return the elements of both."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _reorders(state: Sharding, after: Sharding, shape: Sequence[int], mesh: Mesh) -> bool:
    """Return True if the ranks' shares of the first dim, which are in memory as they are sent, change their order."""
    changed = [d for d in range(state.ndim) if state.dims[d] != after.dims[d]]
    few, many = sorted((state.dims[0], after.dims[0]), key=lambda cut: len(cut.axes))
    if changed[0] > 0 or many.parts or not many.is_even(shape[0], mesh):  # these are copied in any case
        return False
    return len(changed) > 1 or not _is_flat(many, len(few.axes), shape[0], mesh)


def _strip_dims(
    state: Sharding, axes: tuple[str, ...], shape: Sequence[int], mesh: Mesh, dynamic: frozenset[int]
) -> Sharding | None:
    """Return the state without these axes, which must all be the innermost ones of the dims that they shard."""
    for dim, own in _by_dim(state, axes).items():
        cut = _strip(state.dims[dim], own, shape[dim], mesh, dim in dynamic)
        if cut is None:
            return None
        state = state.with_dim(dim, cut)
    return state if state.axes.isdisjoint(axes) else None


def _strip(cut: DimSharding, axes: tuple[str, ...], size: int, mesh: Mesh, is_dynamic: bool) -> DimSharding | None:
    """Return the cut without its innermost axes, which must be these; parts that they do not shard stay as they are."""
    if cut.spans:
        return None
    if cut.parts:
        parts = [
            (length, _strip(how, axes, length, mesh, is_dynamic) if not set(axes).isdisjoint(how.axes) else how)
            for length, how in cut.parts
        ]
        if set(axes).isdisjoint(cut.axes) or any(how is None for _, how in parts):
            return None
        return DimSharding.of_parts([(length, how) for length, how in parts if how is not None])
    count = len(cut.axes) - len(axes)
    if count < 0 or set(cut.axes[count:]) != set(axes) or not _is_joint(cut, count, size, mesh, is_dynamic):
        return None
    return _prefix(cut, count)


def _grow_apart(
    state: Sharding,
    axes: tuple[str, ...],
    target: Sharding,
    shape: Sequence[int],
    mesh: Mesh,
    dynamic: frozenset[int],
) -> Iterator[Sharding]:
    """Yield the state with two or more dims sharded by these axes too, as in the target, if one collective can."""
    own = _by_dim(target, axes)
    if len(own) < 2 or sum(map(len, own.values())) < len(axes):
        return
    for dim, inner in own.items():
        cut = _toward(state.dims[dim], target.dims[dim], inner, shape[dim], mesh)
        if cut is None or not (
            cut.parts or _is_joint(cut, len(state.dims[dim].axes), shape[dim], mesh, dim in dynamic)
        ):
            return
        state = state.with_dim(dim, cut)
    yield state


def _by_dim(state: Sharding, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Return these axes by the dim that each shards."""
    inside = {dim: tuple(axis for axis in axes if axis in cut.axes) for dim, cut in enumerate(state.dims)}
    return {dim: own for dim, own in inside.items() if own}


def _prefix(cut: DimSharding, count: int) -> DimSharding:
    """Return the cut by its `count` outermost axes alone."""
    return DimSharding(cut.levels[:count])


def _is_flat(cut: DimSharding, first: int, size: Size, mesh: Mesh) -> bool:
    """Return True if the axes from this one on shard like one axis of all their ranks."""
    axes = cut.axes[first:]
    in_order = axes == mesh.ordered(axes) and not any(level.block for level in cut.levels[first + 1 :])
    return len(axes) == 1 or (in_order and cut.is_even(size, mesh))


def _is_joint(cut: DimSharding, first: int, size: int, mesh: Mesh, is_dynamic: bool) -> bool:
    """Return True if one collective can run over the axes from this one on, each block or part being whole shares."""
    nested = not any(level.block for level in cut.levels[first + 1 :])
    return (nested and not is_dynamic) or _is_flat(cut, first, size, mesh)


def _grow(
    state: Sharding,
    axes: tuple[str, ...],
    dims: Sequence[int],
    target: Sharding,
    shape: Sequence[int],
    mesh: Mesh,
    dynamic: frozenset[int],
) -> Iterator[Sharding]:
    """Yield the state with a dim sharded by these axes too, as the innermost ones: as in the target, or plainly."""
    for dim in dims:
        have = state.dims[dim]
        if have.spans:
            continue
        plain = None if have.parts or dim in dynamic else have.nest(DimSharding.by(*axes))
        for cut in dict.fromkeys((_toward(have, target.dims[dim], axes, shape[dim], mesh), plain)):
            fits = cut is not None and (cut.parts or _is_joint(cut, len(have.axes), shape[dim], mesh, dim in dynamic))
            if cut is not None and fits:
                yield state.with_dim(dim, cut)


def _toward(have: DimSharding, want: DimSharding, axes: tuple[str, ...], size: int, mesh: Mesh) -> DimSharding | None:
    """Return the target's cut up to these axes, if its outer axes are those that the dim already has."""
    if want.parts:
        parts, at = [], 0
        for length, cut in want.parts:
            piece = have.slice(at, at + length, size)
            at += length
            if piece is None:
                return None
            own = tuple(axis for axis in axes if axis in cut.axes)
            if own and own != axes:
                return None
            partway = _toward(piece, cut, axes, length, mesh) if own else piece
            if partway is None or (own and not _is_joint(partway, len(piece.axes), length, mesh, False)):
                return None
            parts.append((length, partway))
        return DimSharding.of_parts(parts) if not set(axes).isdisjoint(want.axes) else None
    count = len(have.axes)
    if have.parts or set(want.axes[count : count + len(axes)]) != set(axes) or _prefix(want, count) != have:
        return None
    return _prefix(want, count + len(axes))
