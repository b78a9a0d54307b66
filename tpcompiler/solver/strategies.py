"""Strategies in which one op may run, as far as known; equivalent ops share them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, is_one, merge
from tpcompiler.rules.notation import Joined, Rule, Term
from tpcompiler.solver.turn import Strategy, Turn


class Limits(NamedTuple):
    """Limits of the search: `barred` factors, those in `blocked` but in blocks, those `left_out` of the result
    unless others are in it; nothing of a closed op.
    """

    barred: frozenset[str] = frozenset()
    blocked: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    is_closed: bool = False

    def allow(self, option: Option, axis: str) -> bool:
        cuts = {factor: cut for factor, cut in option.cuts.items() if axis in cut.axes}
        if self.is_closed or (cuts and cuts.keys() <= self.left_out):
            return False
        return not any(
            factor in self.barred or (factor in self.blocked and not (cut.levels and cut.levels[0].block))
            for factor, cut in cuts.items()
        )


@dataclass(frozen=True, eq=False)
class Strategies:
    """The strategies of an op over the axis of a turn. `base`: as it runs over the axes before."""

    rule: Rule
    base: Option
    limits: Limits
    most: int
    found: Mapping[Any, Strategy] = field(default_factory=dict)  # by the option's name
    is_capped: bool = False

    @classmethod
    def whole(cls, turn: Turn, rule: Rule, base: Option, limits: Limits, most: int) -> Strategies:
        both = turn.both(rule, base)
        found = {} if isinstance(both, Refusal) else {turn.name(base): Strategy(*both, option=base)}
        return cls(rule, base, limits, most, found)

    def __iter__(self) -> Iterator[Strategy]:
        return iter(self.found.values())

    @cached_property
    def wants(self) -> list[tuple[Sharding, ...]]:
        """Return the shardings that the strategies need, by operand."""
        return [tuple(each.wants[at] for each in self) for at in range(len(self.rule.pattern.inputs))]

    @cached_property
    def made(self) -> list[tuple[Sharding, ...]]:
        """Return the shardings that the strategies produce, by result."""
        return [tuple(each.made[at] for each in self) for at in range(len(self.rule.pattern.outputs))]

    def adding(self, turn: Turn, options: Iterable[Option], limits: Limits | None = None) -> Strategies:
        """These and more, as many as there may be: those that cut a part of what another cuts make room."""
        found, limits, is_capped = dict(self.found), limits or self.limits, self.is_capped
        for option in options:
            name = turn.name(option)
            if name in found or not limits.allow(option, turn.axis):
                continue
            both = turn.both(self.rule, option)
            if isinstance(both, Refusal):
                continue
            if len(found) >= self.most:
                is_capped = True
                each = [*(each.option for each in found.values()), option]
                least = next(_parts_of_others(turn.axis, each), option)
                if least is option:
                    continue
                del found[turn.name(least)]
            found[name] = Strategy(*both, option=option)
        same = found.keys() == self.found.keys() and is_capped == self.is_capped
        return self if same else Strategies(self.rule, self.base, self.limits, self.most, found, is_capped)


def _parts_of_others(axis: str, options: Sequence[Option]) -> Iterator[Option]:
    """Return the options that shard a subset of another option's parts, in the same way."""
    pieces = [frozenset(_pieces(axis, option)) for option in options]
    for option, own in zip(options, pieces, strict=True):
        if own and any(own < other for other in pieces):
            yield option


def _pieces(axis: str, option: Option) -> Iterator[tuple[str, int, int, DimSharding]]:
    """Return an option's shards over an axis: the factor, the position in it, and the manner."""
    for factor, cut in option.cuts.items():
        at = 0
        for length, how in cut.parts or [(0, cut)]:
            if axis in how.axes:
                yield factor, at, length, how
            at += length


def take_operands(turn: Turn, strategies: Strategies, have: Sequence[Sequence[Sharding]]) -> Strategies:
    rule, base = strategies.rule, strategies.base
    followed: list[list[Option]] = []
    beside: list[Option] = []  # whole operands are read next to cut ones, such as keys that all heads share
    for index, shardings in enumerate(have):
        own: list[Option] = []
        for sharding in dict.fromkeys(shardings):
            if turn.axis in sharding.axes:
                option = turn.follow("in", rule, index, sharding, base)
                term = rule.pattern.inputs[index]
                own += [option] if isinstance(option, Option) else _other_cuts(rule, term, sharding, turn, base)
                in_part = any(not how.axes for cut in sharding.dims for _, how in cut.parts)
                beside += [option] if in_part and isinstance(option, Option) else []
        if own:
            followed.append(own)
    strategies = strategies.adding(turn, (option for own in followed for option in own))
    strategies = strategies.adding(turn, beside, strategies.limits._replace(left_out=frozenset()))
    if len(followed) > 1:
        strategies = strategies.adding(turn, _merged(followed, strategies.most))
    if any(isinstance(dim, Joined) for term in (*rule.pattern.inputs, *rule.pattern.outputs) for dim in term):
        strategies = strategies.adding(turn, _parts_together(turn, strategies))
    return strategies


