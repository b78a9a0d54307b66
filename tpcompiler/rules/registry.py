"""The registry of rules by op, and the rule of a node with its sizes filled in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.draws import draws
from tpcompiler.ir.local import key
from tpcompiler.rules.notation import Pattern, Rule, RuleText, Shards, dim_size, extents, parse

Written = Callable[[fx.Node], "str | RuleText | None"]
Function = Callable[..., Any]
W = TypeVar("W", bound=Written)
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Entry:
    """A registered rule function and its options."""

    write: Written
    shards: Shards
    relayout: bool


_RULES: dict[OpOverload, Entry] = {}
_POINTWISE: list[Entry] = []
_VARIANTS: dict[OpOverload, Function] = {}
_FOREIGN: dict[str, Entry] = {}  # for ops that only exist after another library is imported
_KNOWN: WeakKeyDictionary[Any, dict[Any, Rule | None]] = WeakKeyDictionary()  # by fake mode, then by call


def op_rule(*targets: OpOverload, shards: Shards = "even", relayout: bool = False) -> Callable[[W], W]:
    """Register a rule for ops. The function gets a node and returns the rule's text (None: no rule for this call).

    Args:
        shards: the requirement on the shards of a sharded factor: equal sizes, not empty, or none.
        relayout: the op only moves or casts data.

    Raises:
        RuleError: an op already has a rule.
    """

    def register(write: W) -> W:
        for target in targets:
            if target in _RULES:
                raise RuleError(f"{target} has a rule already", help="change that one")
            _RULES[target] = Entry(write, shards, relayout)
        return write

    return register


def foreign_rule(name: str, shards: Shards = "even") -> Callable[[W], W]:
    """Register a rule for an op of a library that may not be imported yet, by name, such as "mylib.op.default"."""

    def register(write: W) -> W:
        _FOREIGN[name] = Entry(write, shards, False)
        return write

    return register


def pointwise_rule(write: W) -> W:
    """Register the rule for every op that torch tags as pointwise, unless it has another rule."""
    _POINTWISE.append(Entry(write, "any", False))
    return write


def op_variant(*targets: OpOverload) -> Callable[[F], F]:
    """Register a function of simpler ops that replaces an op if a dim is sharded that the op's rule needs whole.

    The function is called like the op, plus `pieces=` (the number of shards by dim of the operand, for dims that may
    be sharded) if it has that parameter. It returns NotImplemented for calls that it does not support.
    """

    def register(function: F) -> F:
        _VARIANTS.update(dict.fromkeys(targets, function))
        return function

    return register


def variant_of(op: object) -> Function | None:
    return _VARIANTS.get(op) if isinstance(op, OpOverload) else None


def takes_pieces(op: object) -> bool:
    """Return True if the variant of an op depends on the dims that may be sharded."""
    return _takes_pieces(_VARIANTS[op])  # type: ignore[index]


@cache
def _takes_pieces(variant: Function) -> bool:
    return "pieces" in signature(variant).parameters


def call_variant(op: object, pieces: Mapping[int, int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the variant of an op, for an operand that may be sharded: the number of shards, by dim."""
    more = {"pieces": pieces} if takes_pieces(op) else {}
    return _VARIANTS[op](*args, **kwargs, **more)  # type: ignore[index]


def ops_with_rules() -> Collection[OpOverload]:
    """Return the ops with a rule, which stay whole (the pointwise tag does not count)."""
    return _RULES.keys()


def rule_of(node: fx.Node) -> Rule | None:
    """Return the node's rule, or None if its op has none for this call. Equal calls of one program share a rule.

    Raises:
        RuleError: the rule does not fit the node's operands.
    """
    entry = _RULES.get(node.target) or _FOREIGN.get(str(node.target)) if isinstance(node.target, OpOverload) else None
    if entry is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        entry = _POINTWISE[0]
    if entry is None or draws(node):
        return None  # a draw for a shard is no share of a draw for the whole
    mode = getattr(edit.outputs(node)[0], "fake_mode", None) if edit.outputs(node) else None
    if mode is None:
        return _read(node, entry)
    rules = _KNOWN.setdefault(mode, {})
    call = node.target, entry, key(node.args), key(node.kwargs), key(node)
    if call not in rules:
        rules[call] = _read(node, entry)
    return rules[call]


def _read(node: fx.Node, entry: Entry) -> Rule | None:
    tensors = [edit.fake(operand) for operand in edit.operands(node)]
    if not tensors:
        return None
    text = entry.write(node)
    if text is None:
        return None
    if isinstance(text, str):
        text = RuleText(text)
    pattern = parse(text.text)
    shapes = [tuple(t.shape) for t in (*tensors, *edit.outputs(node))]
    what = f"{node.target} at '{node.name}'"
    pattern = replace(pattern, whole=(pattern.whole - text.windows.keys()) | _find_mixed(pattern, shapes))
    extent = extents(pattern, shapes, text.factors, what)
    _check_sizes(pattern, shapes, extent, what)
    # An addend joins the product's sum: with the product pending, it must be pending too.
    linear = tuple(frozenset(group) | pattern.addends for group in text.linear)
    linear = tuple(group for group in linear if not any(_wraps(tensors[i], edit.outputs(node)) for i in group))
    bodies = text.local, text.local_shards
    options = (entry.shards, text.reduce, text.sizes, linear, *bodies, entry.relayout, text.counts)
    return Rule(pattern, extent, *options, text.positions, text.windows)


def _wraps(operand: torch.Tensor, made: Sequence[torch.Tensor]) -> bool:
    """Return True if the operand's shares add up to it only in its own dtype: integers wrap, wider ones do not."""
    exact = not (operand.is_floating_point() or operand.is_complex())
    return exact and any(value.dtype != operand.dtype for value in made)


def _find_mixed(pattern: Pattern, shapes: Sequence[Sequence[Size]]) -> set[str]:
    """Return the factors whose size is a number in one tensor and dynamic in another.

    Both are equal only at run time, so a rank might hold a share of one and no matching share of the other.
    """
    kinds: dict[str, set[bool]] = {}
    for term, shape in zip((*pattern.inputs, *pattern.outputs), shapes, strict=False):
        for dim, size in zip(term, shape, strict=False):
            if len(dim) == 1:
                kinds.setdefault(dim[0], set()).add(isinstance(size, int))
    return {factor for factor, flags in kinds.items() if len(flags) > 1}


def _check_sizes(pattern: Pattern, shapes: Sequence[Sequence[Size]], extent: Mapping[str, Size], what: str) -> None:
    """Refuse a factor with two sizes, which would be sharded in two places: a broadcast dim not written as 1."""
    for term, shape in zip((*pattern.inputs, *pattern.outputs), shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            expected = dim_size(dim, extent)
            if (
                not pattern.whole.issuperset(dim)
                and isinstance(expected, int)
                and isinstance(size, int)
                and expected != size
            ):
                raise RuleError(
                    f"the rule of {what} gives {' '.join(dim)!r} the size {expected}, and a tensor has {size} there",
                    help="write 1 for a dim that broadcasts, and another factor for another size",
                )
