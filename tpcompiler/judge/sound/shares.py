"""The elements that a rank holds, and the whole that shares make: based on docs/sharding.md, not on the compiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import same_bits

Here = Mapping[str, int]  # axis -> coordinate
NEUTRAL = {"sum": 0, "product": 1}  # value on all ranks except the first of a pending leaf
REDUCED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def runs_of(by: DimSharding, size: int, mesh: Mesh, here: Here) -> list[range]:
    """Return the elements of a dim at a coordinate, as runs in the order in which they are held."""
    if by.parts:
        begins = itertools.accumulate((length for length, _ in by.parts), initial=0)
        held = zip(begins, by.parts, strict=False)
        return [
            range(begin + run.start, begin + run.stop)
            for begin, (length, how) in held
            for run in runs_of(how, length, mesh, here)
        ]
    if by.spans:
        places = itertools.product(*(range(mesh.degree(axis)) for axis in by.axes))
        own = dict(zip(places, by.spans, strict=True))[tuple(here[axis] for axis in by.axes)]
        return [range(size)[slice(*own)]]
    runs = [range(size)]
    for axis, block, unit in by.levels:
        if block:
            runs = [run[at : at + block] for run in runs for at in range(0, len(run), block)]
        ends = ends_of(len(runs[0]) // unit if runs else 0, axis, mesh)
        runs = [run[ends[here[axis]] * unit : ends[here[axis] + 1] * unit] for run in runs]
    return [run for run in runs if len(run)]


def ends_of(units: int, axis: str, mesh: Mesh) -> list[int]:
    """Return where the units of each rank begin, and the end.

    As many are dealt to each rank as to the first, until none are left. Of unequal shares each rank has the integer
    part, and those with the largest remainders, the first of equal ones, have one more.
    """
    degree, shares = mesh.degree(axis), dict(mesh.shares).get(axis)
    if shares is None:
        each = math.ceil(units / degree)
        return [min(at * each, units) for at in range(degree + 1)]
    exact = [Fraction(units * share, sum(shares)) for share in shares]
    counts = [math.floor(part) for part in exact]
    for rank in sorted(range(degree), key=lambda at: counts[at] - exact[at])[: units - sum(counts)]:
        counts[rank] += 1
    return list(itertools.accumulate(counts, initial=0))


def local_size(by: DimSharding, size: Any, mesh: Mesh, here: Here) -> Any:
    """Return the number of elements at a coordinate; for a dynamic dim, an equal share."""
    if not isinstance(size, int):
        return size // math.prod(mesh.degree(axis) for axis in by.axes) if by.axes else size
    return sum(map(len, runs_of(by, size, mesh, here)))


def local_shape(sharding: Sharding, shape: Sequence[Any], mesh: Mesh, here: Here) -> tuple[Any, ...]:
    return tuple(local_size(by, size, mesh, here) for by, size in zip(sharding.dims, shape, strict=True))


def cut(value: torch.Tensor, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the share of a rank; the first of a pending axis has the value, the others zeros (ones for products)."""
    here = mesh.coordinate(rank)
    for dim, by in enumerate(sharding.dims):
        if by.axes:
            runs = runs_of(by, value.shape[dim], mesh, here) or [range(0)]
            value = torch.cat([value.narrow(dim, run.start, len(run)) for run in runs], dim)
    for axis, op in sharding.partial:
        if here[axis] and op in NEUTRAL:
            value = torch.full_like(value, NEUTRAL[op])
    return value


