"""The layout of one tensor dim: the axes that shard it, in which unit, in which blocks, piece by piece in parts, or in
spans that overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sizes import statically_equal, sym_quotient

Size = Any  # int or torch.SymInt, which torch's stubs do not relate


def chunk(size: Size, degree: int | tuple[int, ...], index: int, unit: int = 1) -> tuple[Size, Size]:
    """Return offset and size of chunk `index` when `size` elements are dealt out in whole units, first ranks first.

    Follows `torch.chunk`: every chunk has ceil(units / degree) units until they run out, so the last chunks may be
    smaller or empty. A symbolic size must be divisible by `degree` units (`divides`).

    With shares such as (2, 1, 1) instead of a degree, every chunk has as many units as is nearest to its share. No
    symbolic size is cut so in the end (`infer._check`).
    """
    if isinstance(degree, tuple):
        units = apportion(size // unit, degree) if isinstance(size, int) else degree
        each = unit if isinstance(size, int) else size // sum(degree)
        return sum(units[:index]) * each, units[index] * each
    if not isinstance(size, int):
        return size // degree * index, size // degree
    step = -(-(size // unit) // degree) * unit
    start = min(index * step, size)
    return start, min(start + step, size) - start


@lru_cache(maxsize=1 << 12)
def apportion(units: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return the whole units of each rank: the integer part of its share, and one more for the largest remainders.

    The method of largest remainders (Hamilton, 1792). Equal remainders favour the first ranks.
    """
    parts = [divmod(units * share, sum(shares)) for share in shares]
    left = units - sum(whole for whole, _ in parts)
    more = sorted(range(len(shares)), key=lambda at: (-parts[at][1], at))[:left]
    return tuple(whole + (at in more) for at, (whole, _) in enumerate(parts))


def divides(size: Size, pieces: int) -> bool:
    """Return True if a size is a multiple of `pieces` in every run."""
    return sym_quotient(size, pieces) is not None


class Level(NamedTuple):
    """One axis that shards a dim between units of `unit` elements.

    With a block, it shards every block of that many elements. With 0, it shards the piece that the previous axis left,
    or the whole dim if it is the first axis.
    """

    axis: str
    block: int = 0
    unit: int = 1


