"""Steps of an optimizer on a model of the zoo, by the single device and by every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def train(module: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the losses of three steps.

    `eps` is far above what rounding leaves of gradients that are zero by themselves, such as a bias of keys, which
    AdamW would otherwise scale up.
    """
    parameters = list(module.parameters())
    eps = 1e-6 if parameters[0].dtype == torch.float64 else 1e-4
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-3, eps=eps), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
