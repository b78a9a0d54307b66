"""Which rule belongs to which op, and a node's rule with its sizes filled in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
    write: Written
    shards: Shards
    relayout: bool


_RULES: dict[OpOverload, Entry] = {}
_POINTWISE: list[Entry] = []
_VARIANTS: dict[OpOverload, Function] = {}
_FOREIGN: dict[str, Entry] = {}  # of ops that exist once another library is imported
_KNOWN: WeakKeyDictionary[Any, dict[Any, Rule | None]] = WeakKeyDictionary()  # of each program's sizes, by layout


def op_rule(*targets: OpOverload, shards: Shards = "even", relayout: bool = False) -> Callable[[W], W]:
    """Register a rule for ops. The function gets a node and writes the rule's text (None: no rule for this call).

    Args:
        shards: what every shard of a sharded factor must be: of one size, at least not empty, or anything.
        relayout: the op only moves or casts data.

    Raises:
        RuleError: an op that has a rule already.
    """

    def register(write: W) -> W:
        for target in targets:
            if target in _RULES:
                raise RuleError(f"{target} has a rule already", help="change that one")
            _RULES[target] = Entry(write, shards, relayout)
        return write

    return register


def foreign_rule(name: str, shards: Shards = "even") -> Callable[[W], W]:
    """Register the rule of another library's op by its name, such as "mylib.op.default": it may not be imported yet."""

    def register(write: W) -> W:
        _FOREIGN[name] = Entry(write, shards, False)
        return write

    return register


def pointwise_rule(write: W) -> W:
    """Register the rule of every op that torch tags as pointwise and that has no rule of its own."""
    _POINTWISE.append(Entry(write, "any", False))
    return write


def op_variant(*targets: OpOverload) -> Callable[[F], F]:
    """Register an op as a function of simpler ops, for when a dim is cut that its rule needs whole.

    The function is called as the op is, with `pieces=` the degree of the axis besides if it takes that, and gives
    NotImplemented for calls that it cannot do.
    """

    def register(function: F) -> F:
        _VARIANTS.update(dict.fromkeys(targets, function))
        return function

    return register


def variant_of(op: object) -> Function | None:
    return _VARIANTS.get(op) if isinstance(op, OpOverload) else None


def call_variant(op: object, pieces: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the variant of an op makes, where an axis of `pieces` ranks may cut what it takes."""
    function = _VARIANTS[op]  # type: ignore[index]
    more = {"pieces": pieces} if "pieces" in signature(function).parameters else {}
    return function(*args, **kwargs, **more)


def ops_with_rules() -> Collection[OpOverload]:
    """The ops that stay whole: they have a rule of their own (the pointwise tag does not count)."""
    return _RULES.keys()


def rule_of(node: fx.Node) -> Rule | None:
    """The node's rule, or None when its op has none for this call. Calls alike of one program have one rule.

    Raises:
        RuleError: the rule does not fit the node's operands.
    """
    entry = _RULES.get(node.target) or _FOREIGN.get(str(node.target)) if isinstance(node.target, OpOverload) else None
    if entry is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
        entry = _POINTWISE[0]
    if entry is None or draws(node):
        return None  # what is drawn for a shard is not a share of what is drawn for the whole
    mode = getattr(edit.outputs(node)[0], "fake_mode", None) if edit.outputs(node) else None
    if mode is None:
        return _read(node, entry)
    rules = _KNOWN.setdefault(mode, {})
    known = node.target, entry, key(node.args), key(node.kwargs), key(node)
    if known not in rules:
        rules[known] = _read(node, entry)
    return rules[known]


def _read(node: fx.Node, entry: Entry) -> Rule | None:
    tensors = [operand.meta["val"] for operand in edit.operands(node)]
    if not tensors:
        return None
    written = entry.write(node)
    if written is None:
        return None
    if isinstance(written, str):
        written = RuleText(written)
    pattern = parse(written.text)
    shapes = [tuple(t.shape) for t in (*tensors, *edit.outputs(node))]
    what = f"{node.target} at '{node.name}'"
    pattern = replace(pattern, whole=pattern.whole | _find_mixed(pattern, shapes))
    extent = extents(pattern, shapes, written.factors, what)
    _check_sizes(pattern, shapes, extent, what)
    # An addend joins the product's sum: with the product pending, it must be pending too.
    linear = tuple(frozenset(group) | pattern.addends for group in written.linear)
    linear = tuple(group for group in linear if not any(_wraps(tensors[i], edit.outputs(node)) for i in group))
    local = written.local, written.local_shards
    how = (entry.shards, written.reduce, written.sizes, linear, *local, entry.relayout, written.counts)
    return Rule(pattern, extent, *how, written.positions)


def _wraps(operand: torch.Tensor, made: Sequence[torch.Tensor]) -> bool:
    """Whether shares of the operand sum up to it in its own dtype alone: integers wrap, and wider ones do not."""
    exact = not (operand.is_floating_point() or operand.is_complex())
    return exact and any(value.dtype != operand.dtype for value in made)


def _find_mixed(pattern: Pattern, shapes: Sequence[Sequence[Size]]) -> set[str]:
    """The factors whose size is a number in one tensor and dynamic in another.

    Only a call can tell that both are equal, so a share of one might lie beside no share of the other.
    """
    kinds: dict[str, set[bool]] = {}
    for term, shape in zip((*pattern.inputs, *pattern.outputs), shapes, strict=False):
        for dim, size in zip(term, shape, strict=False):
            if len(dim) == 1:
                kinds.setdefault(dim[0], set()).add(isinstance(size, int))
    return {factor for factor, found in kinds.items() if len(found) > 1}


def _check_sizes(pattern: Pattern, shapes: Sequence[Sequence[Size]], extent: Mapping[str, Size], what: str) -> None:
    """A factor of two sizes would be cut in two places: a dim that broadcasts, and is not written 1."""
    for term, shape in zip((*pattern.inputs, *pattern.outputs), shapes, strict=True):
        for dim, size in zip(term, shape, strict=True):
            made = dim_size(dim, extent)
            if not pattern.whole.issuperset(dim) and isinstance(made, int) and isinstance(size, int) and made != size:
                raise RuleError(
                    f"the rule of {what} gives {' '.join(dim)!r} the size {made}, and a tensor has {size} there",
                    help="write 1 for a dim that broadcasts, and another factor for another size",
                )
