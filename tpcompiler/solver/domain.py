"""Strategies of every op of a program, over one axis or several at once, from which the search takes one."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import fx

from tpcompiler.cost.fusion import Kernel, factors_of_product, is_attention
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.constraints import Dims, Exactly, Over
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.leaf_values import computed_from_leaves
from tpcompiler.ir.local import key
from tpcompiler.ir.program import PIN, PlannedProgram, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, is_one
from tpcompiler.rules.notation import Dim, Joined, Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.batch_dims import NO_SAMPLES, Samples
from tpcompiler.solver.leaves import Leaf
from tpcompiler.solver.strategies import (
    Limits,
    Strategies,
    can_take,
    made_of,
    make_wanted,
    move_cuts,
    shared_heads,
    take_operands,
    to_cut,
)
from tpcompiler.solver.turn import MOST_CHOICES, Turn
from tpcompiler.terminal.progress import counted

MOST_PLANNED = 64  # choices of an op, with a plan
MOST_SWEEPS = 20  # over the ops, until none has a new choice: models of the zoo take up to 3


@dataclass(eq=False)
class Domain:
    """The strategies of every op of a program, and the shardings that its leaves may have.

    Attributes:
        leaves: by placeholder name.
        weight: of a call of the program among those of others.
        comes_of: value -> the groups of the leaves with a style that its shards come from.
        samples: the values of samples.
        near: call or leaf -> the calls whose choices may follow from its own: itself, and those that read it.
        stale: the calls to look at again, because something near them has a new choice; the rest would find none.
        growing: leaves that other programs still gave new choices as the search stopped looking.
    """

    program: PlannedProgram
    turn: Turn
    leaves: Mapping[str, Leaf]
    operands: dict[fx.Node, list[fx.Node]]
    rules: dict[fx.Node, Rule | None]
    near: Mapping[fx.Node, Set[fx.Node]]
    strategies: dict[fx.Node, Strategies] = field(default_factory=dict)
    kernels: Mapping[fx.Node, Kernel] = field(default_factory=dict)
    weight: float = 1.0
    comes_of: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    samples: Samples = NO_SAMPLES
    stale: set[fx.Node] = field(default_factory=set)
    growing: int = 0

    @cached_property
    def static(self) -> Set[fx.Node]:
        """The leaves, and the values computed from them alone."""
        graph, leaves = self.program.graph, {leaf for leaf, _ in self.program.leaves()}
        return self.turn.read.once(("static", graph), partial(computed_from_leaves, graph, leaves))

    def put(self, node: fx.Node, strategies: Strategies) -> None:
        """Replace the strategies of a call."""
        if strategies is not self.strategies[node]:
            self.strategies[node] = strategies
            self.stale |= self.near[node]

    def want(self, leaf: fx.Node, shardings: Sequence[Sharding]) -> None:
        """Let a leaf be what a use wants."""
        own = self.leaves[leaf.name]
        known = len(own.shardings)
        for sharding in shardings:
            own.want(sharding, self.turn)
        if len(own.shardings) > known:
            self.stale.update(*(self.near.get(node, ()) for node in self._placeholders[own.group]))

    @cached_property
    def _placeholders(self) -> dict[str, list[fx.Node]]:
        """The names of each leaf."""
        found: dict[str, list[fx.Node]] = {}
        for node, _ in self.program.leaves():
            found.setdefault(self.leaves[node.name].group, []).append(node)
        return found


def find_domain(
    program: PlannedProgram, turn: Turn, leaves: Mapping[str, Leaf], samples: Samples = NO_SAMPLES
) -> Domain:
    """Find the options of every op with a rule, over the axis of a turn.

    They are the op whole, those that take its operands as they may be, and those that make what its users want.
    """
    domain = Domain(program, turn, leaves, *turn.read.once(program.graph, partial(_read_calls, program.graph)))
    domain.samples = samples
    domain.stale = set(domain.operands)
    if turn.is_searched:
        _find_all_strategies(domain)
    else:
        _find_planned_strategies(domain)
    return domain


def _find_all_strategies(domain: Domain) -> None:
    """Find strategies without a plan: every factor of every rule is cut, except samples and tokens of the inputs.

    What lies within each token may be cut, such as heads that are merged with samples. Where the neighbours of an op
    are cut along tokens it may follow, unless it multiplies with weights: these would be whole.
    """
    turn, tokens = domain.turn, find_tokens(domain)
    known = "pieces", domain.program.graph
    pieces = turn.read.once(known, lambda: find_pieces(domain.operands, domain.rules, MOST_CHOICES))
    for node, rule in domain.rules.items():
        if rule is not None:
            is_product = is_attention(node) or factors_of_product(node, rule) is not None
            many = pieces.get(node, frozenset())
            own = _limits_without_plan(rule, {} if turn.gathers else tokens[node], many)
            limits = own if is_product else _limits_without_plan(rule, {}, many)
            base = turn.base(node)
            first = "first", rule, turn.name(base), limits, own, bool(many)
            find = partial(_every_strategy, turn, rule, base, limits, own, bool(many))
            domain.strategies[node] = turn.known.once(first, find)
    _settle_strategies(domain)


def _limits_without_plan(rule: Rule, tokens: Mapping[str, bool], pieces: Set[str]) -> Limits:
    left_out = frozenset(factor for factor in rule.factors if factor.startswith("_"))
    barred = {f for f, alone in tokens.items() if alone} | {f for f in rule.factors if is_one(rule.extent[f])} | pieces
    return Limits(frozenset(barred), frozenset(tokens), left_out)


def _every_strategy(turn: Turn, rule: Rule, base: Option, limits: Limits, own: Limits, is_capped: bool) -> Strategies:
    options = (turn.extended(base, each) for each in turn.own_options(rule))
    strategies = Strategies.whole(turn, rule, base, limits, turn.most).adding(turn, options, own)
    return replace(strategies, is_capped=is_capped or strategies.is_capped)


def _find_planned_strategies(domain: Domain) -> None:
    """Find strategies with a plan: shards and pending reductions come from the leaves, inputs and pins that it cuts.

    Where an op cannot take a shard, its strategies to cut that dim count too, or another dim of that operand.
    """
    turn, touched = domain.turn, _find_touched(domain)
    loose = domain.static - touched
    for node, rule in domain.rules.items():
        if rule is not None:
            base, limits = turn.base(node), _limits_with_plan(rule, node, domain.operands[node], touched, loose)
            known = "first", rule, turn.name(base), limits
            domain.strategies[node] = turn.known.once(
                known, partial(Strategies.whole, turn, rule, base, limits, MOST_PLANNED)
            )
    _settle_strategies(domain)
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


def _settle_strategies(domain: Domain) -> None:
    """Let ops take what their operands may be and make what their users want, until nothing new is found.

    A leaf may be what is written to it, or what its gradient is.
    """
    leaves = {fqn: node for node, fqn in domain.program.leaves()}
    calls = [*domain.operands]
    for _ in range(MOST_SWEEPS):
        for node in counted(calls[::-1], "finding choices", "ops"):
            if node in domain.stale:
                domain.stale.discard(node)
                _make_wanted(domain, node)
                _take_operands(domain, node)
        for value, name in domain.program.followers():
            if name in leaves:
                domain.want(leaves[name], [sharding.without_partial for sharding in shardings_of(domain, value)])
        for node in calls:
            if node in domain.stale:
                domain.stale.discard(node)
                _take_operands(domain, node)
                _make_wanted(domain, node)
        if not domain.stale:
            break


def _read_calls(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, list[fx.Node]], dict[fx.Node, Rule | None], dict[fx.Node, set[fx.Node]]]:
    """The operands and the rules of all calls, and what is near a call or a leaf."""
    calls = [node for node in edit.calls(graph) if node.target is not operator.getitem]
    rules = {node: rule_of(node) for node in calls if node.target is not pin and edit.outputs(node)}
    operands = {node: edit.operands(node) for node in calls}
    near: dict[fx.Node, set[fx.Node]] = {node: {node} for node in calls}
    for node in reversed(calls):
        for value in operands[node]:
            own = near.setdefault(edit.producer(value)[0], set())
            own |= near[node] if node.target is pin else {node}  # a pin hands on what it reads
    return operands, rules, near


def find_tokens(domain: Domain) -> dict[fx.Node, dict[str, bool]]:
    """Return the factors that are samples or tokens of the inputs; False for the outermost in a dim of several.

    Not those that the caller cuts over the axis.
    """
    found_in: dict[fx.Node, dict[str, bool]] = {}
    tokens: dict[fx.Node, dict[int, bool]] = {}
    for node in domain.program.user_inputs():
        value, cut = edit.fake(node), domain.program.constraints[node.name].sharding
        own = range(value.ndim)[: 1 if value.is_floating_point() else None]
        tokens[node] = {dim: True for dim in own if domain.turn.axis not in cut.dims[dim].axes}
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
    program, axis = domain.program, domain.turn.axis
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
            return (*leaf.shardings, *(domain.turn.within(each, leaf.value) for each in exact))
        return _shardings_of_input(domain, value) if value.name in domain.program.constraints else ()
    source, at = edit.producer(value)
    if source.target is pin:
        allowed = source.meta[PIN].allowed
        if isinstance(allowed, Over) and set(allowed.axes).isdisjoint(domain.turn.own):
            return shardings_of(domain, domain.operands[source][0])
        return shardings_of_pin(domain, source)
    return domain.strategies[source].made[at] if source in domain.strategies else ()


def find_open_axes(turn: Turn, program: PlannedProgram) -> set[str]:
    """Return the axes over which ranks get equal inputs, and may share the batch."""
    placed = {axis for node in program.user_inputs() for axis in program.constraints[node.name].sharding.axes}
    return {part.axis for part in turn.parts or (turn,) if part.is_open} - placed


def _shardings_of_input(domain: Domain, node: fx.Node) -> tuple[Sharding, ...]:
    """Return the sharding of an input, and where it may be cut for its uses the one with dim 0 cut, a local slice."""
    turn, value = domain.turn, edit.fake(node)
    own = turn.within(domain.program.constraints[node.name].sharding, value)
    if turn.axis not in find_open_axes(turn, domain.program) or not value.ndim or is_one(value.shape[0]):
        return (own,)
    cut = own.dims[0].nest(DimSharding.by(turn.axis))
    return (own,) if cut.find_misfit(value.shape[0], turn.mesh) else (own, turn.within(own.with_dim(0, cut), value))


def shardings_of_pin(domain: Domain, node: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings of a pin: the requested one; over other axes, any sharding of its value."""
    asked, turn, (value,) = node.meta[PIN], domain.turn, domain.operands[node]
    have = tuple(dict.fromkeys([*shardings_of(domain, value), Sharding.replicated(edit.ndim(value))]))

    def find() -> tuple[Sharding, ...]:
        return tuple(dict.fromkeys(turn.within(asked.apply(sharding), edit.fake(value)) for sharding in have))

    return turn.known.once(("pin", asked, have, key(value)), find)


