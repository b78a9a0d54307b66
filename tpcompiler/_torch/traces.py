"""Trace functions without torch's work on modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

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
