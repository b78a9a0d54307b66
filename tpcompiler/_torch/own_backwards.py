"""Backwards that a model brings itself, and that torch.export leaves out of its programs without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

TORCH = "torch."  # its own functions have the backward that torch derives of their forward


@contextlib.contextmanager
def record_own_backwards(model: nn.Module) -> Iterator[dict[str, None]]:
    """Yield the names of the backwards of the model's own that are called or registered in the block.

    These are the backwards of `torch.autograd.Function`s, among them that of a reentrant checkpoint, and hooks on
    gradients of tensors, parameters and modules.
    """
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        own = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        names |= dict.fromkeys(f"{_title(hook)} (a backward hook of {name or 'the model'!r})" for hook in own)
    for name, parameter in model.named_parameters():
        names |= dict.fromkeys(f"{_title(hook)} (a hook of {name!r})" for hook in _hooks(parameter))
    register = torch.Tensor.register_hook

    def record_apply(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            names["checkpoint(use_reentrant=True), instead of False"] = None
        elif not f"{cls.__module__}.".startswith(TORCH):
            names[f"{cls.__name__} (a torch.autograd.Function)"] = None
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    def record_hook(self: torch.Tensor, hook: Any) -> Any:
        if not f"{getattr(hook, '__module__', '')}.".startswith(TORCH):
            names[f"{_title(hook)} (a hook of a tensor)"] = None
        return register(self, hook)  # type: ignore[no-untyped-call]

    # `Function.apply` calls it by super(): a model may hold `Reverse.apply`, bound before this block.
    _SingleLevelFunction.apply = classmethod(record_apply)  # type: ignore[attr-defined]
    torch.Tensor.register_hook = record_hook  # type: ignore[method-assign]
    try:
        yield names
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def accumulated_into(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves to whose `grad` the backward of a value adds."""
    leaves, seen, nodes = list[torch.Tensor](), set[Any](), [value.grad_fn]
    while nodes:
        if (node := nodes.pop()) is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        nodes += [each for each, _ in node.next_functions]
    return leaves


def _hooks(parameter: nn.Parameter) -> list[Any]:
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(after or {}).values()]


def _title(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")
