"""Ops in simpler ones, where torch's decomposition computes something else than its kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir.draws import RECURRENT

Tensor = torch.Tensor
MEAN, SUM = 1, 2  # reductions of a loss


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = MEAN) -> tuple[Tensor, Tensor]:
    """Sum over the labels in front of the first -1; torch's decomposition also counts those behind it, as class 0."""
    rows, labels = (value.reshape(-1, value.shape[-1] if value.ndim else 1) for value in (x, target))
    classes = torch.arange(rows.shape[1], device=x.device)
    is_label = (labels < 0).cumsum(1) == 0
    labels = torch.where(is_label, labels, 0)
    is_target = ((labels.unsqueeze(-1) == classes) & is_label.unsqueeze(-1)).any(1)
    apart = (1 - rows.gather(1, labels).unsqueeze(-1) + rows.unsqueeze(1)).relu()
    counts = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    each = torch.where(counts, apart, 0).sum([1, 2]) / rows.shape[1]
    loss = each.mean() if reduction == MEAN else each.sum() if reduction == SUM else each.reshape(x.shape[:-1])
    return loss, is_target.to(x.dtype).reshape(target.shape)


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _multilabel_margin(x, target, reduction)[0]


def _layer_by_layer(
    op: OpOverload,
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Drop features between recurrent layers; torch's decomposition leaves the dropout out."""
    if not (dropout and train and layers > 1):
        return NotImplemented
    ways, count, last = 1 + bidirectional, len(weights) // layers, list[Sequence[Tensor]]()
    x = x.transpose(0, 1) if batch_first else x
    for at in range(layers):
        own: Any = [each[at * ways : (at + 1) * ways] for each in ([states] if isinstance(states, Tensor) else states)]
        own = own[0] if isinstance(states, Tensor) else own
        x, *state = op(x, own, weights[at * count : (at + 1) * count], has_biases, 1, 0.0, train, bidirectional, False)
        x = torch.dropout(x, dropout, True) if at < layers - 1 else x
        last.append(state)
    return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*last, strict=True)))


LOSSES: dict[OpOverload, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
}
LAYERS: dict[OpOverload, Callable[..., Any]] = {op.input: partial(_layer_by_layer, op.input) for op in RECURRENT}