def join(parts: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh, shape: Sequence[int]) -> list[torch.Tensor]:
    """Join the ranks' shares to every whole: one for each coordinate on the axes with replicas.

    Where ranks share a part of a dim, each that differs there from the last gives another whole.

    Raises:
        ValueError: a share has another shape than its sharding implies.
    """
    replicas: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    pending, is_cut = [axis for axis, _ in sharding.partial], bool(sharding.cut_axes)
    for rank, part in enumerate(parts):
        here = mesh.coordinate(rank)
        if tuple(part.shape) != local_shape(sharding, shape, mesh, here):
            raise ValueError(f"rank {rank} holds {list(part.shape)} of {list(shape)} as {sharding.text(mesh)}")
        replica = replicas.setdefault(tuple(at for axis, at in here.items() if axis not in sharding.axes), {})
        term = tuple(here[axis] for axis in pending)
        if not is_cut:
            replica[term] = part
            continue
        whole = replica.setdefault(term, part.new_empty(tuple(shape)))
        _put(part, whole, sharding, mesh, here)
    wholes = [_reduced(terms, sharding, mesh) for terms in replicas.values()]
    if not any(len({frozenset(how.axes) for _, how in by.parts}) > 1 for by in sharding.dims):
        return wholes
    for rank, part in enumerate(parts):
        here = mesh.coordinate(rank)
        terms = replicas[tuple(at for axis, at in here.items() if axis not in sharding.axes)]
        term = tuple(here[axis] for axis in pending)
        changed = _put(part, terms[term].clone(), sharding, mesh, here)
        if not same_bits(changed, terms[term]):
            wholes.append(_reduced({**terms, term: changed}, sharding, mesh))
    return wholes


def _put(part: torch.Tensor, whole: torch.Tensor, sharding: Sharding, mesh: Mesh, here: Here) -> torch.Tensor:
    """Write a rank's elements to their places in the whole, and return it."""
    for theirs, ours in _places(sharding, whole.shape, mesh, here):
        whole[theirs] = part[ours]
    return whole


def reduce_terms(parts: Sequence[torch.Tensor], sharding: Sharding, mesh: Mesh) -> list[torch.Tensor]:
    """Return every rank's share with the terms of the ranks that differ from it on pending axes alone."""
    pending = [axis for axis, _ in sharding.partial]
    terms: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    places = []
    for rank, part in enumerate(parts):
        here = mesh.coordinate(rank)
        places.append(tuple(at for axis, at in here.items() if axis not in pending))
        terms.setdefault(places[-1], {})[tuple(here[axis] for axis in pending)] = part
    reduced = {place: _reduced(own, sharding, mesh) for place, own in terms.items()}
    return [reduced[place] for place in places]


def _places(sharding: Sharding, shape: Sequence[int], mesh: Mesh, here: Here) -> Iterator[tuple[Any, Any]]:
    """Yield the place of each box of a rank's share in the whole, and in the share."""
    sides = []
    for by, size in zip(sharding.dims, shape, strict=True):
        runs = runs_of(by, size, mesh, here)
        ends = list(itertools.accumulate(map(len, runs), initial=0))
        sides.append(
            [(slice(r.start, r.stop), slice(*own)) for r, own in zip(runs, itertools.pairwise(ends), strict=True)]
        )
    for box in itertools.product(*sides):
        yield tuple(theirs for theirs, _ in box), tuple(ours for _, ours in box)


def _reduced(terms: dict[tuple[int, ...], torch.Tensor], sharding: Sharding, mesh: Mesh) -> torch.Tensor:
    """Reduce the terms at every coordinate on the pending axes, axis by axis, the last first."""
    for axis, op in reversed(sharding.partial):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at, term in terms.items():
            groups.setdefault(at[:-1], []).append(term)
        terms = {at: _reduced_by(op, values, mesh.degree(axis)) for at, values in groups.items()}
    (whole,) = terms.values()
    return whole


def _reduced_by(op: str, values: Sequence[torch.Tensor], degree: int) -> torch.Tensor:
    first, *others = values
    if op in NEUTRAL and all(bool((each == NEUTRAL[op]).all()) for each in others):
        return first  # bit for bit: 0 and -0 make 0
    for each in others:
        first = REDUCED[op](first, each)
    return first / degree if op == "avg" else first
