"""Register rules for users' own ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from torch import fx

from tpcompiler._torch import OpOverload, op_overload
from tpcompiler.errors import RuleError
from tpcompiler.ir.placements import REDUCE_OPS
from tpcompiler.rules.notation import Pattern, RuleText, Shards, parse
from tpcompiler.rules.registry import Written, op_rule, op_variant


def resolve_op(op: object) -> OpOverload:
    """Return the op that is given, maybe by name.

    Raises:
        RuleError: there is no such op.
    """
    target = op_overload(op)
    if target is None:
        help = "give an op, or a name such as 'mylib::f' or 'mylib::f.out'"
        if callable(op):
            help = "give the op that an exported program has for this function, such as aten.mm.default"
        raise RuleError(f"{op!r} is not an op of torch", help=help)
    return target


def register_rule(
    op: object,
    rule: str | Written,
    *,
    shards: Shards = "even",
    linear: Sequence[Sequence[int]] = (),
    reduce: str = "sum",
    sizes: Mapping[str, str] | None = None,
    local: Mapping[str, Callable[..., Any]] | None = None,
    variant: Callable[..., Any] | None = None,
) -> None:
    """Register how an op may run on shards, for every program compiled later in this process.

    The op then stays whole even if torch would decompose it, and its rule precedes a pointwise tag.

    Args:
        op: an op or its name, such as "mylib::attend". It must be functional: return its results and mutate no operand.
        rule: "b s h, h o -> b s o", or a function that gets the node of a call and returns the text, a `RuleText`
            (complete in itself, so the options below do not apply), or None (no rule for this call).
        shards: the requirement on the shards of a sharded factor: "even" sizes, "nonempty", or "any".
        linear: sets of operands in which the op is jointly linear, so that pending sums of these pass through.
        reduce: the reduction left pending by a factor that only operands have.
        sizes: for arguments that count the result's dims, these dims: {"size": "b s"}.
        local: factor -> the body to run on a shard of it, if the op itself would compute a wrong result (see
            `RuleText`).
        variant: the op as a function of ops that have rules, used if a dim is sharded that this rule needs whole. It is
            called like the op and returns NotImplemented for calls that it does not support.

    Raises:
        RuleError: an unknown op, an op that already has a rule or mutates an operand, or a text that cannot be its
            rule.
    """
    target = resolve_op(op)
    if target._schema.is_mutable:
        raise RuleError(f"{target} changes its operands in place", help="write the op so that it returns what it makes")
    if shards not in get_args(Shards):
        raise _error(target, f"shards={shards!r}", f"write one of {', '.join(get_args(Shards))}")
    if reduce not in REDUCE_OPS:
        raise _error(target, f"reduce={reduce!r}", f"write one of {', '.join(REDUCE_OPS)}")
    arguments = [argument.name for argument in target._schema.arguments]
    if unknown := [name for name in sizes or {} if name not in arguments]:
        raise _error(target, f"sizes= names {unknown[0]!r}", f"use its arguments: {', '.join(arguments)}")

    def read(text: str) -> RuleText:
        try:
            pattern = parse(text)
            counted = {name: parse(f"{term} ->").inputs[0] for name, term in (sizes or {}).items()}
        except RuleError as error:
            raise _error(target, error.message, error.help) from None
        _check_terms(target, text, pattern, linear, local or {})
        return RuleText(text, counted, {}, reduce, tuple(map(tuple, linear)), local or {})

    function = rule
    if isinstance(function, str):
        plain = read(function)
        _check_count(target, function, plain)

    def write(node: fx.Node) -> RuleText | None:
        text = plain if isinstance(function, str) else function(node)
        return read(text) if isinstance(text, str) else text

    op_rule(target, shards=shards)(write)
    if variant is not None:
        op_variant(target)(variant)


def _error(target: OpOverload, what: str, help: str) -> RuleError:
    return RuleError(f"the rule of {target} is malformed: {what}", help=help)


def _check_terms(
    target: OpOverload, text: str, pattern: Pattern, linear: Sequence[Sequence[int]], local: Mapping[str, object]
) -> None:
    for term in (*pattern.inputs, *pattern.outputs):
        names = [factor for dim in term for factor in dim]
        if twice := {name for name in names if names.count(name) > 1}:
            raise _error(target, f"{text!r} has {min(twice)!r} twice in one term", "give every dim a different name")
    count = len(pattern.inputs)
    if beyond := [index for group in linear for index in group if not 0 <= index < count]:
        raise _error(target, f"linear= names operand {beyond[0]} of {count}", "count the tensor operands from 0")
    factors = {factor for term in (*pattern.inputs, *pattern.outputs) for dim in term for factor in dim}
    if unknown := [factor for factor in local if factor not in factors]:
        raise _error(target, f"local= names {unknown[0]!r}, which {text!r} lacks", "use a factor of the text")


def _check_count(target: OpOverload, text: str, rule: RuleText) -> None:
    """Compare the numbers of terms with the schema, as far as the schema fixes the number of tensors."""
    pattern = parse(rule.text)
    for what, values, terms in (
        ("operands", target._schema.arguments, pattern.inputs),
        ("outputs", target._schema.returns, pattern.outputs),
    ):
        kinds = [str(value.type) for value in values if "Tensor" in str(value.type)]
        least, most = kinds.count("Tensor"), len(kinds)
        if any("List" in kind for kind in kinds):
            continue
        if not least <= len(terms) <= most and not (most == 0 and terms == ((),)):
            count = f"{least}" if least == most else f"{least} to {most}"
            raise _error(target, f"{text!r} has {len(terms)} {what}, the op {count}", "give every tensor one term")
