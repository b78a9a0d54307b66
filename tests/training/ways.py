"""Ways to train a module, alike for the single device's and for a rank's."""

from __future__ import annotations

from typing import Any

import torch


def step(module: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = module(x)
    loss.backward()
    optimizer.step()
    return loss.detach()


def momentum(module: Any, batches: torch.Tensor) -> list[torch.Tensor]:
    """SGD with momentum, at a rate that falls."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches))
    losses = []
    for x in batches:
        losses.append(step(module, optimizer, x))
        schedule.step()
    return losses


def overflowing(batches: torch.Tensor) -> torch.Tensor:
    """In float32, where the second of them gives gradients of about 1e8: times 2**110 they are infinite."""
    return batches.float() * torch.tensor([1.0, 1e5, 1.0, 1.0]).view(-1, 1, 1)


def scaled(module: Any, batches: torch.Tensor, scaler: Any) -> list[float]:
    """Losses that are scaled: a gradient that overflows anywhere leaves out a step, and halves the scale."""
    optimizer, scales = torch.optim.SGD(module.parameters(), lr=0.1), []
    for x in batches:
        optimizer.zero_grad()
        scaler.scale(module(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def master_weights(module: Any, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters in bfloat16 that follow copies in float32, which the optimizer steps."""
    masters = {name: each.detach().float().requires_grad_() for name, each in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    for x in batches:
        module.zero_grad()
        module(x.bfloat16()).backward()
        for name, each in module.named_parameters():
            masters[name].grad = each.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, each in module.named_parameters():
                each.copy_(masters[name])
    return {name: each.detach() for name, each in masters.items()}
