"""Steps of an optimizer that nobody sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


@contextlib.contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let no hook of the optimizer, or of all optimizers, run in steps of the block."""
    hooks: tuple[dict[int, Any], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    with contextlib.ExitStack() as patches:
        for each in hooks:
            patches.enter_context(patch.dict(each, clear=True))
        yield
