"""Choices of every op, from which the search takes one."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler.cost.kernels import Kernel, factors_of_product, is_attention
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Dims, Exactly, Over
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.static import computed_from_leaves
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.leaf import Leaf
from tpcompiler.solver.stage import Choice, Stage
from tpcompiler.solver.ways import Limits, Ways, can_take, made_of, make_wanted, shared_heads, take_operands, to_cut
from tpcompiler.terminal.progress import counted


@dataclass(eq=False)
class Domain:
    """The ways of every op of a program, and what its leaves may be."""

    program: PlannedProgram
    stage: Stage
    leaves: Mapping[str, Leaf]  # by placeholder name
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    rules: dict[fx.Node, Rule | None] = field(default_factory=dict)
    ways: dict[fx.Node, Ways] = field(default_factory=dict)
    kernels: Mapping[fx.Node, Kernel] = field(default_factory=dict)
    weight: float = 1.0  # of a call of the program among those of others
    tokens: dict[fx.Node, dict[str, bool]] = field(default_factory=dict)  # factors of samples or tokens
    touched: set[fx.Node] = field(default_factory=set)  # what something that is cut leads to
    loose: set[fx.Node] = field(default_factory=set)  # computed from leaves that the plan does not name
    comes_of: dict[fx.Node, frozenset[str]] = field(default_factory=dict)  # groups of the styles' leaves behind its cut


def tensor_index(node: fx.Node, index: Any) -> int:
    """Return the index of a result among the tensors that a node makes."""
    return sum(isinstance(value, torch.Tensor) for value in edit.fake(node)[:index])


def find_domain(program: PlannedProgram, stage: Stage, leaves: Mapping[str, Leaf]) -> Domain:
    """The options of every op with a rule, in order, over the axis of a stage.

    The op whole; what its operands may be; and what its users want. With a plan, cuts and pending reductions come of
    what it cuts, of the inputs and of the pins; where an op cannot take a cut, also of the ways in which it can take
    one of that dim. Without one, every factor of every rule is cut, except samples and tokens of the inputs.
    """
    domain = Domain(program, stage, leaves)
    domain.operands, domain.rules = stage.read.once(program.graph, partial(_read_calls, program.graph))
    calls = list(domain.operands)
    ruled = [node for node, rule in domain.rules.items() if rule is not None]
    if stage.is_searched:
        _find_tokens(domain)
    else:
        _find_touched(domain)
    for node in ruled:
        domain.ways[node] = _first_ways(domain, node)
    for node in () if stage.is_searched else ruled:
        _take_operands(domain, node)
    for node in counted(calls[::-1], "finding choices", "ops"):
        _make_wanted(domain, node)
        if stage.is_searched and node in domain.ways:
            _take_operands(domain, node)
    _write_back(domain)
    for node in calls:
        if node in domain.ways:
            _take_operands(domain, node)
        _make_wanted(domain, node)
    if not stage.is_searched:
        _let_leaves_be_whole(domain)
    return domain


def _read_calls(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, Rule | None]]:
    """The operands and the rules of all calls."""
    calls = [node for node in edit.calls(graph) if node.target is not operator.getitem]
    rules = {node: rule_of(node) for node in calls if node.target is not pin and edit.outputs(node)}
    return {node: edit.operands(node) for node in calls}, rules


def _write_back(domain: Domain) -> None:
    """Let a leaf that is written be what is written to it."""
    placeholders = {fqn: domain.leaves[node.name] for node, fqn in domain.program.leaves()}
    for value, name in domain.program.written():
        for sharding in shardings_of(domain, value) if name in placeholders else ():
            placeholders[name].want(sharding.settled(), domain.stage)


def _find_tokens(domain: Domain) -> None:
    """Find the factors that are samples or tokens of the inputs; False for the outermost in a dim of several."""
    tokens: dict[fx.Node, dict[int, bool]] = {}
    for node in domain.program.user_inputs():
        value = edit.fake(node)
        tokens[node] = dict.fromkeys(range(value.ndim)[: 1 if value.is_floating_point() else None], True)
    for node, operands in domain.operands.items():
        if node.target is pin and operands[0] in tokens:
            tokens[node] = tokens[operands[0]]
        if (rule := domain.rules.get(node)) is None:
            continue
        found = domain.tokens[node] = {}
        for operand, term in zip(operands, rule.pattern.inputs, strict=True):
            for at, alone in tokens.get(operand, {}).items():
                dim = [factor for factor in term[at] if not is_one(rule.extent[factor])]
                for factor in dim if alone else dim[:1]:
                    found[factor] = found.get(factor, False) or alone or len(dim) > 1
        for made, at in results(node):
            dims = tokens[made] = {}
            for position, factors in enumerate(rule.pattern.outputs[at]):
                inside = [factor for factor in factors if not is_one(rule.extent[factor])]
                if inside and inside[0] in found:
                    dims[position] = all(found.get(factor, False) for factor in inside)


def results(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The values that a node makes, each with its place among the tensors."""
    if edit.is_tensor(node):
        yield node, 0
        return
    for user in node.users:
        if user.target is operator.getitem and edit.is_tensor(user):
            yield user, tensor_index(node, user.args[1])


