"""Ops as functions of simpler ops, for dims that are sharded although the op's own rule needs them whole.

Each rank then works on its share, and the ranks exchange one or two numbers per line: a maximum, a sum. The search
picks a variant if it is cheaper than the op on the whole (`solver/variants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tpcompiler._torch import aten
from tpcompiler.rules.registry import op_variant

Tensor = torch.Tensor
Pieces = Mapping[int, int]  # the number of shards, by dim of the operand


@op_variant(aten.softmax.int)
def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    cast = x if dtype is None else x.to(dtype)
    wide = widen(cast)
    powers = (wide - wide.amax([dim], True)).exp()
    return (powers / powers.sum([dim], True)).to(cast.dtype)


@op_variant(aten._softmax.default)
def softmax_to_float(x: Tensor, dim: int, to_float: bool) -> Tensor:
    return softmax(x, dim, torch.float32 if to_float else None)


@op_variant(aten._safe_softmax.default)
def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros for a line that is all -inf."""
    is_empty = x.amax([dim], True) == -math.inf
    return softmax(x.masked_fill(is_empty, 0.0), dim, dtype).masked_fill(is_empty, 0.0)


@op_variant(aten.log_softmax.int)
def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    cast = x if dtype is None else x.to(dtype)
    wide = widen(cast)
    centred = wide - wide.amax([dim], True)
    return (centred - centred.exp().sum([dim], True).log()).to(cast.dtype)


@op_variant(aten._log_softmax.default)
def log_softmax_to_float(x: Tensor, dim: int, to_float: bool) -> Tensor:
    return log_softmax(x, dim, torch.float32 if to_float else None)