def _take_operands(domain: Domain, node: fx.Node) -> None:
    """Let an op run by what its operands are; where it cannot, by the ways in which it could cut that dim."""
    if node not in domain.strategies:
        return
    turn, had, operands = domain.turn, domain.strategies[node], domain.operands[node]
    have = tuple((*(own := shardings_of(domain, value)), *_cut_again(domain, value, own)) for value in operands)
    domain.put(node, turn.known.once(("takes", had, have), partial(take_operands, turn, had, have)))
    pairs = zip(operands, have, strict=True)
    behind = [domain.comes_of[o] for o, own in pairs if o in domain.comes_of and to_cut(turn, own)]
    if behind:
        comes_of = behind[0] if len(behind) == 1 else frozenset().union(*behind)
        for made, _ in edit.results(node):
            if domain.comes_of.get(made) != comes_of:
                domain.comes_of[made] = comes_of
                domain.stale |= domain.near[node]


def _cut_again(domain: Domain, value: fx.Node, have: Sequence[Sharding]) -> Iterator[Sharding]:
    """Yield a value of samples cut along them, such as sorted tokens, if what makes it has to have them whole."""
    dims, axis = domain.samples.dims_of(value, domain.turn.axis), domain.turn.axis
    if dims and not any(axis in sharding.dims[dim].axes for sharding in have for dim in dims):
        whole = Sharding.replicated(edit.ndim(value))
        yield domain.turn.within(whole.with_dim(dims[0], DimSharding.by(axis)), edit.fake(value))