def _find_touched(domain: Domain) -> None:
    program, axis, leaves = domain.program, domain.stage.axis, dict(domain.program.leaves())
    for leaf in leaves:
        known = domain.leaves[leaf.name]
        if isinstance(known.allowed, Exactly | Dims) and any(axis in each.axes for each in known.allowed.shardings):
            domain.touched.add(leaf)
            if isinstance(known.allowed, Dims):
                domain.comes_of[leaf] = frozenset([known.group])
        elif known.is_written:
            domain.touched.add(leaf)
    domain.touched |= {n for n in program.user_inputs() if axis in program.input_sharding(n).axes}
    for node in edit.calls(program.graph):
        made_of: list[Any] = [node.args[0]] if node.target is operator.getitem else domain.operands[node]
        pinned = node.target is pin and axis in node.meta[PIN].sharding.axes
        if pinned or not domain.touched.isdisjoint(made_of):
            domain.touched.add(node)
    domain.loose = set(computed_from_leaves(program.graph, leaves.keys())) - domain.touched


def _first_ways(domain: Domain, node: fx.Node) -> Ways:
    """The op as it runs over the axes before; without a plan, all that its rule knows besides."""
    stage, rule = domain.stage, domain.rules[node]
    assert rule is not None
    base, limits, own_limits = (
        stage.base(node),
        _limits_of(domain, node, rule),
        _limits_of(domain, node, rule, own=True),
    )

    def start() -> Ways:
        ways = Ways.whole(stage, rule, base, limits)
        own = (stage.extended(base, each) for each in stage.own_options(rule) if stage.is_searched)
        return ways.adding(stage, own, own_limits)

    known = "first", id(rule), stage.name(base), limits, own_limits
    return stage.once(known, start)  # type: ignore[no-any-return]


def _limits_of(domain: Domain, node: fx.Node, rule: Rule, own: bool = False) -> Limits:
    """Return the factors that the search may shard.

    Without a plan: no samples or tokens, nor what an op leaves out of its operand; what lies within each token may be
    cut, such as heads that are merged with samples. With one: nothing but what comes of what is cut.

    Args:
        own: without a plan, by the op itself. Where its neighbours are cut along tokens it may follow, unless
            it multiplies with weights: these would be whole.
    """
    if domain.stage.is_searched:
        follows = not own and not is_attention(node) and factors_of_product(node, rule) is None
        tokens = {} if domain.stage.gathers or follows else domain.tokens[node]
        left_out = frozenset(factor for factor in rule.factors if factor.startswith("_"))
        barred = {f for f, alone in tokens.items() if alone} | {f for f in rule.factors if is_one(rule.extent[f])}
        return Limits(frozenset(barred), frozenset(tokens), left_out)
    if node in domain.loose or node not in domain.touched:
        return Limits(is_closed=node not in domain.loose or not rule.relayout)
    factors: dict[bool, set[str]] = {True: set(), False: set()}
    for operand, term in zip(domain.operands[node], rule.pattern.inputs, strict=True):
        factors[operand in domain.loose].update(factor for dim in term for factor in dim)
    return Limits(frozenset(factors[True] - factors[False]))


