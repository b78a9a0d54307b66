"""Trace functions without torch's work on modules, and export with tensors whose values code may read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

METHODS = nn.Module.__call__, nn.Module.__getattr__
MARK = "__fx_already_patched"
untraced = disable_proxy_modes_tracing  # a context for questions about sizes, which are no part of a trace


def trace_ops(body: Callable[..., Any], *values: Any, table: Mapping[Any, Any] | None = None) -> fx.Graph:
    """Return the ops that a function calls, traced by `make_fx`.

    For a trace, fx patches methods of `nn.Module` and restores them, although `make_fx` uses neither. Each time Python
    drops its caches for every module class, thousands if transformers is imported, which takes a tenth of a conversion.
    Methods marked as patched are left alone.

    Args:
        table: decompositions, by op.
    """
    for method in METHODS:
        setattr(method, MARK, True)
    try:
        return make_fx(body, decomposition_table=dict(table or {}), tracing_mode="real")(*values).graph
    finally:
        for method in METHODS:
            vars(method).pop(MARK, None)


class KnownTensor(torch.Tensor):
    """A tensor with values that an export can read: ops on known tensors are computed, not traced.

    So code may read numbers from it (`tolist`), such as image sizes that determine how a tensor is split. An op that
    also takes another tensor is traced, with the known one as a constant.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = (tuple(args), dict(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
            plain, keywords = tree_map_only(KnownTensor, lambda value: value.as_subclass(torch.Tensor), arguments)
            if all(isinstance(tensor, cls) for tensor in tensors):
                result = func(*plain, **keywords)
                return tree_map_only(torch.Tensor, lambda value: value.as_subclass(cls), result)
        return func(*plain, **keywords)