def _let_leaves_be_whole(domain: Domain, touched: Set[fx.Node]) -> None:
    """Leaves of styles may be whole over the axis where an op that cuts its other operands cannot take what is made of
    them cut, such as keys and values of which there are fewer heads than ranks. Operands that are made of the same
    leaves do not count: they would be whole too.
    """
    turn = domain.turn
    reached: dict[fx.Node, tuple[Sharding, ...]] = {  # what values may be without a change on the way from such a leaf
        node: shardings_of(domain, node) for node, _ in domain.program.leaves() if node in domain.comes_of
    }
    for node, strategies in domain.strategies.items():
        operands = domain.operands[node]
        have = tuple(reached.get(operand, ()) for operand in operands)
        if not any(have) or is_backward(node):
            continue  # a backward takes what its forward did
        for made, at in edit.results(node):
            reached[made] = turn.known.once(
                ("reached", strategies, have, at), partial(made_of, turn, strategies, have, at)
            )
        if any(domain.leaves[o.name].is_fixed for o in operands if o.name in domain.leaves):
            continue
        for index, operand in enumerate(operands):
            leaves = domain.comes_of.get(operand, frozenset())
            are_touched = tuple(
                o in touched and not (o in domain.comes_of and domain.comes_of[o] <= leaves) for o in operands
            )
            known = "can", strategies, index, are_touched, have
            if not turn.known.once(known, partial(can_take, turn, strategies, index, are_touched, have)):
                for leaf in domain.leaves.values():
                    if leaf.group in leaves:
                        leaf.let_be_whole()