@op_variant(aten._softmax_backward_data.default)
def softmax_backward(grad: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide, weighted = widen(result), widen(grad) * widen(result)
    return (weighted - wide * weighted.sum([dim], True)).to(dtype)


@op_variant(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide = widen(grad)
    return (wide - widen(result).exp() * wide.sum([dim], True)).to(dtype)


@op_variant(aten.scaled_dot_product_attention.default)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend with sharded keys and values: reduce the maximum score per query, then the sums, in one collective.

    A rank whose keys are all masked adds nothing; a query without any key yields zeros. Causal attention becomes
    attention with a mask of the visible keys, so that its queries can be sharded.
    """
    if dropout:
        return NotImplemented
    if is_causal:
        queries, keys = (torch.arange(value.shape[-2], device=value.device) for value in (q, k))
        visible = keys <= queries.unsqueeze(-1)
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=enable_gqa)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:  # group the queries of each kv head
        count = k.shape[-3]
        q, k, v = aten.unflatten.int(q, -3, [count, -1]), k.unsqueeze(-3), v.unsqueeze(-3)
        if mask is not None and mask.ndim > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else aten.unflatten.int(mask, -3, [count, -1])
    scores = widen(q) @ widen(k).transpose(-1, -2) * scale
    if mask is not None:
        if mask.dtype == torch.bool:  # added, as torch's kernels do: NaN in a masked key stays NaN
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
        scores = scores + mask
    greatest = scores.amax([-1], True)
    powers = (scores - greatest.masked_fill(greatest == -math.inf, 0.0)).exp()
    both = torch.cat([powers @ widen(v), powers.sum([-1], True)], -1)  # one collective for both
    total = both[..., -1:]
    result = (both[..., :-1] / total.masked_fill(total == 0, 1.0)).to(q.dtype)
    return result.flatten(-4, -3) if enable_gqa else result


@op_variant(aten.native_layer_norm.default)
def native_layer_norm(
    x: Tensor, shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(-len(shape), 0))
    wide = widen(x)
    mean = wide.mean(dims, True)
    centred = wide - mean
    scale = ((centred * centred).mean(dims, True) + eps).rsqrt()
    return _scaled(centred * scale, weight, bias).to(x.dtype), mean, scale


@op_variant(aten.layer_norm.default)
def layer_norm(
    x: Tensor,
    shape: Sequence[Any],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return native_layer_norm(x, shape, weight, bias, eps)[0]


@op_variant(aten._fused_rms_norm.default)
def fused_rms_norm(x: Tensor, shape: Sequence[Any], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(-len(shape), 0))
    wide = widen(x)
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = ((wide * wide).mean(dims, True) + least).rsqrt()
    return _scaled(wide * scale, weight, None).to(x.dtype), scale


@op_variant(aten.rms_norm.default)
def rms_norm(x: Tensor, shape: Sequence[Any], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return fused_rms_norm(x, shape, weight, eps)[0]


@op_variant(aten.var_mean.correction)
def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """Sum the squares in a second pass, because small differences of large squares would cancel."""
    dims = list(range(x.ndim)) if not dim else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    divisor = count - (1 if correction is None else correction) if type(count) is int else 0
    if divisor <= 0 or x.is_complex():
        return NotImplemented
    wide = widen(x)
    mean = wide.mean(dims, True)
    centred = wide - mean
    squares = (centred * centred).sum(dims, keepdim)
    means = mean if keepdim else mean.squeeze(dims)
    return (squares / divisor).to(x.dtype), means.to(x.dtype)


@op_variant(aten.var.correction)
def var(x: Tensor, dim: Sequence[int] | None = None, **named: Any) -> Any:
    results = var_mean(x, dim, **named)
    return results if results is NotImplemented else results[0]


@op_variant(aten.aminmax.default)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Reduce the numbers and their negatives together, as one maximum."""
    if not x.is_floating_point():
        return NotImplemented  # the least integer has no negative
    dims = range(x.ndim) if dim is None else [dim % x.ndim]
    both = torch.stack([x.neg(), x]).amax([1 + d for d in dims], keepdim)
    return both[0].neg(), both[1]


@op_variant(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return a root of a sum of powers; orders that reduce norms of shards are left to the rule."""
    result_dtype = dtype or x.dtype
    if result_dtype.is_complex or x.is_complex() or ord == 0 or math.isinf(ord):
        return NotImplemented
    powers = widen(x.to(result_dtype)).abs().pow(ord)
    return powers.sum(list(range(x.ndim)) if dim is None else list(dim), keepdim).pow(1 / ord).to(result_dtype)


@op_variant(aten.dist.default)
def distance(x: Tensor, other: Tensor, p: float = 2) -> Any:
    return vector_norm(x - other, p)


@op_variant(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Reduce to a maximum of integers, which all backends support."""
    largest = x.ne(0).to(torch.int32).amax(_dims(dim), keepdim)
    return largest.to(torch.uint8 if x.dtype is torch.uint8 else torch.bool)


@op_variant(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    smallest = x.ne(0).to(torch.int32).amin(_dims(dim), keepdim)
    return smallest.to(torch.uint8 if x.dtype is torch.uint8 else torch.bool)


def _best(extremum: Callable[..., Tensor], x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the extremum of each line and its first position; NaN counts as the extremum, as in torch."""
    if (dim is None and x.ndim != 1) or type(size := x.shape[dim or 0]) is not int:
        return NotImplemented
    at, values = (dim or 0) % x.ndim, _ints(x)
    best = extremum(values, [at], True)
    is_best = values == best
    if values.is_floating_point():
        is_best = is_best | values.isnan()
    places = count_along(size, at, x)
    where = torch.where(is_best, places, size).amin([at], keepdim)
    return (best if keepdim else best.squeeze(at)).to(x.dtype), where


def _place_of_best(*args: Any, **kwargs: Any) -> Any:
    best = _best(*args, **kwargs)
    return best if best is NotImplemented else best[1]


op_variant(aten.max.dim)(partial(_best, Tensor.amax))
op_variant(aten.min.dim)(partial(_best, Tensor.amin))
op_variant(aten.argmax.default)(partial(_place_of_best, Tensor.amax))
op_variant(aten.argmin.default)(partial(_place_of_best, Tensor.amin))


@op_variant(aten.topk.default)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True, *, pieces: Pieces) -> Any:
    """Return the best of the best of each piece."""
    at = dim % x.ndim
    count = pieces.get(at, 1)
    if type(size := x.shape[at]) is not int or type(k) is not int or size % count or k > size // count:
        return NotImplemented
    parts = aten.unflatten.int(x, at, [count, size // count])
    best, within = parts.topk(k, at + 1, largest, ordered)
    places = within + count_along(count, at, parts) * (size // count)
    values, which = best.flatten(at, at + 1).topk(k, at, largest, ordered)
    return values, places.flatten(at, at + 1).gather(at, which)


def count_along(count: int, dim: int, x: Tensor) -> Tensor:
    """Return positions from 0 along one dim."""
    return torch.arange(count, device=x.device).view([count if d == dim else 1 for d in range(x.ndim)])


@op_variant(aten.select.int)
def select(x: Tensor, dim: int, index: Any) -> Any:
    """Look up one position; the ranks sum their results."""
    size = x.shape[dim]
    if type(size) is not int or type(index) is not int:
        return NotImplemented
    return x.index_select(dim, torch.arange(index % size, index % size + 1, device=x.device)).squeeze(dim)


@op_variant(aten.slice.Tensor)
def slice_(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    size = x.shape[dim]
    if any(type(each) is not int for each in (size, start or 0, end or 0, step)):
        return NotImplemented
    return x.index_select(dim, torch.arange(*slice(start, end, step).indices(size), device=x.device))


@op_variant(aten.select_scatter.default)
def select_scatter(x: Tensor, part: Tensor, dim: int, index: Any) -> Any:
    return slice_scatter(x, part.unsqueeze(dim), dim, index, index + 1 or None)


@op_variant(aten.slice_scatter.default)
def slice_scatter(x: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """Choose at every position between the part's value and the old one."""
    size = x.shape[dim]
    if any(type(each) is not int for each in (size, start or 0, end or 0, step)):
        return NotImplemented
    first, behind, step = slice(start, end, step).indices(size)
    places = torch.arange(size, device=x.device)
    within = torch.div(places - first, step, rounding_mode="floor").clamp(0, max(part.shape[dim] - 1, 0))
    is_written = (places >= first) & (places < behind) & ((places - first) % step == 0)
    at = dim % x.ndim
    is_written = is_written.view([size if d == at else 1 for d in range(x.ndim)])
    return torch.where(is_written, part.index_select(dim, within), x)


def _dims(dim: Any) -> list[int]:
    return [] if dim is None else [dim] if isinstance(dim, int) else list(dim)


def _ints(x: Tensor) -> Tensor:
    """Return bools as integers: not all backends reduce bools."""
    return x.to(torch.int32) if x.dtype is torch.bool else x


def widen(x: Tensor) -> Tensor:
    """Return the value in the dtype in which torch's own kernels compute."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias
