"""Choices of every op, from which the search takes one."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import fx

from tpcompiler.cost.kernels import Kernel, factors_of_product, is_attention
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.constraints import Dims, Exactly, Over
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.static import computed_from_leaves
from tpcompiler.rules.infer import Option, is_one
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.leaf import Leaf
from tpcompiler.solver.pieces import find_pieces
from tpcompiler.solver.samples import NO_SAMPLES, Samples
from tpcompiler.solver.stage import MOST_CHOICES, Stage
from tpcompiler.solver.ways import (
    Limits,
    Ways,
    can_take,
    made_of,
    make_wanted,
    move_cuts,
    shared_heads,
    take_operands,
    to_cut,
)
from tpcompiler.terminal.progress import counted

MOST_PLANNED = 64  # choices of an op, with a plan


@dataclass(eq=False)
class Domain:
    """The ways of every op of a program, and the shardings that its leaves may have.

    Attributes:
        leaves: by placeholder name.
        weight: of a call of the program among those of others.
        comes_of: value -> the groups of the leaves with a style that its shards come from.
        samples: the values of samples.
        growing: leaves for which the programs still found new shardings as the search stopped looking.
    """

    program: PlannedProgram
    stage: Stage
    leaves: Mapping[str, Leaf]
    operands: dict[fx.Node, list[fx.Node]]
    rules: dict[fx.Node, Rule | None]
    ways: dict[fx.Node, Ways] = field(default_factory=dict)
    kernels: Mapping[fx.Node, Kernel] = field(default_factory=dict)
    weight: float = 1.0
    comes_of: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    samples: Samples = NO_SAMPLES
    growing: int = 0


def find_domain(
    program: PlannedProgram, stage: Stage, leaves: Mapping[str, Leaf], samples: Samples = NO_SAMPLES
) -> Domain:
    """Find the options of every op with a rule, over the axis of a stage.

    They are the op whole, those that take its operands as they may be, and those that make what its users want.
    """
    domain = Domain(program, stage, leaves, *stage.read.once(program.graph, partial(_read_calls, program.graph)))
    domain.samples = samples
    if stage.is_searched:
        _find_all_ways(domain)
    else:
        _find_planned_ways(domain)
    return domain


def _find_all_ways(domain: Domain) -> None:
    """Find ways without a plan: every factor of every rule is cut, except samples and tokens of the inputs.

    What lies within each token may be cut, such as heads that are merged with samples. Where the neighbours of an op
    are cut along tokens it may follow, unless it multiplies with weights: these would be whole.
    """
    stage, tokens = domain.stage, find_tokens(domain)
    pieces = find_pieces(domain.operands, domain.rules, MOST_CHOICES)
    for node, rule in domain.rules.items():
        if rule is not None:
            is_product = is_attention(node) or factors_of_product(node, rule) is not None
            many = pieces.get(node, frozenset())
            own = _limits_without_plan(rule, {} if stage.gathers else tokens[node], many)
            limits = own if is_product else _limits_without_plan(rule, {}, many)
            base = stage.base(node)
            known = "first", rule, stage.name(base), limits, own, bool(many)
            find = partial(_every_way, stage, rule, base, limits, own, bool(many))
            domain.ways[node] = stage.known.once(known, find)
    for node in counted([*domain.operands][::-1], "finding choices", "ops"):
        _make_wanted(domain, node)
        _take_operands(domain, node)
    _settle_ways(domain)


def _limits_without_plan(rule: Rule, tokens: Mapping[str, bool], pieces: Set[str]) -> Limits:
    left_out = frozenset(factor for factor in rule.factors if factor.startswith("_"))
    barred = {f for f, alone in tokens.items() if alone} | {f for f in rule.factors if is_one(rule.extent[f])} | pieces
    return Limits(frozenset(barred), frozenset(tokens), left_out)


def _every_way(stage: Stage, rule: Rule, base: Option, limits: Limits, own: Limits, is_capped: bool) -> Ways:
    options = (stage.extended(base, each) for each in stage.own_options(rule))
    ways = Ways.whole(stage, rule, base, limits, stage.most).adding(stage, options, own)
    return replace(ways, is_capped=is_capped or ways.is_capped)


def _find_planned_ways(domain: Domain) -> None:
    """Find ways with a plan: shards and pending reductions come from the leaves, inputs and pins that it cuts.

    Where an op cannot take a shard, its ways to cut that dim count too, or another dim of that operand.
    """
    stage, touched = domain.stage, _find_touched(domain)
    loose = set(computed_from_leaves(domain.program.graph, {leaf for leaf, _ in domain.program.leaves()})) - touched
    for node, rule in domain.rules.items():
        if rule is not None:
            base, limits = stage.base(node), _limits_with_plan(rule, node, domain.operands[node], touched, loose)
            known = "first", rule, stage.name(base), limits
            domain.ways[node] = stage.known.once(known, partial(Ways.whole, stage, rule, base, limits, MOST_PLANNED))
    for node in domain.ways:
        _take_operands(domain, node)
    for node in counted([*domain.operands][::-1], "finding choices", "ops"):
        _make_wanted(domain, node)
    _settle_ways(domain)
    _let_leaves_be_whole(domain, touched)
    _move_cuts(domain)


def _limits_with_plan(
    rule: Rule, node: fx.Node, operands: Sequence[fx.Node], touched: Set[fx.Node], loose: Set[fx.Node]
) -> Limits:
    """Return the limits of an op. `loose`: values that are computed from leaves without an entry."""
    if node in loose or node not in touched:
        return Limits(is_closed=node not in loose or not rule.relayout)
    factors: dict[bool, set[str]] = {True: set(), False: set()}
    for operand, term in zip(operands, rule.pattern.inputs, strict=True):
        factors[operand in loose].update(factor for dim in term for factor in dim)
    return Limits(frozenset(factors[True] - factors[False]))


def _settle_ways(domain: Domain) -> None:
    """Let a leaf be what is written to it, or what its gradient is, and ops follow it."""
    placeholders = {fqn: domain.leaves[node.name] for node, fqn in domain.program.leaves()}
    for value, name in domain.program.followers():
        for sharding in shardings_of(domain, value) if name in placeholders else ():
            placeholders[name].want(sharding.settled(), domain.stage)
    for node in domain.operands:
        _take_operands(domain, node)
        _make_wanted(domain, node)


def _read_calls(graph: fx.Graph) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, Rule | None]]:
    """The operands and the rules of all calls."""
    calls = [node for node in edit.calls(graph) if node.target is not operator.getitem]
    rules = {node: rule_of(node) for node in calls if node.target is not pin and edit.outputs(node)}
    return {node: edit.operands(node) for node in calls}, rules


def find_tokens(domain: Domain) -> dict[fx.Node, dict[str, bool]]:
    """Return the factors that are samples or tokens of the inputs; False for the outermost in a dim of several.

    Not those that the caller cuts over the axis.
    """
    found_in: dict[fx.Node, dict[str, bool]] = {}
    tokens: dict[fx.Node, dict[int, bool]] = {}
    for node in domain.program.user_inputs():
        value, cut = edit.fake(node), domain.program.constraints[node.name].sharding
        own = range(value.ndim)[: 1 if value.is_floating_point() else None]
        tokens[node] = {dim: True for dim in own if domain.stage.axis not in cut.dims[dim].axes}
    for node, operands in domain.operands.items():
        if node.target is pin and operands[0] in tokens:
            tokens[node] = tokens[operands[0]]
        if (rule := domain.rules.get(node)) is None:
            continue
        found = found_in[node] = {}
        for operand, term in zip(operands, rule.pattern.inputs, strict=True):
            for at, alone in tokens.get(operand, {}).items():
                dim = [factor for factor in term[at] if not is_one(rule.extent[factor])]
                for factor in dim if alone else dim[:1]:
                    found[factor] = found.get(factor, False) or alone or len(dim) > 1
        for made, at in edit.results(node):
            dims = tokens[made] = {}
            for position, factors in enumerate(rule.pattern.outputs[at]):
                inside = [factor for factor in factors if not is_one(rule.extent[factor])]
                if inside and inside[0] in found:
                    dims[position] = all(found.get(factor, False) for factor in inside)
    return found_in


def _find_touched(domain: Domain) -> Set[fx.Node]:
    """Return the leaves, inputs and pins that are cut over the axis, and all values that depend on one."""
    program, axis = domain.program, domain.stage.axis
    touched = {node for node in program.user_inputs() if any(axis in own.axes for own in shardings_of(domain, node))}
    for leaf, _ in program.leaves():
        known = domain.leaves[leaf.name]
        asked = known.allowed.shardings if isinstance(known.allowed, Exactly | Dims) else ()
        is_cut = any(axis in each.axes for each in asked)
        if is_cut or known.is_followed:
            touched.add(leaf)
        if is_cut and isinstance(known.allowed, Dims):
            domain.comes_of[leaf] = frozenset([known.group])
    for node in edit.calls(program.graph):
        source, _ = edit.producer(node)
        made_of = domain.operands[node] if source is node else [source]
        pinned = node.target is pin and axis in node.meta[PIN].sharding.axes
        if pinned or not touched.isdisjoint(made_of):
            touched.add(node)
    return touched


def shardings_of(domain: Domain, value: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings in which a value may be produced, as far as known."""
    if value.op == "placeholder":
        leaf = domain.leaves.get(value.name)
        if leaf is not None:
            exact = leaf.within.shardings[:1] if isinstance(leaf.within, Exactly) else ()
            return (*leaf.shardings, *(domain.stage.within(each, leaf.value) for each in exact))
        given = domain.program.constraints.get(value.name)
        return () if given is None else _shardings_of_input(domain.stage, given.sharding, edit.fake(value))
    source, at = edit.producer(value)
    if source.target is pin:
        allowed = source.meta[PIN].allowed
        if isinstance(allowed, Over) and set(allowed.axes).isdisjoint(domain.stage.own):
            return shardings_of(domain, domain.operands[source][0])
        return shardings_of_pin(domain, source)
    return domain.ways[source].made[at] if source in domain.ways else ()


