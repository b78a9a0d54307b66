"""Price the changes of sharding between choices; equivalent changes are priced once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch

from tpcompiler._torch import sym_hint
from tpcompiler.cost.objective import Objective
from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir.dim_sharding import DimSharding, Size, divides
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.turn import Memo

# Seconds: prices are whole numbers of it, so that equal sums are equal whatever their order. Sums above 0.9 s are
# rounded to 53 bits: of all samples on a rank (`ALL_SAMPLES`) they are, and ties in the rest may then break otherwise.
UNIT = 1e-16


def in_units(seconds: Any) -> numpy.ndarray:
    return numpy.ceil(numpy.asarray(seconds) / UNIT)


def price_changes(
    have: Sequence[Sharding],
    want: Sequence[Sharding],
    tensor: torch.Tensor,
    mesh: Mesh,
    objective: Objective,
    known: Memo,
    refused: float | None = None,
) -> numpy.ndarray:
    """The seconds of every change of a value from one of `have` (a row) to one of `want`.

    Args:
        refused: of a weight, the price of a change that sends anything.
        known: what was found before, on any mesh.
    """

    def price(source: Sharding, target: Sharding) -> float:
        if refused is not None and reshard_wire_bytes(source, target, tensor.shape, tensor.itemsize, mesh):
            return refused
        return objective.change_seconds(source, target, tensor, mesh)

    def look_up(source: Sharding, target: Sharding) -> float:
        if source == target:
            return 0.0
        alike = _alike(source, target, tensor, mesh), mesh, refused
        return known.once(alike, partial(price, source, target))

    rows, columns = dict.fromkeys(have), dict.fromkeys(want)
    cells = [[look_up(source, target) for target in columns] for source in rows]
    at, to = ({sharding: i for i, sharding in enumerate(each)} for each in (rows, columns))
    return numpy.asarray(cells)[numpy.ix_([at[own] for own in have], [to[own] for own in want])]


def _alike(source: Sharding, target: Sharding, tensor: torch.Tensor, mesh: Mesh) -> tuple[Any, ...]:
    """Equal for changes with equal collectives: of as many bytes, between cuts of dims that are alike.

    The size of a dim counts only where not all axes of the change divide it, or where it is cut in blocks or parts;
    its place, where that is the first: its shares need no copy.
    """
    ranks, is_unequal = mesh.size(mesh.ordered(source.axes | target.axes)), mesh.is_unequal(source.axes | target.axes)

    def is_even(have: DimSharding, want: DimSharding, size: Size) -> bool:
        return _is_plain(have) and _is_plain(want) and divides(size, ranks) and not is_unequal

    dims = tuple(
        (at > 0, have, want, 0 if is_even(have, want, size) else sym_hint(size), type(size))
        for at, (have, want, size) in enumerate(zip(source.dims, target.dims, tensor.shape, strict=True))
        if have.axes or want.axes
    )
    return dims, source.partial, target.partial, sym_hint(tensor.numel()), tensor.element_size()


def _is_plain(cut: DimSharding) -> bool:
    return not cut.parts and all(not level.block and level.unit == 1 for level in cut.levels)


def find_common(
    made: Sequence[Sharding], uses: Sequence[Sequence[Sharding]], most: int
) -> tuple[tuple[Sharding, ...], bool]:
    """Return the shardings to which a value may change once for all users, and True if some were left out."""
    wanted = Counter(sharding.without_spans for use in uses for sharding in use)
    first = [sharding for sharding in made if sharding in wanted and sharding.is_replicated]
    domain = tuple(dict.fromkeys([*first, *(sharding for sharding, _ in wanted.most_common())]))
    return domain[:most], len(domain) > most