def _merged(followed: Sequence[Sequence[Option]], most: int) -> Iterator[Option]:
    """One of each together: in every way where these are few, otherwise the newest and the oldest, and every other
    with them.
    """
    each: Iterable[Sequence[Option]] = itertools.product(*(reversed(own) for own in followed))
    if math.prod(map(len, followed)) > most:
        ends = [own[-1] for own in followed], [own[0] for own in followed]
        each = [
            [*end[:at], other, *end[at + 1 :]] for end in ends for at, own in enumerate(followed) for other in own[::-1]
        ]
    yield from (both for some in each if (both := merge(some)) is not None)


def _parts_together(turn: Turn, strategies: Strategies) -> Iterator[Option]:
    """Parts of one dim that are cut each by itself, cut at once."""
    alone: dict[frozenset[str], list[Option]] = {}
    for option in (each.option for each in strategies):
        factors = frozenset(factor for factor, cut in option.cuts.items() if turn.axis in cut.axes)
        if factors:
            alone.setdefault(factors, []).append(option)
    single = [own for factors, own in alone.items() if not any(other < factors for other in alone)]
    yield from _merged(single, strategies.most)


def _other_cuts(rule: Rule, term: Term, sharding: Sharding, turn: Turn, base: Option) -> Iterator[Option]:
    """The options that cut the dims that an operand is cut on where the op can take it: one of its factors."""
    for dim, cut in zip(term, sharding.dims, strict=True):
        if turn.axis not in cut.axes:
            continue
        free = [factor for factor in dim if factor not in rule.pattern.whole]
        free += [made for factor in dim if (made := rule.over(factor)) is not None]
        sets = [free] if isinstance(dim, Joined) else [[factor] for factor in free]
        for factors in sets:
            if factors:
                yield turn.extended(base, Option(dict.fromkeys(factors, DimSharding.by(turn.axis))))


def move_cuts(turn: Turn, strategies: Strategies, have: Sequence[Sequence[Sharding]]) -> Strategies:
    """Let an op cut another dim of an operand that it cannot take as it may be cut: an all_to_all moves the cut."""
    rule, base, options = strategies.rule, strategies.base, list[Option]()
    for index, shardings in enumerate(have):
        cut = to_cut(turn, shardings)
        if all(isinstance(turn.follow("in", rule, index, each, base), Refusal) for each in cut):
            options += (o for each in cut for o in _other_dims(rule, rule.pattern.inputs[index], each, turn, base))
    return strategies.adding(turn, options)


def _other_dims(rule: Rule, term: Term, sharding: Sharding, turn: Turn, base: Option) -> Iterator[Option]:
    """The options that cut a dim of an operand that is cut on another one: by all of its axes in their order, so that
    one all_to_all suffices, or by this axis inside the others.
    """
    for axes in (cut.axes for cut in sharding.dims if turn.axis in cut.axes):
        for dim, cut in zip(term, sharding.dims, strict=True):
            for factor in () if turn.axis in cut.axes else dim:
                if factor not in rule.pattern.whole and not is_one(rule.extent[factor]):
                    alike = Option({factor: DimSharding.by(*axes)})
                    yield from [alike] if turn.is_inside(alike, base, rule) else []
                    yield turn.extended(base, Option({factor: DimSharding.by(turn.axis)}))


def made_of(turn: Turn, strategies: Strategies, have: Sequence[Sequence[Sharding]], at: int) -> tuple[Sharding, ...]:
    """Return the shardings of a result over the axis, for an operand in one of its possible shardings."""
    return tuple(
        each.made[at]
        for each in strategies
        if turn.axis in each.made[at].axes
        and any(want.without_spans in own for want, own in zip(each.wants, have, strict=True))
    )