def shardings_of(domain: Domain, value: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings in which a value may be produced, as far as known."""
    if value.op == "placeholder":
        leaf = domain.leaves.get(value.name)
        if leaf is not None:
            exact = leaf.within.shardings[:1] if isinstance(leaf.within, Exactly) else ()
            return (*leaf.shardings, *(domain.stage.within(each, leaf.value) for each in exact))
        given = domain.program.constraints.get(value.name)
        return () if given is None else (domain.stage.within(given.sharding, edit.fake(value)),)
    source: Any = value.args[0] if value.target is operator.getitem else value
    if source.target is pin:
        return _pinned(domain, source)
    at = 0 if source is value else tensor_index(source, value.args[1])
    return domain.ways[source].made[at] if source in domain.ways else ()


def _pinned(domain: Domain, node: fx.Node) -> tuple[Sharding, ...]:
    allowed = node.meta[PIN].allowed
    if isinstance(allowed, Over) and set(allowed.axes).isdisjoint(domain.stage.own):
        return shardings_of(domain, domain.operands[node][0])
    return tuple(choice.made[0] for choice in pin_choices(domain, node))


def pin_choices(domain: Domain, node: fx.Node) -> list[Choice]:
    """Return the shardings of a pin: the requested one; over other axes, any sharding of its value."""
    asked, stage, (value,) = node.meta[PIN], domain.stage, domain.operands[node]
    have = dict.fromkeys([*shardings_of(domain, value), Sharding.replicated(edit.ndim(value))])
    made = dict.fromkeys(stage.within(asked.applied(sharding), edit.fake(value)) for sharding in have)
    return [Choice((sharding,), (sharding,), 0.0) for sharding in made]


def _take_operands(domain: Domain, node: fx.Node) -> None:
    """Let an op run by what its operands are; where it cannot, by the ways in which it could cut that dim."""
    stage, had, operands = domain.stage, domain.ways[node], domain.operands[node]
    have = tuple(shardings_of(domain, operand) for operand in operands)
    domain.ways[node] = stage.once(("takes", had, have), partial(take_operands, stage, had, have))
    pairs = zip(operands, have, strict=True)
    behind = [domain.comes_of[o] for o, own in pairs if o in domain.comes_of and to_cut(stage, own)]
    if behind:
        comes_of = behind[0] if len(behind) == 1 else frozenset().union(*behind)
        for made, _ in results(node):
            domain.comes_of[made] = comes_of


def _let_leaves_be_whole(domain: Domain) -> None:
    """Leaves of styles may be whole over the axis where an op that cuts its other operands cannot take what is made of
    them cut, such as keys and values of which there are fewer heads than ranks.
    """
    stage = domain.stage
    reached: dict[fx.Node, tuple[Sharding, ...]] = {  # what values may be without a change on the way from such a leaf
        node: shardings_of(domain, node) for node, _ in domain.program.leaves() if node in domain.comes_of
    }
    for node, ways in domain.ways.items():
        operands = domain.operands[node]
        have = tuple(reached.get(operand, ()) for operand in operands)
        if not any(have):
            continue
        for made, at in results(node):
            reached[made] = stage.once(("reached", ways, have, at), partial(made_of, stage, ways, have, at))
        if any(domain.leaves[o.name].is_fixed for o in operands if o.name in domain.leaves):
            continue
        touched = tuple(operand in domain.touched for operand in operands)
        for index, operand in enumerate(operands):
            known = "can", ways, index, touched, have
            if not stage.once(known, partial(can_take, stage, ways, index, touched, have)):
                for leaf in domain.leaves.values():
                    if leaf.group in domain.comes_of.get(operand, ()):
                        leaf.let_be_whole()


def _make_wanted(domain: Domain, node: fx.Node) -> None:
    """Let those who make an op's operands make what it wants of them."""
    if node.target is pin:
        wanted = [tuple(choice.wants[0] for choice in pin_choices(domain, node))]
    else:
        wanted = [*domain.ways[node].wants] if node in domain.ways else []
    for operand, shardings in zip(domain.operands[node] if wanted else (), wanted, strict=True):
        _ask(domain, operand, shardings)


def _ask(domain: Domain, value: fx.Node, wanted: Sequence[Sharding]) -> None:
    stage = domain.stage
    if value.op == "placeholder" and value.name in domain.leaves:
        for sharding in to_cut(stage, wanted):
            domain.leaves[value.name].want(sharding, stage)
        return
    source: Any = value.args[0] if value.target is operator.getitem else value
    if source not in domain.ways:
        return
    had, is_one = domain.ways[source], source is not value
    at = tensor_index(source, value.args[1]) if is_one else 0
    known = "makes", had, at, is_one, wanted
    domain.ways[source] = stage.once(known, partial(make_wanted, stage, had, at, is_one, wanted))


def find_shared_heads(domain: Domain) -> set[int]:
    """Return the degrees for dims that fewer than all ranks can shard: 2 of 4 ranks, for two key heads."""
    stage, found = domain.stage, set[int]()
    for node, ways in domain.ways.items():
        have = tuple(
            shardings_of(domain, operand) if edit.fake(operand).is_floating_point() else ()  # no masks: few samples
            for operand in domain.operands[node]
        )
        found |= stage.once(("shared", ways, have), partial(shared_heads, stage, ways, have))
    return found
