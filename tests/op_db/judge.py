"""Whether a rule is right on torch's own sample inputs: each call is run on shards, as the rule allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tests.op_db.record import copied
from tpcompiler._torch import OpOverload, tree_map
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.judge.rules.run_on_shards import check
from tpcompiler.rules.registry import rule_of

DEGREES = (2, 3)
WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
# Their values are whatever was in memory.
UNDEFINED = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided", "resize")


def key(node: fx.Node) -> str:
    """What a rule can see of a call, but for the float type: equal keys need one check."""
    args, kwargs = edit.map_operands(node, lambda _, operand: _form(operand.meta["val"]))
    return f"{node.target}{args}{kwargs}"


def _form(value: torch.Tensor) -> str:
    kind = "float" if value.is_floating_point() else "complex" if value.is_complex() else str(value.dtype)
    return f"{kind}{list(value.shape)}"


def widened(node: fx.Node) -> fx.Node:
    """The same call in float64, where a wrong answer is far from rounding; itself where the op has no such form."""
    dtypes = {operand.meta["val"].dtype for operand in edit.operands(node)}
    given = [a for a in (*dtypes, *node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    if WIDER.keys().isdisjoint(given):
        return node
    graph = fx.Graph()
    made = {operand: graph.placeholder(operand.name) for operand in edit.operands(node)}
    for old, new in made.items():
        value = old.meta["val"]
        new.meta["val"] = value.to(WIDER.get(value.dtype, value.dtype))
    args, kwargs = edit.map_operands(node, lambda _, old: made[old])
    args, kwargs = tree_map(lambda a: WIDER.get(a, a) if isinstance(a, torch.dtype) else a, (args, kwargs))
    wide = graph.call_function(node.target, args, kwargs)
    try:
        wide.meta["val"] = run(wide)
    except (RuntimeError, NotImplementedError):
        return node
    return wide


def run(node: fx.Node) -> Any:
    args, kwargs = edit.map_operands(node, lambda _, operand: operand.meta["val"].clone())
    return copied(node.target(*args, **kwargs))  # type: ignore[operator]


def draws(node: fx.Node) -> bool:
    """Whether two runs of the call may differ, so that there is nothing to compare with."""
    target = node.target
    assert isinstance(target, OpOverload)
    name = target._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded in target.tags or name in UNDEFINED


def verdict(node: fx.Node) -> tuple[str, str]:
    """("right" | "wrong" | "crash" | "no rule" | "no tensor" | "draws", what there is to say)."""
    if draws(node):
        return "draws", ""
    if not edit.operands(node) or not edit.outputs(node):
        return "no tensor", ""
    node = widened(node)
    try:
        rule = rule_of(node)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    if rule is None:
        return "no rule", ""
    torch.manual_seed(0)
    try:
        for degree in DEGREES:
            check(node, rule, degree)
    except RuleError as error:
        return "crash" if "it fails on shards" in error.message else "wrong", str(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return "right", ""
