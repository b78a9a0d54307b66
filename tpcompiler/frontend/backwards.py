"""Backwards in simpler ops, which have rules; torch's tables leave them whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpcompiler._torch import OpOverload, aten, sym_hint
from tpcompiler.ir.sizes import are_equal, statically_equal

MEAN, MAX = 1, 2  # modes of a bag


def _convolution(grad: torch.Tensor, x: Any, weight: Any, bias_sizes: Any, *rest: Any) -> Any:
    """Compute the gradient of the bias as a sum, and the others by the op."""
    *settings, (of_input, of_weight, of_bias) = rest
    if not of_bias:
        return NotImplemented
    others = [None, None]
    if of_input or of_weight:
        op = aten.convolution_backward.default
        others = op(grad, x, weight, None, *settings, [of_input, of_weight, False])[:2]
    return (*others, grad.sum([0, *range(2, grad.ndim)]))


def _to_be_written(x: torch.Tensor, size: Any, stride: Any, **options: Any) -> Any:
    """Create the memory that a backward of writes fills; zeros, which ranks can create for their shards."""
    dtype, device = options.get("dtype") or x.dtype, options.get("device") or x.device
    order = sorted(range(len(size)), key=lambda dim: (-sym_hint(stride[dim]), dim))  # outermost first
    made = aten.full.default([size[dim] for dim in order], 0, dtype=dtype, device=device)
    made = made if order == sorted(order) else made.permute([order.index(dim) for dim in range(len(order))])
    return made if are_equal(made.stride(), stride) else NotImplemented


def _as_it_lies(x: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return the whole value in other sizes, without a change in memory."""
    same = are_equal(x.shape, size) and _lie_alike(size, x.stride(), stride)
    is_own = storage_offset in (None, x.storage_offset())
    return x.view(size) if is_own and (same or _is_all_in_rows(x, size, stride)) else NotImplemented


def _write_as_it_lies(x: torch.Tensor, new: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Return what is written over a whole value."""
    is_own = storage_offset in (None, x.storage_offset())
    return new.reshape(x.shape) if is_own and _is_all_in_rows(x, size, stride) else NotImplemented


def _is_all_in_rows(x: torch.Tensor, size: Any, stride: Any) -> bool:
    """Return True if sizes and strides give all numbers of a value that lies row-major."""
    own, rows = (_row_major(sizes) for sizes in (x.shape, size))
    is_all = statically_equal(math.prod(size), math.prod(x.shape))
    return is_all and _lie_alike(x.shape, x.stride(), own) and _lie_alike(size, stride, rows)


def _row_major(size: Any) -> list[Any]:
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def _lie_alike(size: Any, one: Any, other: Any) -> bool:
    """Return True if the strides are equal where they count: those of dims of size 1 do not."""
    pairs = ((a, b) for count, a, b in zip(size, one, other, strict=True) if not statically_equal(count, 1))
    return all(statically_equal(a, b) for a, b in pairs)


def _weight_norm(grad: torch.Tensor, v: Any, g: Any, norms: Any, dim: int) -> Any:
    """Differentiate g * v / |v|, where norms of rows (or columns) are given."""
    others = [d for d in range(v.ndim) if d != dim]
    along = (grad * v).sum(others, keepdim=True) / norms
    return g / norms * (grad - v * (along / norms)), along


def _bags(
    grad: torch.Tensor,
    ids: Any,
    offsets: Any,
    bag_of_id: Any,
    counts: Any,
    largest: Any,
    rows: Any,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: Any = None,
    padding: int = -1,
) -> Any:
    """Add each bag's gradient to the rows of its ids; of a maximum, to the row that each feature was taken from."""
    if by_frequency or sparse:
        return NotImplemented
    zeros = grad.new_zeros(rows, grad.shape[1])
    if mode == MAX:
        empty = (counts == 0).unsqueeze(-1)
        return zeros.scatter_add(0, largest.to(torch.int64).clamp(min=0), grad.masked_fill(empty, 0))
    if mode == MEAN:
        grad = grad / counts.to(grad.dtype).clamp(min=1).unsqueeze(-1)
    each = grad.index_select(0, _bag_of_each(ids, offsets, bag_of_id))
    if weights is not None:
        each = each * weights.unsqueeze(-1)
    if padding >= 0:
        each = each.masked_fill((ids == padding).unsqueeze(-1), 0)
    return zeros.index_put([ids], each, accumulate=True)


def _bag_of_each(ids: torch.Tensor, offsets: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return the bag of each id; the forward leaves it out where it only sums."""
    if known.shape[0]:
        return known
    ones = torch.ones_like(offsets)
    begun = ones.new_zeros(ids.shape[0] + 1).index_put([offsets], ones, accumulate=True)
    return begun[: ids.shape[0]].cumsum(0) - 1


def _weights_of_bags(
    grad: torch.Tensor, table: Any, ids: Any, offsets: Any, bag_of_id: Any, mode: int, padding: int = -1
) -> Any:
    """Multiply each bag's gradient with the rows of its ids."""
    bags = _bag_of_each(ids, offsets, bag_of_id)
    each = (grad.index_select(0, bags) * aten.embedding.default(table, ids)).sum(-1)
    return each.masked_fill(ids == padding, 0) if padding >= 0 else each


def _masked_scatter(grad: torch.Tensor, mask: Any, sizes: Any) -> Any:
    """Take the gradients at the mask, in their order; of numbers that were not used, zero."""
    mask = mask.expand(grad.shape).reshape(-1)
    place = (mask.to(torch.int64).cumsum(0) - 1).clamp(min=0)
    zeros = grad.new_zeros(sizes).reshape(-1)
    return zeros.index_put([place], torch.where(mask, grad.reshape(-1), 0), accumulate=True).reshape(sizes)


IN_SIMPLER_OPS: Mapping[OpOverload, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution,
    aten.new_empty_strided.default: _to_be_written,
    aten.as_strided.default: _as_it_lies,
    aten.as_strided_scatter.default: _write_as_it_lies,
    aten._weight_norm_interface_backward.default: _weight_norm,
    aten._embedding_bag_backward.default: _bags,
    aten._embedding_bag_per_sample_weights_backward.default: _weights_of_bags,
    aten.masked_scatter_backward.default: _masked_scatter,
}
