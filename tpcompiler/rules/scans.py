"""Running sums, products and extrema: a result depends on all elements before it, so the rules keep the dim whole.

Each rank can scan its shard and join it with the totals of the ranks before: they exchange one number per line and
rank, and for an extremum its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tpcompiler._torch import aten
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.reductions import linear_cast, softmax
from tpcompiler.rules.registry import op_rule, op_variant
from tpcompiler.rules.variants import Pieces, count_along, widen

SCANS = aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin


@op_rule(*(op.default for op in SCANS), shards="any")
def scan(node: fx.Node) -> RuleText:
    """ "d0 d1! -> d0 d1!", and positions, which count within a line. Only a running sum is linear."""
    return RuleText(softmax(node), linear=linear_cast(node) if node.target is aten.cumsum.default else ())


def _scanned_extrema(
    op: Callable[..., tuple[Tensor, Tensor]],
    is_beyond: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    dim: int,
    *,
    pieces: Pieces,
) -> Any:
    """Scan every block by itself, and join it with the blocks before: the last of equal extrema counts, and any NaN."""
    at = dim % max(x.ndim, 1)
    count = pieces.get(at, 1)
    if x.ndim == 0 or type(size := x.shape[at]) is not int or size % count or not size:
        return NotImplemented
    own, within = op(aten.unflatten.int(x, at, [count, -1]), at + 1)
    places = within + count_along(count, at, within) * (size // count)
    before, block = op(_shifted(own.select(at + 1, -1), at, _least(x.dtype, is_beyond is torch.ge)), at)
    places_before = _shifted(places.select(at + 1, -1), at, 0).gather(at, block)
    before, places_before = before.unsqueeze(at + 1), places_before.unsqueeze(at + 1)
    stays = is_beyond(own, before) | own.isnan()
    both = torch.where(stays, own, before), torch.where(stays, places, places_before)
    return both[0].flatten(at, at + 1), both[1].flatten(at, at + 1)


def _least(dtype: torch.dtype, is_maximum: bool) -> float:
    """Return a number that no other of the dtype is behind, in a search for the maximum or the minimum."""
    if dtype.is_floating_point:
        return -math.inf if is_maximum else math.inf
    if dtype is torch.bool:
        return not is_maximum
    return torch.iinfo(dtype).min if is_maximum else torch.iinfo(dtype).max


def _scanned(
    op: Callable[..., Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    start: float,
    x: Tensor,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    pieces: Pieces,
) -> Any:
    """Scan every block by itself, then join each with the scan of the totals of the blocks before it."""
    size = x.shape[dim] if x.ndim else 0
    at = dim % max(x.ndim, 1)
    count = pieces.get(at, 1)
    if sym_quotient(size, count) is None or (isinstance(size, int) and size == 0):
        return NotImplemented  # blocks of several sizes
    if join is torch.logaddexp and x.is_complex():
        return NotImplemented
    result_dtype = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    wide = widen(x.to(result_dtype))
    run = op if join is torch.logaddexp else partial(op, dtype=wide.dtype)  # narrow integers would become wide
    own = run(aten.unflatten.int(wide, at, [count, -1]), at + 1)
    before = run(_shifted(own.select(at + 1, -1), at, start), at)
    return join(own, before.unsqueeze(at + 1)).flatten(at, at + 1).to(result_dtype)


def _shifted(totals: Tensor, dim: int, start: float) -> Tensor:
    """Return for each block the total of the block before it, and `start` for the first."""
    first = torch.full_like(totals.narrow(dim, 0, 1), start)
    return torch.cat([first, totals.narrow(dim, 0, totals.shape[dim] - 1)], dim)


op_variant(aten.cumsum.default)(partial(_scanned, torch.cumsum, torch.add, 0))
op_variant(aten.cumprod.default)(partial(_scanned, torch.cumprod, torch.mul, 1))
op_variant(aten.logcumsumexp.default)(partial(_scanned, torch.logcumsumexp, torch.logaddexp, -math.inf))
op_variant(aten.cummax.default)(partial(_scanned_extrema, torch.cummax, torch.ge))
op_variant(aten.cummin.default)(partial(_scanned_extrema, torch.cummin, torch.le))
