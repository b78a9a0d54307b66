"""Ops that draw random numbers, and other calls that must stay although their results are unused."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit

RECURRENT = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)  # they draw the dropout between their layers
DROPOUTS = (
    *(aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout),
    *(aten.dropout_, aten.feature_dropout_, aten.alpha_dropout_, aten.feature_alpha_dropout_),
)
_SHAPED = (
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.uniform,
    aten.normal_functional,
    aten.exponential,
    aten.geometric,
    aten.cauchy,
    aten.log_normal,
    aten.random,
)


def draws(node: fx.Node) -> bool:
    """Return True if this call advances the generator, as the CPU's kernels do.

    Dropout does not in eval mode, at p = 0 or at p = 1, except `native_dropout`, which draws for any probability.
    """
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    args = edit.bound(node)
    idle: dict[str, tuple[Any, ...]] = {"train": (False,), "training": (False,)}
    idle |= {"dropout": (0, 1), "dropout_p": (0, 1), "num_layers": (1,)}  # dropout acts between recurrent layers
    if node.target.overloadpacket in DROPOUTS:
        idle["p"] = (0, 1)  # bernoulli's p is unrelated
    return not any(name in args and args[name] in values for name, values in idle.items())


def draws_for_a_shape(node: fx.Node) -> bool:
    """Return True if the draw depends only on the first operand's shape and dtype, not on its values."""
    if node.target is aten.bernoulli.p:
        return True
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _SHAPED


def remove_unused(graph: fx.Graph) -> None:
    """Erase unused calls, except those that write, assert or draw (they affect later draws)."""
    graph.eliminate_dead_code(is_impure_node=_must_stay)


def _must_stay(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output") or draws(node):
        return True
    return (isinstance(node.target, OpOverload) and node.target._schema.is_mutable) or "assert" in str(node.target)
