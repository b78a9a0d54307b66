"""Traces, without what torch does in them for modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

METHODS = nn.Module.__call__, nn.Module.__getattr__
MARK = "__fx_already_patched"


def trace_ops(body: Callable[..., Any], *values: Any, table: Mapping[Any, Any] | None = None) -> fx.Graph:
    """The ops that a function calls, as `make_fx` finds them.

    fx puts methods of its own into `nn.Module` for a trace, though those of `make_fx` do nothing, and takes them out
    again. Each time Python forgets what it knew of every class of modules, thousands where transformers is imported,
    which takes a tenth of a conversion. What is marked as its own already it leaves.

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
