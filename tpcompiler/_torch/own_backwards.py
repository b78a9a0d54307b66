"""Backwards that a model brings itself, and that torch.export leaves out of its programs without a word; and hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import _HookMixin, _SingleLevelFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks, _global_forward_hooks
from torch.utils.checkpoint import CheckpointFunction

TORCH = "torch."  # its own functions have the backward that torch derives of their forward
KEEP_VALUES = ("torch.autograd.graph", "torch.utils.checkpoint")  # whose hooks give back the saved tensor as it was


@contextlib.contextmanager
def record_own_backwards(*modules: nn.Module) -> Iterator[dict[str, None]]:
    """Yield the names of the backwards of the modules' own that are called or registered in the block.

    These are the backwards of `torch.autograd.Function`s, among them that of a reentrant checkpoint, and hooks: on
    gradients of tensors, parameters, modules and nodes of the graph, and on tensors that are saved for the backward.
    """
    names = dict.fromkeys(_listed_hooks(modules))
    saved_tensors: Any = torch._C._autograd
    push = saved_tensors._push_saved_tensors_default_hooks

    def record_apply(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, CheckpointFunction):
            names["checkpoint(use_reentrant=True), instead of False"] = None
        elif not f"{cls.__module__}.".startswith(TORCH):
            names[f"{cls.__name__} (a torch.autograd.Function)"] = None
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    def recording(register: Any, of: str) -> Any:
        def record(owner: Any, hook: Any) -> Any:
            names.update(dict.fromkeys(_titles([hook], of)))
            return register(owner, hook)

        return record

    def record_pack(pack: Any, unpack: Any) -> None:
        if getattr(pack, "__module__", "") not in KEEP_VALUES:
            names.update(dict.fromkeys(_titles([pack], "saved_tensors_hooks")))
        push(pack, unpack)

    tensor, of_tensor, of_graph = torch.Tensor, "a hook of a tensor", "a hook of the autograd graph"
    after = "register_post_accumulate_grad_hook"
    with (
        # `Function.apply` calls it by super(): a model may hold `Reverse.apply`, bound before this block.
        patch.object(_SingleLevelFunction, "apply", classmethod(record_apply)),
        patch.object(tensor, "register_hook", recording(tensor.register_hook, of_tensor)),
        patch.object(tensor, after, recording(getattr(tensor, after), of_tensor)),
        patch.object(_HookMixin, "_register_hook", staticmethod(recording(_HookMixin._register_hook, of_graph))),
        patch.object(saved_tensors, "_push_saved_tensors_default_hooks", record_pack),
    ):
        yield names


def _listed_hooks(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the hooks that modules, their parameters, and torch for all modules hold."""
    for model in modules:
        for name, module in model.named_modules():
            own = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
            yield from _titles(own, f"a backward hook of {repr(name) if name else 'the model or its loss'}")
        for name, parameter in model.named_parameters():
            yield from _titles(_hooks(parameter), f"a hook of {name!r}")
    everywhere = [*_global_backward_hooks.values(), *_global_backward_pre_hooks.values()]
    yield from _titles(everywhere, "a backward hook of all modules")


def hooks_around(model: nn.Module) -> list[str]:
    """Return the names of the hooks that see all inputs of the model's own forward by name, or its outputs."""
    before = [model._forward_pre_hooks[each] for each in model._forward_pre_hooks_with_kwargs]
    after = [*model._forward_hooks.values(), *_global_forward_hooks.values()]
    return [*_titles(before, "a forward pre-hook"), *_titles(after, "a forward hook")]


def accumulated_into(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves to whose `grad` the backward of a value adds."""
    return [leaf for node in _nodes_behind(value) if (leaf := getattr(node, "variable", None)) is not None]


def hooks_behind(value: torch.Tensor) -> list[str]:
    """Return the names of the hooks on nodes of the backward of a value."""
    found = list[str]()
    for node in _nodes_behind(value):
        for register in (node.register_prehook, node.register_hook):
            handle = register(_look)  # a node shows its hooks to one that is registered, and to nothing else
            hooks = handle.hooks_dict_ref()
            handle.remove()
            found += _titles(hooks.values(), "a hook of the autograd graph")
    return found


def _nodes_behind(value: torch.Tensor) -> list[Any]:
    found, nodes = dict[Any, None](), [value.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None and node not in found:
            found[node] = None
            nodes += [each for each, _ in node.next_functions]
    return list(found)


def _hooks(parameter: nn.Parameter) -> list[Any]:
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [*(parameter._backward_hooks or {}).values(), *(after or {}).values()]


def _look(*_: Any) -> None:
    """Change no gradient."""


def _titles(hooks: Iterable[Any], of: str) -> list[str]:
    """Return the names of hooks, without those that torch registers for itself while it traces."""
    own = [
        each for each in hooks if each is not _look and not f"{getattr(each, '__module__', '')}".startswith("torch._")
    ]
    return [f"{getattr(each, '__qualname__', type(each).__name__).replace('<locals>.', '')} ({of})" for each in own]


@contextlib.contextmanager
def keep_versions(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Count no write to these tensors in the block, at whose end they must have their values of before."""
    with _unsafe_preserve_version_counter(tuple(tensors)):
        yield
