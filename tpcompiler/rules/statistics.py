"""Batch, instance and group norms in simpler ops, for samples, pixels or channels that are sharded.

Each rank finds the mean and the variance of its shard, and the ranks exchange these two numbers per channel or group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpcompiler._torch import aten
from tpcompiler.ir.dim_sharding import divides
from tpcompiler.rules.registry import op_variant
from tpcompiler.rules.variants import Pieces, widen


def find_moments(x: Tensor, dims: list[int], pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance over some dims, which keep the size 1.

    A sum of squares would lose a variance that is small next to the mean. So equal pieces find their own mean and
    variance, and are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979: the ranks gather both numbers, or reduce one after the other, whichever is cheaper. Pieces
    of several sizes subtract the mean of all ranks first.
    """
    cut = {dim: pieces[dim] for dim in sorted(dims) if dim in pieces}
    cut = cut if all(divides(x.shape[dim], count) for dim, count in cut.items()) else {}
    inner, outer = dims, [dim + at for at, dim in enumerate(cut)]
    for dim in reversed(cut):
        x = aten.unflatten.int(x, dim, [cut[dim], -1])
        inner = [each + (each >= dim) for each in inner]
    mean = _average(x, inner)
    centred = x - mean
    variance = _average(centred * centred, inner)
    if not cut:
        return mean, variance
    own = torch.stack([mean, variance])  # gathered at once
    own_mean, own_variance = own.select(0, 0), own.select(0, 1)
    mean = own_mean.mean(outer, True)
    apart = own_mean - mean
    variance = (own_variance + apart * apart).mean(outer, True)
    return mean.squeeze(outer), variance.squeeze(outer)


def _average(x: Tensor, dims: list[int]) -> Tensor:
    """Return the mean, by a sum if the sizes are known: any shards add up, also empty ones and blocks."""
    count = math.prod(x.shape[dim] for dim in dims)
    return x.sum(dims, True) / count if type(count) is int else x.mean(dims, True)


@op_variant(aten._native_batch_norm_legit.no_stats)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    pieces: Pieces,
) -> Any:
    return _over_batch(x, weight, bias, eps, pieces)[:3]


@op_variant(aten._native_batch_norm_legit_functional.default)
def batch_norm_with_running_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    pieces: Pieces,
) -> Any:
    """Also return the new running statistics; their variance is unbiased."""
    sizes = [size for dim, size in enumerate(x.shape) if dim != 1]
    is_static = all(type(size) is int for size in sizes)
    if not training or (is_static and math.prod(sizes) < 2):
        return NotImplemented
    # a body contains no sizes, so a dynamic batch is counted
    count: Any = math.prod(sizes) if is_static else torch.full_like(x.select(1, 0), 1, dtype=torch.float64).sum()
    normed, mean, root, variance = _over_batch(x, weight, bias, eps, pieces)
    pairs = (running_mean, mean), (running_variance, variance * (count / (count - 1)))
    return normed, mean, root, *(torch.lerp(old, new.to(old.dtype), momentum) for old, new in pairs)


@op_variant(aten.native_group_norm.default)
def native_group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: Any,
    channels: Any,
    pixels: Any,
    groups: int,
    eps: float,
    *,
    pieces: Pieces,
) -> tuple[Tensor, Tensor, Tensor]:
    wide, each = aten.unflatten.int(widen(x), 1, [groups, -1]), [groups, -1] + [1] * (x.ndim - 2)
    dims = list(range(2, wide.ndim))
    within = {} if groups > 1 and 1 in pieces else {1 + dim: count for dim, count in pieces.items()}
    mean, variance = find_moments(wide, dims, within)
    normed, scale = _normalise(wide, mean, variance, weight, bias, each, eps)
    return normed.flatten(1, 2).to(x.dtype), mean.squeeze(dims), scale.squeeze(dims)


@op_variant(aten.group_norm.default)
def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    pieces: Pieces,
) -> Tensor:
    return native_group_norm(x, weight, bias, None, None, None, groups, eps, pieces=pieces)[0]


def _over_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, pieces: Pieces
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normalised value, the mean, one over the standard deviation, and the variance."""
    wide, each = widen(x), [-1] + [1] * (x.ndim - 2)
    mean, variance = find_moments(wide, [0, *range(2, x.ndim)], pieces)
    normed, root = _normalise(wide, mean, variance, weight, bias, each, eps)
    return normed.to(x.dtype), mean.flatten(), root.flatten(), variance.flatten()


def _normalise(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the normalised value from one pass over it, and one over the standard deviation."""
    root = (variance + eps).rsqrt()
    scale = root if weight is None else root * weight.view(shape)
    shift = mean.neg() * scale
    return torch.addcmul(shift if bias is None else shift + bias.view(shape), x, scale), root