@dataclass(frozen=True)
class DimSharding:
    """The axes that shard one tensor dim, outermost first.

    A dim in `parts` has no levels: it consists of pieces in a row, each with its size and its own `DimSharding`.

    With `spans`, the ranks hold these elements instead, (start, stop) for every coordinate on the axes, the last axis
    fastest. They may overlap or leave elements out, as the rows under windows do. Only operands are sharded so.
    """

    levels: tuple[Level, ...] = ()
    parts: tuple[tuple[int, DimSharding], ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    def __hash__(self) -> int:  # the search looks up the same few shardings all the time
        cache = self.__dict__
        if "hash" not in cache:
            cache["hash"] = hash((self.levels, self.parts, self.spans))
        return cache["hash"]  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:  # hashes differ between processes, so the cached one must not be pickled
        return DimSharding, (self.levels, self.parts, self.spans)

    @classmethod
    def by(cls, *axes: str, block: int = 0, unit: int = 1) -> DimSharding:
        """Shard by these nested axes, all with the same unit; only the first has blocks."""
        return cls(tuple(Level(axis, 0 if i else block, unit) for i, axis in enumerate(axes)))

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[int, DimSharding]]) -> DimSharding:
        """Return the simplest cut of a dim that consists of these pieces: equal pieces become blocks, empty ones go."""
        runs: list[tuple[int, DimSharding, int]] = []  # size, cut, block
        for size, cut in (piece for length, whole in parts if length for piece in (whole.parts or ((length, whole),))):
            block = cut.block or size
            before, how, its = runs[-1] if runs else (0, cut, 0)
            if runs and not how.axes and not cut.axes:
                runs[-1] = (before + size, how, before + size)
            elif runs and its == block and how.of_block(0) == cut.of_block(0):
                runs[-1] = (before + size, how, its)
            else:
                runs.append((size, cut, block))
        pieces = [(size, cut.of_block(block if block < size else 0)) for size, cut, block in runs]
        return cls(parts=tuple(pieces)) if len(pieces) > 1 else pieces[0][1] if pieces else WHOLE

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes of all levels and of all parts."""
        inside = (axis for _, cut in self.parts for axis in cut.axes)
        return tuple(level.axis for level in self.levels) + tuple(dict.fromkeys(inside))

    @property
    def block(self) -> int:
        """The block of the outermost axis."""
        return self.levels[0].block if self.levels else 0

    @property
    def is_plain(self) -> bool:
        """True if the axes shard the dim in one piece, between any two elements."""
        return not self.parts and all(level.block == 0 and level.unit == 1 for level in self.levels)

    def level(self, axis: str) -> Level:
        return next(level for level in self.levels if level.axis == axis)

    def of_block(self, block: int) -> DimSharding:
        """Return the same cut with this block for the outermost axis."""
        return replace(self, levels=(self.levels[0]._replace(block=block), *self.levels[1:])) if self.levels else self

    def slice(self, start: int, stop: int, size: int) -> DimSharding | None:
        """Return the cut of the elements from `start` to `stop` of a dim of `size`; None if no cut expresses it."""
        if not self.axes or start == stop:
            return WHOLE
        if self.spans:
            return self if (start, stop) == (0, size) else None
        if self.parts:
            pieces, at = [], 0
            for length, cut in self.parts:
                low, high = max(start, at), min(stop, at + length)
                if low < high:
                    piece = cut.slice(low - at, high - at, length)
                    if piece is None:
                        return None
                    pieces.append((high - low, piece))
                at += length
            return DimSharding.of_parts(pieces)
        block = self.block or size
        if start % block or stop % block:
            return None
        return self.of_block(block if stop - start > block else 0)

    def scale(self, times: int, size: int, mesh: Mesh) -> DimSharding:
        """Return the cut of a dim of `size` elements after each element becomes `times` elements in a row."""
        if self.parts:
            return DimSharding.of_parts([(n * times, cut.scale(times, n, mesh)) for n, cut in self.parts])
        unit = 1 if self.is_exact(size, mesh) else times
        return DimSharding(tuple(Level(a, block * times, own * unit) for a, block, own in self.levels))

    def unscale(self, by: int, size: int, mesh: Mesh) -> DimSharding | None:
        """Invert `scale`: return the cut that it scales to this one; None if this cut splits such a run."""
        if self.parts:
            parts = [(n // by, cut.unscale(by, n, mesh)) for n, cut in self.parts]
            if any(n % by for n, _ in self.parts) or any(cut is None for _, cut in parts):
                return None
            return DimSharding.of_parts([(n, cut) for n, cut in parts if cut is not None])
        candidate = DimSharding(tuple(Level(a, block // by, max(unit // by, 1)) for a, block, unit in self.levels))
        return candidate if size % by == 0 and candidate.scale(by, size // by, mesh) == self else None

    def drop_axis(self, axis: str) -> DimSharding:
        """Return the cut of all axes except `axis`."""
        parts = [(size, cut.drop_axis(axis)) for size, cut in self.parts]
        remainder = DimSharding(tuple(level for level in self.levels if level.axis != axis))
        return DimSharding.of_parts(parts) if parts else remainder

    def restrict_to(self, axes: Collection[str], size: Size, mesh: Mesh) -> DimSharding:
        """Return the cut of `axes` alone, for a dim of `size`; pieces of the other axes become blocks."""
        if self.parts:
            return DimSharding.of_parts([(length, cut.restrict_to(axes, length, mesh)) for length, cut in self.parts])
        levels, left = list[Level](), 0
        for axis, block, unit in self.levels:
            piece = chunk(block or size, mesh.deals(axis), 0, unit)[1]
            if axis in axes:
                levels.append(Level(axis, block or left, unit))
                left = 0
            else:
                even = isinstance(size, int) and (block or size) % mesh.degree(axis) == 0
                left = piece if even and not mesh.is_unequal([axis]) else 0
            size = piece
        return DimSharding(tuple(levels))

    def axis_part(self, axis: str) -> DimSharding:
        """Return the cut of `axis` alone."""
        parts = [(size, cut.axis_part(axis)) for size, cut in self.parts]
        remainder = DimSharding(tuple(level for level in self.levels if level.axis == axis))
        return DimSharding.of_parts(parts) if parts else remainder

    def split_axis(self, axis: str, parts: Sequence[str]) -> DimSharding:
        """Return the same cut on a mesh that has the nested axes `parts` instead of `axis`."""
        levels: list[Level] = []
        for level in self.levels:
            inner = [Level(part, 0, level.unit) for part in parts[1:]]
            levels += [level._replace(axis=parts[0]), *inner] if level.axis == axis else [level]
        return DimSharding(
            tuple(levels), tuple((size, cut.split_axis(axis, parts)) for size, cut in self.parts), self.spans
        )

    def join_axis(self, axis: str, parts: Sequence[str]) -> DimSharding:
        """Invert `split_axis`, for a cut that it makes."""
        levels = [each._replace(axis=axis) if each.axis == parts[0] else each for each in self.levels]
        kept = tuple(level for level in levels if level.axis not in parts)
        return DimSharding(kept, tuple((size, cut.join_axis(axis, parts)) for size, cut in self.parts), self.spans)

    @property
    def without_spans(self) -> DimSharding:
        """The cut into shares that do not overlap, by the same axes."""
        return DimSharding(self.levels, self.parts) if self.spans else self

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> DimSharding:
        """Return the cut by the same axes in which the ranks hold these elements."""
        return DimSharding(self.levels, self.parts, tuple(spans))

    def coordinates(self, mesh: Mesh) -> Iterator[dict[str, int]]:
        """Yield every coordinate on the axes, the last axis fastest."""
        for place in itertools.product(*(range(mesh.degree(axis)) for axis in self.axes)):
            yield dict(zip(self.axes, place, strict=True))

    def span(self, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
        """Return the span at a coordinate."""
        at = 0
        for axis in self.axes:
            at = at * mesh.degree(axis) + coordinate[axis]
        return self.spans[at]

    def nest(self, inner: DimSharding) -> DimSharding:
        """Return this cut with `inner` nested in each piece; unchanged if the two have different parts."""
        if not self.axes:
            return inner
        if self.parts or inner.parts:
            if [size for size, _ in self.parts] != [size for size, _ in inner.parts]:
                return self
            pairs = zip(self.parts, inner.parts, strict=True)
            return DimSharding.of_parts([(size, cut.nest(by)) for (size, cut), (_, by) in pairs])
        same = bool(self.block) and inner.block == self.block  # each block's remainder is a piece
        return DimSharding((*self.levels, *(inner.of_block(0) if same else inner).levels))

    def simplify(self, size: Size, mesh: Mesh) -> DimSharding:
        """Return the same cut of a dim of `size` without blocks that are all of a piece."""
        levels, piece = list[Level](), size
        for level in self.levels:
            levels.append(level._replace(block=0) if statically_equal(level.block, piece) else level)
            piece = chunk(level.block or piece, mesh.deals(level.axis), 0, level.unit)[1]  # rank 0 has the largest
        return replace(self, levels=tuple(levels))

    def find_misfit(self, size: Size, mesh: Mesh) -> str:
        """Return why a dim of `size` elements cannot have this cut, or "" if it can.

        On every rank, every piece that a level cuts must be whole blocks and whole units.
        """
        if self.spans:
            within = all(0 <= start <= stop <= size for start, stop in self.spans)
            return "" if within and len(self.spans) == mesh.size(self.axes) else "the spans are not one for each rank"
        if self.parts:
            inside = (cut.find_misfit(length, mesh) for length, cut in self.parts)
            total = sum(length for length, _ in self.parts)
            return next(filter(None, inside), "") if total == size else f"the parts add up to {total}"
        for here in () if self.is_plain else self.coordinates(mesh):
            piece = size
            for axis, block, unit in self.levels:
                if block and isinstance(piece, int) and piece % block:
                    return f"{piece} elements have no blocks of {block}"
                piece = block or piece
                if isinstance(piece, int) and piece % unit:
                    return f"{piece} elements have no units of {unit}"
                piece = chunk(piece, mesh.deals(axis), here[axis], unit)[1]
        return ""

    def pieces(self, size: Size, mesh: Mesh, coordinate: Mapping[str, int]) -> Iterator[tuple[Level, Size, Size]]:
        """Yield for each level the number of blocks and the size of the piece of each block at `coordinate`."""
        count, piece = 1, size
        for level in self.levels:
            if level.block:
                count, piece = count * (piece // level.block), level.block
            piece = chunk(piece, mesh.deals(level.axis), coordinate[level.axis], level.unit)[1]
            yield level, count, piece

    def share(self, size: Size, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Size, Size]:
        """Return (offset, size) of the shard at `coordinate`, for a dim without parts and blocks."""
        assert not self.parts
        if self.spans:
            start, stop = self.span(mesh, coordinate)
            return start, stop - start
        offset: Size = 0
        for axis, block, unit in self.levels:
            assert not block
            start, size = chunk(size, mesh.deals(axis), coordinate[axis], unit)
            offset = offset + start
        return offset, size

    def runs(self, size: int, mesh: Mesh, coordinate: Mapping[str, int]) -> list[range]:
        """Return the elements that lie at `coordinate`, as runs in order; runs that touch are one, none is empty."""
        runs: list[range] = []
        for run in self._runs(range(size), mesh, coordinate):
            if runs and runs[-1].stop == run.start:
                runs[-1] = range(runs[-1].start, run.stop)
            elif run:
                runs.append(run)
        return runs

    def _runs(self, whole: range, mesh: Mesh, coordinate: Mapping[str, int]) -> Iterator[range]:
        if self.spans:
            yield whole[slice(*self.span(mesh, coordinate))]
            return
        if self.parts:
            for length, cut in self.parts:
                yield from cut._runs(whole[:length], mesh, coordinate)
                whole = whole[length:]
            return
        if not self.levels:
            yield whole
            return
        axis, block, unit = self.levels[0]
        inner = DimSharding(self.levels[1:])
        for at in range(0, len(whole), block or max(len(whole), 1)):
            start, size = chunk(block or len(whole), mesh.deals(axis), coordinate[axis], unit)
            yield from inner._runs(whole[at + start : at + start + size], mesh, coordinate)

    def local_size(self, size: Size, mesh: Mesh, coordinate: Mapping[str, int]) -> Size:
        if self.parts:
            return sum(cut.local_size(length, mesh, coordinate) for length, cut in self.parts)
        if self.spans:
            return self.share(size, mesh, coordinate)[1]
        for _, count, piece in self.pieces(size, mesh, coordinate):
            size = count * piece
        return size

    def is_even(self, size: Size, mesh: Mesh) -> bool:
        """Return True if every rank holds the same number of elements, each an equal share of the dim."""
        return not mesh.is_unequal(self.axes) and self.is_exact(size, mesh)

    def is_exact(self, size: Size, mesh: Mesh) -> bool:
        """Return True if every rank holds exactly its share of the dim, equal or not, whatever the units are."""
        if self.spans:
            return False
        if self.parts:
            return all(cut.is_exact(length, mesh) for length, cut in self.parts)
        for axis, block, unit in self.levels:
            size, pieces = block or size, mesh.pieces(axis)
            if not divides(size, pieces * unit):
                return False
            size = size // pieces
        return True


WHOLE = DimSharding()