def _move_cuts(domain: Domain) -> None:
    """Let ops cut another dim of operands that they cannot take as they are cut, and the ops around them follow."""
    turn, is_moved = domain.turn, False
    for node, had in domain.strategies.items():
        have = tuple(_computed(domain, operand) for operand in domain.operands[node])
        domain.put(node, turn.known.once(("moves", had, have), partial(move_cuts, turn, had, have)))
        is_moved = is_moved or domain.strategies[node] is not had
        if is_moved:
            _take_operands(domain, node)
    if is_moved:
        _settle_strategies(domain)


def _computed(domain: Domain, operand: fx.Node) -> tuple[Sharding, ...]:
    """Return the shardings of a computed value; none of a leaf, which is not resharded in each call."""
    return () if operand.name in domain.leaves else shardings_of(domain, operand)


def _make_wanted(domain: Domain, node: fx.Node) -> None:
    """Let those who make an op's operands make what it wants of them."""
    turn, wanted = domain.turn, list[tuple[Sharding, ...]]()
    if node.target is pin:
        wanted = [shardings_of_pin(domain, node)]
    elif node in domain.strategies:
        wanted = domain.strategies[node].wants
    for value, shardings in zip(domain.operands[node] if wanted else (), wanted, strict=True):
        source, at = edit.producer(value)
        if value.name in domain.leaves:
            domain.want(value, to_cut(turn, shardings))
        elif source in domain.strategies:
            had, is_one = domain.strategies[source], source is not value
            known = "makes", had, at, is_one, shardings
            domain.put(source, turn.known.once(known, partial(make_wanted, turn, had, at, is_one, shardings)))


def find_shared_heads(domain: Domain) -> set[tuple[int, bool]]:
    """Return how an axis could run as two for dims that fewer than all ranks can shard: 2 of 4 ranks for 2 key heads.

    With each degree of the outer axis: True if the inner one shards the heads, and the outer one the steps as before.
    """
    turn, found = domain.turn, set[tuple[int, bool]]()
    for node, strategies in domain.strategies.items():
        have = tuple(
            _computed(domain, operand) if edit.fake(operand).is_floating_point() else ()  # no masks: few samples
            for operand in domain.operands[node]
        )
        found |= turn.known.once(("shared", strategies, have), partial(shared_heads, turn, strategies, have))
    return found


MOST_TOGETHER = 64  # choices of an op: what is found for two axes takes as long as 4 times that many over one


def combine_domains(turn: Turn, alone: Sequence[Sequence[Domain]]) -> list[Domain]:
    """The domains of programs over all axes of a turn, made of those over each.

    Raises:
        UnsupportedError: an op has more than `MOST_TOGETHER` choices.
    """
    found, leaves = list[Domain](), dict[str, Leaf]()  # by group: programs share them
    for own in zip(*alone, strict=True):
        first, named = own[0], dict[str, Leaf]()
        for name, leaf in first.leaves.items():
            if leaf.group not in leaves:
                leaves[leaf.group] = _combine_leaf(turn, [domain.leaves[name] for domain in own])
            named[name] = leaves[leaf.group]
        strategies = {
            node: _combine_strategies(turn, [domain.strategies[node] for domain in own]) for node in first.strategies
        }
        read = first.operands, first.rules, first.near
        found.append(Domain(first.program, turn, named, *read, strategies, first.kernels))
    return found


def _combine_strategies(turn: Turn, each: Sequence[Strategies]) -> Strategies:
    return turn.known.once(("together", *each), partial(_find_strategies, turn, each))


