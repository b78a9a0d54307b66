"""What every op may do: the choices among which the search takes one."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import DimSharding, Sharding
from tpcompiler.rules.features import computed_from_leaves
from tpcompiler.rules.infer import Option, Refusal, merge
from tpcompiler.rules.notation import Joined, Rule, Term
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.stage import Both, Choice, Leaf, Stage

MOST_CHOICES, MOST_PLANNED = 20, 64  # of an op, without a plan and with one


@dataclass
class Domain:
    """The options of every op of a program, and what its leaves may be.

    `capped`: ops that were given fewer choices than there are.
    """

    program: PlannedProgram
    stage: Stage
    leaves: Mapping[str, Leaf]  # by placeholder name
    rules: dict[fx.Node, Rule | None] = field(default_factory=dict)
    kept: dict[fx.Node, dict[Any, Option]] = field(default_factory=dict)
    capped: set[fx.Node] = field(default_factory=set)
    tokens: dict[fx.Node, dict[str, bool]] = field(default_factory=dict)  # factors of samples or tokens
    touched: set[fx.Node] = field(default_factory=set)  # what something that is cut leads to
    loose: set[fx.Node] = field(default_factory=set)  # computed from leaves that the plan does not name
    comes_of: dict[fx.Node, frozenset[str]] = field(default_factory=dict)  # groups of the styles' leaves behind its cut

    @property
    def most(self) -> int:
        return MOST_CHOICES if self.stage.free else MOST_PLANNED

    def both(self, node: fx.Node, option: Option) -> Both | Refusal:
        rule = self.rules[node]
        assert rule is not None
        return self.stage.both(rule, option)


def tensor_index(node: fx.Node, index: Any) -> int:
    """Which of the tensors that a node makes one of its results is."""
    return sum(isinstance(value, torch.Tensor) for value in node.meta["val"][:index])


def find_domain(program: PlannedProgram, stage: Stage, leaves: Mapping[str, Leaf]) -> Domain:
    """The options of every op with a rule, in order, over the axis of a stage.

    The op whole; what its operands may be; and what its users want. With a plan, cuts and pending reductions come of
    what it cuts, of the inputs and of the pins; where an op cannot take a cut, also of the ways in which it can take
    one of that dim. Without one, every factor of every rule is cut, but for samples and tokens of the inputs.
    """
    domain = Domain(program, stage, leaves)
    calls = [node for node in edit.calls(program.graph) if node.target is not operator.getitem]
    domain.rules = {node: rule_of(node) for node in calls if node.target is not pin and edit.outputs(node)}
    ruled = [node for node, rule in domain.rules.items() if rule is not None]
    if stage.free:
        _find_tokens(domain)
    else:
        _find_touched(domain)
    for node in ruled:
        base = stage.base(node)
        domain.kept[node] = {stage.name(base): base}
        if stage.free:
            rule = domain.rules[node]
            assert rule is not None
            _add(domain, node, (option for option in stage.own_options(rule)))
    for node in () if stage.free else ruled:
        _take_operands(domain, node)
    for node in reversed(calls):
        _make_wanted(domain, node)
        if stage.free and node in domain.kept:
            _take_operands(domain, node)
    _write_back(domain)
    for node in calls:
        if node in domain.kept:
            _take_operands(domain, node)
        _make_wanted(domain, node)
    for node in () if stage.free else ruled:
        _let_operands_be_whole(domain, node)
    return domain


def _write_back(domain: Domain) -> None:
    """Let a leaf that is written be what is written to it."""
    placeholders = {fqn: domain.leaves[node.name] for node, fqn in domain.program.leaves()}
    for value, name in domain.program.written():
        for sharding in shardings_of(domain, value) if name in placeholders else ():
            placeholders[name].want(sharding.settled(), domain.stage)


def _find_tokens(domain: Domain) -> None:
    """Which factors are samples or tokens of the inputs; False of those that are outermost in a dim of several."""
    tokens: dict[fx.Node, dict[int, bool]] = {}
    for node in domain.program.user_inputs():
        value = node.meta["val"]
        tokens[node] = dict.fromkeys([0] if value.is_floating_point() else range(value.ndim), True)
    for node, rule in domain.rules.items():
        if rule is None:
            continue
        found = domain.tokens[node] = {}
        for operand, term in zip(edit.operands(node), rule.pattern.inputs, strict=True):
            for at, alone in tokens.get(operand, {}).items():
                dim = [factor for factor in term[at] if rule.extent[factor] != 1]
                for factor in dim if alone else dim[:1]:
                    found[factor] = found.get(factor, False) or alone or len(dim) > 1
        for made, at in results(node):
            dims = tokens[made] = {}
            for position, factors in enumerate(rule.pattern.outputs[at]):
                inside = [factor for factor in factors if rule.extent[factor] != 1]
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
        if known.seed is not None and axis in known.seed.sharding.axes:
            domain.touched.add(leaf)
            if known.seed.loose:
                domain.comes_of[leaf] = frozenset([known.group])
        elif known.is_written:
            domain.touched.add(leaf)
    domain.touched |= {n for n in program.user_inputs() if axis in program.input_shardings[n.name].axes}
    for node in edit.calls(program.graph):
        made_of: list[Any] = [node.args[0]] if node.target is operator.getitem else edit.operands(node)
        pinned = node.target is pin and axis in node.meta[PIN].sharding.axes
        if pinned or not domain.touched.isdisjoint(made_of):
            domain.touched.add(node)
    domain.loose = set(computed_from_leaves(program.graph, leaves.keys())) - domain.touched


def _is_allowed(domain: Domain, node: fx.Node, option: Option) -> bool:
    """Whether the search may cut so.

    Without a plan: no samples or tokens, nor what an op leaves out of its operand; what lies within each token may be
    cut, such as heads that are merged with samples. With one: nothing but what comes of what is cut.
    """
    axis, rule = domain.stage.axis, domain.rules[node]
    cuts = {factor: cut for factor, cut in option.cuts.items() if axis in cut.axes}
    if domain.stage.free:
        tokens = domain.tokens[node]
        return not any(
            factor.startswith("_")
            or (factor in tokens and (tokens[factor] or not (cut.levels and cut.levels[0].block)))
            for factor, cut in cuts.items()
        )
    assert rule is not None
    if node in domain.loose:
        return rule.relayout
    if node not in domain.touched:
        return False
    factors: dict[bool, set[str]] = {True: set(), False: set()}
    for operand, term in zip(edit.operands(node), rule.pattern.inputs, strict=True):
        factors[operand in domain.loose].update(factor for dim in term for factor in dim)
    return cuts.keys().isdisjoint(factors[True] - factors[False])


def _add(domain: Domain, node: fx.Node, more: Iterable[Option]) -> None:
    stage, found = domain.stage, domain.kept[node]
    for option in more:
        name = stage.name(option)
        if name in found or not _is_allowed(domain, node, option) or isinstance(domain.both(node, option), Refusal):
            continue
        if len(found) >= domain.most:
            domain.capped.add(node)
            return
        found[name] = option


def shardings_of(domain: Domain, value: fx.Node) -> list[Sharding]:
    """What a value may be made as, as far as is known yet."""
    if value.op == "placeholder":
        leaf = domain.leaves.get(value.name)
        if leaf is not None:
            return [*leaf.shardings]
        given = domain.program.input_shardings.get(value.name)
        return [] if given is None else [domain.stage.within(given, value.meta["val"])]
    source: Any = value.args[0] if value.target is operator.getitem else value
    if source.target is pin:
        return _pinned(domain, source)
    if source not in domain.kept:
        return []
    at = 0 if source is value else tensor_index(source, value.args[1])
    return [both[1][at] for both in _each(domain, source)]


def _pinned(domain: Domain, node: fx.Node) -> list[Sharding]:
    seed = node.meta[PIN]
    if not seed.axes or domain.stage.axis in seed.axes:
        return [choice.made[0] for choice in pin_choices(domain, node)]
    return shardings_of(domain, edit.operands(node)[0])


def pin_choices(domain: Domain, node: fx.Node) -> list[Choice]:
    """What a pin may be: what it asks for; over axes that it does not speak of, whatever its value is."""
    seed, stage, (value,) = node.meta[PIN], domain.stage, edit.operands(node)
    if not seed.axes:
        made = [stage.within(seed.sharding, value.meta["val"])]
    else:
        have = dict.fromkeys([*shardings_of(domain, value), Sharding.replicated(value.meta["val"].ndim)])
        made = list(dict.fromkeys(stage.within(seed.over(sharding), value.meta["val"]) for sharding in have))
    return [Choice((sharding,), (sharding,), 0.0) for sharding in made]


def _each(domain: Domain, node: fx.Node) -> Iterator[Both]:
    for option in list(domain.kept[node].values()):
        both = domain.both(node, option)
        if not isinstance(both, Refusal):
            yield both


def _take_operands(domain: Domain, node: fx.Node) -> None:
    """Let an op run by what its operands are; where it cannot, by the ways in which it could cut that dim."""
    rule, stage, axis = domain.rules[node], domain.stage, domain.stage.axis
    assert rule is not None
    base = stage.base(node)
    followed: list[list[Option]] = []
    behind: set[str] = set()
    for index, operand in enumerate(edit.operands(node)):
        own: list[Option] = []
        for sharding in dict.fromkeys(shardings_of(domain, operand)):
            if axis not in sharding.axes:
                continue
            if axis in sharding.cut_axes and operand in domain.comes_of:
                behind |= domain.comes_of[operand]
            option = stage.keep(rule, index, sharding, base)
            if isinstance(option, Option):
                own.append(option)
                continue
            own += _other_cuts(rule, rule.pattern.inputs[index], sharding, stage, base)
        if own:
            followed.append(own)
    _add(domain, node, (option for own in followed for option in own))
    if len(followed) > 1:
        _add(domain, node, _merged(followed, domain.most))
    if any(isinstance(dim, Joined) for term in (*rule.pattern.inputs, *rule.pattern.outputs) for dim in term):
        _add(domain, node, _parts_together(domain, node))
    for made, _ in results(node) if behind else ():
        domain.comes_of[made] = frozenset(behind)


def _merged(followed: Sequence[Sequence[Option]], most: int) -> Iterator[Option]:
    """One of each together: in every way where these are few, otherwise the newest, and every other beside them."""
    newest = [own[-1] for own in followed]
    ways: Iterable[Sequence[Option]] = itertools.product(*(reversed(own) for own in followed))
    if math.prod(map(len, followed)) > most:
        ways = [newest] + [
            [*newest[:at], other, *newest[at + 1 :]] for at, own in enumerate(followed) for other in own[:-1]
        ]
    yield from (both for way in ways if (both := merge(way)) is not None)


def _parts_together(domain: Domain, node: fx.Node) -> Iterator[Option]:
    """Parts of one dim that are cut each by itself, cut at once."""
    axis = domain.stage.axis
    alone: dict[frozenset[str], list[Option]] = {}
    for option in domain.kept[node].values():
        factors = frozenset(factor for factor, cut in option.cuts.items() if axis in cut.axes)
        if factors:
            alone.setdefault(factors, []).append(option)
    single = [own for factors, own in alone.items() if not any(other < factors for other in alone)]
    yield from _merged(single, domain.most)


def _other_cuts(rule: Rule, term: Term, sharding: Sharding, stage: Stage, base: Option) -> Iterator[Option]:
    """The options that cut the dims that an operand is cut on where the op can take it: one of its factors."""
    for dim, cut in zip(term, sharding.dims, strict=True):
        if stage.axis not in cut.axes:
            continue
        free = [factor for factor in dim if factor not in rule.pattern.whole]
        sets = [free] if isinstance(dim, Joined) else [[factor] for factor in free]
        for factors in sets:
            option = stage.extended(base, Option(dict.fromkeys(factors, DimSharding.by(stage.axis))))
            if factors and option is not None:
                yield option


def _let_operands_be_whole(domain: Domain, node: fx.Node) -> None:
    """Leaves of styles may be whole over the axis where an op that cuts its other operands cannot take theirs cut.

    So are keys and values of which there are fewer heads than ranks.
    """
    axis, operands, rule = domain.stage.axis, edit.operands(node), domain.rules[node]
    if rule is None or any(domain.leaves[o.name].seed for o in operands if o.name in domain.leaves):
        return
    for index, operand in enumerate(operands):
        cut = [sharding for sharding in shardings_of(domain, operand) if axis in sharding.axes]
        if operand not in domain.comes_of or not cut:
            continue
        pairs = enumerate(zip(operands, rule.pattern.inputs, strict=True))
        others = {f for at, (o, term) in pairs if at != index and o in domain.touched for dim in term for f in dim}
        wanted = [
            both[0][index]
            for option in domain.kept[node].values()
            if any(axis in how.axes and factor in others for factor, how in option.cuts.items())
            and not isinstance(both := domain.both(node, option), Refusal)
        ]
        if wanted and not any(want in cut for want in wanted):
            for leaf in domain.leaves.values():
                if leaf.group in domain.comes_of[operand]:
                    leaf.let_be_whole()


def _make_wanted(domain: Domain, node: fx.Node) -> None:
    """Let those who make an op's operands make what it wants of them."""
    stage = domain.stage
    if node.target is pin:
        needs: list[tuple[Sharding, ...]] = [choice.wants for choice in pin_choices(domain, node)]
    else:
        needs = [both[0] for both in _each(domain, node)] if node in domain.kept else []
    for index, operand in enumerate(edit.operands(node) if needs else ()):
        wanted = dict.fromkeys(wants[index] for wants in needs)
        _ask(domain, operand, [s for s in wanted if stage.axis in s.cut_axes and not s.partial])