def can_take(
    turn: Turn, strategies: Strategies, index: int, touched: Sequence[bool], have: Sequence[Sequence[Sharding]]
) -> bool:
    """True if an op that shards its other operands can take this one in one of its possible shardings."""
    cut = to_cut(turn, have[index])
    terms = enumerate(zip(touched, strategies.rule.pattern.inputs, strict=True))
    others = {f for at, (is_touched, term) in terms if at != index and is_touched for dim in term for f in dim}
    wanted = [
        each.wants[index]
        for each in strategies
        if any(turn.axis in how.axes and factor in others for factor, how in each.option.cuts.items())
    ]
    return not cut or not wanted or any(want in cut for want in wanted)


def to_cut(turn: Turn, wanted: Sequence[Sharding]) -> list[Sharding]:
    """Return the shardings that the axis shards, without pending reductions; shares for spans, which overlap."""
    plain = dict.fromkeys(sharding.without_spans for sharding in wanted)
    return [s for s in plain if turn.axis in s.cut_axes and not s.partial]


def make_wanted(
    turn: Turn, strategies: Strategies, at: int, one_of_several: bool, wanted: Sequence[Sharding]
) -> Strategies:
    rule, base = strategies.rule, strategies.base
    term = rule.pattern.outputs[at]
    for sharding in to_cut(turn, wanted):
        option = turn.follow("out", rule, at, sharding, base)
        others = _other_cuts(rule, term, sharding, turn, base)
        strategies = strategies.adding(turn, [option] if isinstance(option, Option) else others)
    if one_of_several or any(isinstance(dim, Joined) for dim in term):
        strategies = strategies.adding(turn, _parts_together(turn, strategies))
    return strategies.adding(turn, _pieces_together(turn, strategies))


def _pieces_together(turn: Turn, strategies: Strategies) -> Iterator[Option]:
    """Pieces of one factor that are cut each by itself, such as the queries, keys and values of one matrix, at once and
    alike.
    """
    found: dict[str, dict[tuple[int, int], list[DimSharding]]] = {}  # factor -> a piece's place -> its cuts
    size: dict[str, int] = {}
    for option in (each.option for each in strategies):
        for factor, cut in option.cuts.items():
            ends = list(itertools.accumulate(length for length, _ in cut.parts))
            pieces = [(end, part) for end, part in zip(ends, cut.parts, strict=True) if turn.axis in part[1].axes]
            if len(pieces) == 1:
                (end, (length, how)), size[factor] = pieces[0], ends[-1]
                found.setdefault(factor, {}).setdefault((end - length, end), []).append(how.axis_part(turn.axis))
    for factor, own in found.items():
        spans = sorted(s for s in own if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in own))
        if len(spans) < 2 or any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            continue
        for how in (each for each in own[spans[0]] if all(each in own[span] for span in spans)):
            parts, at = list[tuple[int, DimSharding]](), 0
            for start, end in spans:
                parts += [(start - at, WHOLE), (end - start, how)]
                at = end
            cut = DimSharding.of_parts([*parts, (size[factor] - at, WHOLE)])
            yield turn.extended(strategies.base, Option({factor: cut}))


def shared_heads(turn: Turn, strategies: Strategies, have: Sequence[Sequence[Sharding]]) -> set[tuple[int, bool]]:
    """Return the degrees for a dim with fewer heads than ranks, among shardings that the op cannot take.

    With True: the degree that remains for the dim that is cut now, if the rest of the ranks shard the heads.
    """
    found, rule, degree = set[tuple[int, bool]](), strategies.rule, turn.mesh.degree(turn.axis)
    if turn.mesh.is_unequal([turn.axis]):  # its ranks form no equal groups
        return found
    whole = rule.pattern.whole | strategies.limits.barred | strategies.limits.blocked
    for index, shardings in enumerate(have):
        refused = [
            each
            for each in dict.fromkeys(shardings)
            if turn.axis in each.cut_axes and isinstance(turn.follow("in", rule, index, each, Option()), Refusal)
        ]
        moves = set(to_cut(turn, shardings)) <= set(refused)
        for sharding in refused:
            for dim, cut in zip(rule.pattern.inputs[index], sharding.dims, strict=True):
                for factor in dim if turn.axis in cut.axes or (moves and sharding.cut_axes) else ():
                    size, is_cut = rule.extent[factor], turn.axis in cut.axes
                    heads = math.gcd(size, degree) if isinstance(size, int) else 1
                    if 1 < heads < degree and size < degree * 2 and factor not in whole:
                        found.add((heads if is_cut else degree // heads, not is_cut))
    return found