def _find_strategies(turn: Turn, each: Sequence[Strategies]) -> Strategies:
    if (count := math.prod(len(strategies.found) for strategies in each)) > MOST_TOGETHER:
        raise UnsupportedError(f"an op has {count} choices over {len(each)} axes", help="solve one axis at a time")
    limits = each[0].limits._replace(barred=frozenset(), blocked=frozenset(), left_out=frozenset(), is_closed=False)
    strategies = Strategies(each[0].rule, Option(), limits, math.factorial(len(each)) * MOST_TOGETHER)
    made = strategies.adding(turn, _nested_options(turn, [[way.option for way in own] for own in each]))
    return replace(made, is_capped=any(own.is_capped for own in each))


def _nested_options(turn: Turn, each: Sequence[Sequence[Option]]) -> Iterator[Option]:
    """One of each axis together; where two cut one factor, either is outside."""
    for some in itertools.product(*each):
        for order in itertools.permutations(some):
            made = Option()
            for option in order:
                made = turn.extended(made, option)
            if sum(len(cut.axes) for cut in made.cuts.values()) == sum(
                len(c.axes) for o in some for c in o.cuts.values()
            ):
                yield made


def _combine_leaf(turn: Turn, each: Sequence[Leaf]) -> Leaf:
    leaf = each[0]
    if isinstance(leaf.allowed, Exactly):
        made = [turn.within(asked, leaf.value) for asked in leaf.allowed.shardings]
    elif any(own.shardings for own in each):
        made = [*_nested_shardings(turn, leaf, [list(own.shardings) or [leaf.before] for own in each])]
    else:
        made = []
    return replace(leaf, shardings=dict.fromkeys(made))


def _nested_shardings(turn: Turn, leaf: Leaf, each: Sequence[Sequence[Sharding]]) -> Iterator[Sharding]:
    for some in itertools.product(*each):
        for order in itertools.permutations(some):
            made = leaf.before
            for sharding in order:
                made = sharding.nest_in(made, sharding.axes)
            is_made = made.axes == frozenset().union(*(sharding.axes for sharding in some))
            sizes = zip(made.dims, leaf.value.shape, strict=True)
            if is_made and not any(cut.find_misfit(size, turn.mesh) for cut, size in sizes):
                yield turn.known.setdefault(made, made)


Place = tuple[fx.Node, int]  # a dim of a value


def find_pieces(
    operands: Mapping[fx.Node, Sequence[fx.Node]], rules: Mapping[fx.Node, Rule | None], most: int
) -> dict[fx.Node, frozenset[str]]:
    """Return, by op, the pieces of dims that have more than `most` different ones.

    Before    each row gets a sum of the rows before it: 63 slices [..., :i] of one matrix
    After     these ops need the matrix whole, or cut along another dim

    A piece could be cut by itself in every value that has the dim, so the search would compare only some of the
    choices of all these ops anyway, and take most of its time for them.
    """
    above: dict[Place, Place] = {}  # a union-find forest of dims that ops hand on as they are

    def root(place: Place) -> Place:
        while above.setdefault(place, place) != place:
            above[place] = above[above[place]]
            place = above[place]
        return place

    rows: list[tuple[fx.Node, Rule, Place, Joined]] = []
    for node, rule in rules.items():
        first: dict[object, Place] = {}
        for value, at, dim in _dims_of(node, operands[node], rule):
            if isinstance(dim, Joined) and rule is not None:
                rows.append((node, rule, (value, at), dim))
            if len(dim) == 1 or isinstance(dim, Joined):
                above[root((value, at))] = root(first.setdefault((type(dim), dim), (value, at)))
    pieces: dict[Place, set[object]] = {}  # where each begins and ends
    for _, rule, place, dim in rows:
        ends = [0, *itertools.accumulate(rule.extent[factor] for factor in dim)]
        for factor, piece in zip(dim, itertools.pairwise(ends), strict=True):
            if not factor.startswith("_") and not is_one(rule.extent[factor]):
                pieces.setdefault(root(place), set()).add(piece)
    found: dict[fx.Node, frozenset[str]] = {}
    for node, _, place, dim in rows:
        if len(pieces.get(root(place), ())) > most:
            found[node] = found.get(node, frozenset()) | frozenset(dim)
    return found


def _dims_of(node: fx.Node, operands: Sequence[fx.Node], rule: Rule | None) -> Iterator[tuple[fx.Node, int, Dim]]:
    """Yield each dim of an op's operands and results: the value, the dim's place in it, and its factors."""
    if rule is not None:
        values = [(value, rule.pattern.inputs[at]) for at, value in enumerate(operands)]
        values += [(made, rule.pattern.outputs[at]) for made, at in edit.results(node)]
        for value, term in values:
            for at, dim in enumerate(term):
                yield value, at, dim