def _ask(domain: Domain, value: fx.Node, wanted: Sequence[Sharding]) -> None:
    stage = domain.stage
    if value.op == "placeholder" and value.name in domain.leaves:
        for sharding in wanted:
            domain.leaves[value.name].want(sharding, stage)
        return
    source: Any = value.args[0] if value.target is operator.getitem else value
    rule = domain.rules.get(source)
    if rule is None:
        return
    at = 0 if source is value else tensor_index(source, value.args[1])
    base = stage.base(source)
    for sharding in wanted:
        option = stage.make(rule, at, sharding, base)
        others = _other_cuts(rule, rule.pattern.outputs[at], sharding, stage, base)
        _add(domain, source, [option] if isinstance(option, Option) else others)
    if source is not value or any(isinstance(dim, Joined) for dim in rule.pattern.outputs[at]):
        _add(domain, source, _parts_together(domain, source))


def heads_to_share(domain: Domain) -> set[int]:
    """How many ranks could cut dims that fewer than all ranks can: 2 of 4 ranks, for two heads of keys."""
    stage, found = domain.stage, set[int]()
    degree = stage.mesh.degree(stage.axis)
    for node, rule in domain.rules.items():
        if rule is None:
            continue
        for index, operand in enumerate(edit.operands(node)):
            for sharding in dict.fromkeys(shardings_of(domain, operand)):
                if stage.axis not in sharding.axes or isinstance(stage.keep(rule, index, sharding, Option()), Option):
                    continue
                for dim, cut in zip(rule.pattern.inputs[index], sharding.dims, strict=True):
                    for factor in dim if stage.axis in cut.axes else ():
                        size = rule.extent[factor]
                        heads = math.gcd(size, degree) if isinstance(size, int) else 1
                        if 1 < heads < degree and size < degree * 2:
                            found.add(heads)
    return found
