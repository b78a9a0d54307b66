"""An op that has no rule and never gets one, for tests of calls without a rule."""

from __future__ import annotations

import torch


@torch.library.custom_op("tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