def _shardings_of_input(stage: Stage, given: Sharding, value: torch.Tensor) -> tuple[Sharding, ...]:
    """Return the sharding of an input, and over an open axis the one with dim 0 cut, which is a local slice."""
    own = stage.within(given, value)
    if not stage.is_open or not value.ndim or is_one(value.shape[0]):
        return (own,)
    cut = own.dims[0].inside(DimSharding.by(stage.axis))
    return (own,) if cut.find_misfit(value.shape[0], stage.mesh) else (own, stage.within(own.with_dim(0, cut), value))


def shardings_of_pin(domain: Domain, node: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings of a pin: the requested one; over other axes, any sharding of its value."""
    asked, stage, (value,) = node.meta[PIN], domain.stage, domain.operands[node]
    have = dict.fromkeys([*shardings_of(domain, value), Sharding.replicated(edit.ndim(value))])
    return tuple(dict.fromkeys(stage.within(asked.applied(sharding), edit.fake(value)) for sharding in have))


def _take_operands(domain: Domain, node: fx.Node) -> None:
    """Let an op run by what its operands are; where it cannot, by the ways in which it could cut that dim."""
    if node not in domain.ways:
        return
    stage, had, operands = domain.stage, domain.ways[node], domain.operands[node]
    have = tuple((*(own := shardings_of(domain, value)), *_cut_again(domain, value, own)) for value in operands)
    domain.ways[node] = stage.known.once(("takes", had, have), partial(take_operands, stage, had, have))
    pairs = zip(operands, have, strict=True)
    behind = [domain.comes_of[o] for o, own in pairs if o in domain.comes_of and to_cut(stage, own)]
    if behind:
        comes_of = behind[0] if len(behind) == 1 else frozenset().union(*behind)
        for made, _ in edit.results(node):
            domain.comes_of[made] = comes_of


def _cut_again(domain: Domain, value: fx.Node, have: Sequence[Sharding]) -> Iterator[Sharding]:
    """Yield a value of samples cut along them, such as sorted tokens, if what makes it has to have them whole."""
    dims, axis = domain.samples.dims_of(value, domain.stage.axis), domain.stage.axis
    if dims and not any(axis in sharding.dims[dim].axes for sharding in have for dim in dims):
        whole = Sharding.replicated(edit.ndim(value))
        yield domain.stage.within(whole.with_dim(dims[0], DimSharding.by(axis)), edit.fake(value))


def _let_leaves_be_whole(domain: Domain, touched: Set[fx.Node]) -> None:
    """Leaves of styles may be whole over the axis where an op that cuts its other operands cannot take what is made of
    them cut, such as keys and values of which there are fewer heads than ranks. Operands that are made of the same
    leaves do not count: they would be whole too.
    """
    stage = domain.stage
    reached: dict[fx.Node, tuple[Sharding, ...]] = {  # what values may be without a change on the way from such a leaf
        node: shardings_of(domain, node) for node, _ in domain.program.leaves() if node in domain.comes_of
    }
    for node, ways in domain.ways.items():
        operands = domain.operands[node]
        have = tuple(reached.get(operand, ()) for operand in operands)
        if not any(have) or is_backward(node):
            continue  # a backward takes what its forward did
        for made, at in edit.results(node):
            reached[made] = stage.known.once(("reached", ways, have, at), partial(made_of, stage, ways, have, at))
        if any(domain.leaves[o.name].is_fixed for o in operands if o.name in domain.leaves):
            continue
        for index, operand in enumerate(operands):
            leaves = domain.comes_of.get(operand, frozenset())
            are_touched = tuple(
                o in touched and not (o in domain.comes_of and domain.comes_of[o] <= leaves) for o in operands
            )
            known = "can", ways, index, are_touched, have
            if not stage.known.once(known, partial(can_take, stage, ways, index, are_touched, have)):
                for leaf in domain.leaves.values():
                    if leaf.group in leaves:
                        leaf.let_be_whole()


def _move_cuts(domain: Domain) -> None:
    """Let ops cut another dim of operands that they cannot take as they are cut, and the ops around them follow."""
    stage, is_moved = domain.stage, False
    for node, had in domain.ways.items():
        have = tuple(_computed(domain, operand) for operand in domain.operands[node])
        domain.ways[node] = stage.known.once(("moves", had, have), partial(move_cuts, stage, had, have))
        is_moved = is_moved or domain.ways[node] is not had
        if is_moved:
            _take_operands(domain, node)
    if is_moved:
        for node in [*domain.operands][::-1]:
            _make_wanted(domain, node)
        _settle_ways(domain)


def _computed(domain: Domain, operand: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings of a computed value; none of a leaf, which is not resharded in each call."""
    return () if operand.name in domain.leaves else shardings_of(domain, operand)


def _make_wanted(domain: Domain, node: fx.Node) -> None:
    """Let those who make an op's operands make what it wants of them."""
    stage, wanted = domain.stage, list[tuple[Sharding, ...]]()
    if node.target is pin:
        wanted = [shardings_of_pin(domain, node)]
    elif node in domain.ways:
        wanted = domain.ways[node].wants
    for value, shardings in zip(domain.operands[node] if wanted else (), wanted, strict=True):
        source, at = edit.producer(value)
        if value.name in domain.leaves:
            for sharding in to_cut(stage, shardings):
                domain.leaves[value.name].want(sharding, stage)
        elif source in domain.ways:
            had, is_one = domain.ways[source], source is not value
            known = "makes", had, at, is_one, shardings
            domain.ways[source] = stage.known.once(known, partial(make_wanted, stage, had, at, is_one, shardings))


def find_shared_heads(domain: Domain) -> set[tuple[int, bool]]:
    """Return how an axis could run as two for dims that fewer than all ranks can shard: 2 of 4 ranks for 2 key heads.

    With each degree of the outer axis: True if the inner one shards the heads, and the outer one the steps as before.
    """
    stage, found = domain.stage, set[tuple[int, bool]]()
    for node, ways in domain.ways.items():
        have = tuple(
            _computed(domain, operand) if edit.fake(operand).is_floating_point() else ()  # no masks: few samples
            for operand in domain.operands[node]
        )
        found |= stage.known.once(("shared", ways, have), partial(shared_heads, stage, ways, have))
    return found
