"""Decide a sharding for every value: follow the seeds through the op rules, at the fewest bytes on the wire."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.cost.program import changes
from tpcompiler.errors import ShardingError
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import has_bodies
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.notes import notes_of
from tpcompiler.ir.program import (
    MARK,
    PIN,
    Counts,
    LocalShare,
    Mark,
    MarkedProgram,
    Note,
    PlannedProgram,
    Seed,
    Why,
    mark_of,
    pin,
    tied,
)
from tpcompiler.ir.sharding import WHOLE, Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.rules.infer import Option, Refusal, combined, follow, pass_through, pull_back, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

SIZE_OPS = (aten.sym_size.int,)


@dataclass(frozen=True)
class Gathered:
    """A cut operand that a node cannot take: what it would have to be, the option that the node runs by, and why."""

    node: fx.Node
    index: int
    want: Sharding
    option: Option
    why: Why


def mark_placements(program: PlannedProgram, gathered: list[Gathered] | None = None) -> MarkedProgram:
    """Put a Mark on every node.

    Before    x, w1, w2, b1                         seeds: w1: S(0), w2: S(1)
              h = linear(x, w1, b1)
              y = linear(h, w2)
              pin_1 = pin(y)                        pinned to R
    After     x: R, w1: S(0), w2: S(1), b1: S(0)    b1 as its one use wants it
              h: S(1) = linear(x, w1, b1)
              y: P(sum) -> R = linear(h, w2)        a Partial is reduced right after its producer
              pin_1: R = pin(y)

    Each op, in order, takes the option among those that follow an operand's sharding (or none) that puts the fewest
    bytes on the wire; a planned leaf is never gathered where another option exists. A leaf that the plan does not name
    takes what all its uses want, looked up backwards through views and casts; when uses disagree it is replicated,
    because cutting it there is a local slice. Leaves that the program writes, and that would be placed otherwise than
    the value written back, are tried as that value is, all together: a cache follows what is put in it.

    Args:
        gathered: a list that takes every operand that is gathered; a planned leaf may then be among them.

    Raises:
        ShardingError: a planned leaf cannot be used as it was cut.
    """
    marked = _marked(program, {}, gathered)
    if written := _as_written(marked, program.seeds):
        again = _marked(program, written, None if gathered is None else [])
        if _wire_bytes(again) < _wire_bytes(marked):
            return again
    return marked


def _marked(program: PlannedProgram, written: Mapping[str, Sharding], gathered: list[Gathered] | None) -> MarkedProgram:
    graph = edit.copy_graph(program.graph)
    marked = MarkedProgram(program.source, graph, program.mesh, program.notes)
    walk = _Walk(program.mesh, {node.name: fqn for node, fqn in marked.leaves()}, tied(marked), gathered)
    leaf_names = walk.fqns.keys()
    for node in graph.nodes:
        if node.op == "placeholder":
            seed = program.seeds.get(node.name)
            if seed is not None:
                walk.pinned[node] = seed
                _place(node, seed.sharding, f"plan: {seed.asked_by}")
            elif node.name in written:
                _place(node, written[node.name], "as the value written back")
            elif node.name in leaf_names:
                walk.free.add(node)
            elif node.name in program.input_shardings:
                _place(node, program.input_shardings[node.name], "an input")
            else:
                node.meta[MARK] = Mark((), (), (), "no tensor")
        elif node.op == "call_function":
            _mark_call(node, walk)
        elif node.op == "get_attr":
            node.meta[MARK] = Mark((), (), (), "a body")
    for node in graph.nodes:
        if node in walk.free and node.op == "placeholder":
            _place(node, walk.joined(node), "as its uses want it")
    walk.resolved = True
    for node in edit.calls(graph):
        if node in walk.free:
            _mark_call(node, walk)
    mark_output(marked)
    return MarkedProgram(program.source, graph, program.mesh, (*program.notes, *walk.notes, *notes_of(marked)))


def _as_written(program: MarkedProgram, planned: Container[str]) -> dict[str, Sharding]:
    """Placeholder name -> the sharding of the value written back, of unplanned leaves that are placed otherwise."""
    leaves = {fqn: node for node, fqn in program.leaves()}
    found = {}
    for value, name in program.written():
        leaf = leaves.get(name)
        if leaf is not None and leaf.name not in planned and mark_of(value).settled != mark_of(leaf).settled:
            found[leaf.name] = mark_of(value).settled[0]
    return found


def _wire_bytes(program: MarkedProgram) -> int:
    """Of all changes of sharding of one call."""
    return sum(change.wire_bytes for change in changes(program))


@dataclass
class _Walk:
    mesh: Mesh
    fqns: dict[str, str]
    ties: dict[str, str]
    gathered: list[Gathered] | None
    free: set[fx.Node] = field(default_factory=set)  # leaves that the plan does not name, and what only rearranges them
    pinned: dict[fx.Node, Seed] = field(default_factory=dict)  # planned leaves, and what only rearranges them
    wanted: dict[str, list[Sharding]] = field(default_factory=dict)  # by (first tied) placeholder
    notes: list[Note] = field(default_factory=list)
    choices: dict[Any, tuple[Rule | None, _Candidate, dict[int, str]]] = field(default_factory=dict)
    resolved: bool = False

    def seen(self, node: fx.Node) -> Sharding | None:
        """What users see of an operand; None while it is free to become anything."""
        return None if node in self.free and not self.resolved else mark_of(node).settled[0]

    def want(self, node: fx.Node, sharding: Sharding) -> None:
        """Record what a use wants of a free operand, as a wish for the leaf behind it."""
        wish: Sharding | None = sharding
        while wish is not None and node.op == "call_function":
            rule = rule_of(node)
            wish = pull_back(rule, wish, self.mesh) if rule is not None else None
            node = edit.operands(node)[0]
        while node.op == "call_function":
            node = edit.operands(node)[0]
        wish = wish if wish is not None else Sharding.replicated(node.meta["val"].ndim)
        self.wanted.setdefault(self.ties[node.name], []).append(wish)

    def joined(self, leaf: fx.Node) -> Sharding:
        wishes = set(self.wanted.get(self.ties[leaf.name], ()))
        return wishes.pop() if len(wishes) == 1 else Sharding.replicated(leaf.meta["val"].ndim)


def _place(node: fx.Node, sharding: Sharding, reason: str) -> None:
    node.meta[MARK] = Mark((sharding,), (sharding,), (), reason)


def _mark_call(node: fx.Node, walk: _Walk) -> None:
    operands = edit.operands(node)
    if node.target is pin:
        seed, have = node.meta[PIN], walk.seen(operands[0])
        wish = seed.sharding if have is None else seed.over(have)
        node.meta[MARK] = Mark((wish,), (wish,), (wish,), seed.asked_by, "plan-demanded")
    elif node.target is operator.getitem and edit.is_tensor(node):
        node.meta[MARK] = _element(node)
    elif not edit.outputs(node):
        wants = [walk.seen(o) or Sharding.replicated(o.meta["val"].ndim) for o in operands]
        if node.target not in SIZE_OPS:
            wants = [Sharding.replicated(w.ndim) for w in wants]
        node.meta[MARK] = Mark((), (), tuple(wants), "no tensor")
    else:
        rule = rule_of(node)
        if rule is not None and rule.relayout and operands[0] in walk.free and not walk.resolved:
            walk.free.add(node)
            return
        node.meta[MARK] = _choose(node, rule, walk)
        if rule is not None and rule.relayout and operands[0] in walk.pinned:
            walk.pinned[node] = walk.pinned[operands[0]]
    for operand, want in zip(operands, mark_of(node).wants, strict=True):
        if operand in walk.free and not walk.resolved:
            walk.want(operand, want)


def _element(node: fx.Node) -> Mark:
    """A getitem takes its part of what the op made, and reduces it promptly."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    values = list(source.meta["val"])
    made = mark_of(source).shardings[sum(isinstance(v, torch.Tensor) for v in values[:index])]
    return Mark((made,), (_settle(node, made),), (), "a part of " + source.name)


def _settle(node: fx.Node, made: Sharding) -> Sharding:
    """Prompt reduction, unless everyone who uses the value says by a pin what to turn it into."""
    if node.users and all(user.target is pin for user in node.users):
        return made
    return made.settled()


@dataclass(frozen=True)
class _Candidate:
    option: Option
    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    follows: frozenset[int]


def _choose(node: fx.Node, rule: Rule | None, walk: _Walk) -> Mark:
    operands = edit.operands(node)
    seen = [walk.seen(o) for o in operands]
    known = id(rule), tuple(seen), tuple(o in walk.pinned for o in operands)  # calls alike have one rule
    if rule is None or known not in walk.choices:
        walk.choices[known] = rule, *_find_best(node, rule, seen, walk)
    _, best, refusals = walk.choices[known]
    return _mark(node, rule, best, seen, refusals, walk)


def _find_best(
    node: fx.Node, rule: Rule | None, seen: Sequence[Sharding | None], walk: _Walk
) -> tuple[_Candidate, dict[int, str]]:
    """The best way to run the op, and why operands cannot stay as they are."""
    operands = edit.operands(node)
    whole = tuple(Sharding.replicated(o.meta["val"].ndim) for o in operands)
    made = tuple(Sharding.replicated(o.ndim) for o in edit.outputs(node))
    candidates = [_Candidate(Option(), whole, made, frozenset())]
    refusals: dict[int, str] = {}
    if rule is not None:
        options: list[tuple[int, Option]] = []
        for index, sharding in enumerate(seen):
            if sharding is None or sharding.is_replicated:
                continue
            found = _keeping(rule, index, sharding, walk.mesh)
            if isinstance(found, Option):
                options.append((index, found))
                continue
            refusals[index] = found.text
            for axis in walk.mesh.ordered(sharding.axes) if len(sharding.axes) > 1 else ():
                found = _keeping(rule, index, sharding.only(axis), walk.mesh)
                options += [(index, found)] if isinstance(found, Option) else []
        for option in combined([own for _, own in options], walk.mesh):
            result = shardings(rule, option, walk.mesh)
            same = [i for i, own in options if own == option]
            follows = same[:1] or [i for i, own in options if option.includes(own)]
            if isinstance(result, Refusal):
                refusals.update(dict.fromkeys(follows, result.text))
            else:
                candidates.append(_Candidate(option, *result, frozenset(follows)))
    best = min(candidates, key=lambda c: (*_bytes(node, c, seen, walk), -len(c.option.cuts) - len(c.option.through)))
    return best, refusals


def _keeping(rule: Rule, index: int, sharding: Sharding, mesh: Mesh) -> Option | Refusal:
    """The option that takes an operand as it is."""
    found = follow(rule, rule.pattern.inputs[index], sharding, mesh)
    for axis, reduce_op in sharding.partial:
        through = pass_through(rule, index, axis, reduce_op)
        if isinstance(found, Refusal) or isinstance(through, Refusal):
            return through if isinstance(through, Refusal) else found
        found = Option(found.cuts, {**found.through, **through.through})
    return found


def _bytes(node: fx.Node, candidate: _Candidate, seen: Sequence[Sharding | None], walk: _Walk) -> tuple[int, int]:
    """(wire bytes spent on gathering planned leaves, all wire bytes) of a candidate."""
    leaf_bytes = total = 0
    for operand, have, want in zip(edit.operands(node), seen, candidate.wants, strict=True):
        if have is not None and have != want:
            value = operand.meta["val"]
            cost = reshard_wire_bytes(have, want, value.shape, value.element_size(), walk.mesh)
            total += cost
            leaf_bytes += cost if operand in walk.pinned else 0
    for value, made in zip(edit.outputs(node), candidate.made, strict=True):
        total += reshard_wire_bytes(made, made.settled(), value.shape, value.element_size(), walk.mesh)
    return leaf_bytes, total


def _mark(
    node: fx.Node,
    rule: Rule | None,
    best: _Candidate,
    seen: Sequence[Sharding | None],
    refusals: dict[int, str],
    walk: _Walk,
) -> Mark:
    operands = edit.operands(node)
    why: Why = "plan-demanded" if any(operands[i] in walk.pinned for i in best.follows) else "fallback"
    reason = _reason(node, rule, best, refusals)
    if why == "plan-demanded":
        seeds = dict.fromkeys(
            walk.pinned[operands[i]].asked_by for i in sorted(best.follows) if operands[i] in walk.pinned
        )
        reason += f", asked by {' and '.join(seeds)}"
    for index, (operand, have, want) in enumerate(zip(operands, seen, best.wants, strict=True)):
        if have is None or have == want:
            continue
        value = operand.meta["val"]
        cost = reshard_wire_bytes(have, want, value.shape, value.element_size(), walk.mesh)
        if not cost:
            continue
        if walk.gathered is not None:
            if not have.partial:
                walk.gathered.append(Gathered(node, index, want, best.option, why))
        elif operand in walk.pinned:
            unsaid = "other operands are cut differently" if rule is not None else _unruled(node)
            _refuse(node, operand, have, refusals.get(index, unsaid), walk)
        if rule is None:
            walk.notes.append(
                Note("no rule", f"{node.target} at '{node.name}' has no rule: '{operand.name}' is replicated")
            )
    settled = tuple(_settle(node, made) for made in best.made) if edit.is_tensor(node) else best.made
    return mark_with(node, rule, best.option, (best.made, settled, best.wants), reason, why)


def mark_with(
    node: fx.Node,
    rule: Rule | None,
    option: Option,
    placed: tuple[tuple[Sharding, ...], tuple[Sharding, ...], tuple[Sharding, ...]],
    reason: str,
    why: Why,
) -> Mark:
    """The mark of a node that runs by an option; `placed`: what it makes, what its users see, what it needs."""
    made, settled, wants = placed
    sizes = {}
    local = None
    if rule is not None and edit.outputs(node):
        out = rule.pattern.outputs[0]
        sizes = {name: tuple(out.index(dim) if dim else -1 for dim in term) for name, term in rule.sizes.items()}
        if cuts := [(cut, rule.extent[factor]) for factor, cut in option.cuts.items() if factor in rule.local]:
            (body,) = {rule.local[factor] for factor in option.cuts if factor in rule.local}
            local = LocalShare(body, tuple(cuts))
    counts = _counts(rule, option)
    skips = rule is not None and rule.skips_empty
    return Mark(made, settled, wants, reason, why, sizes, local, counts, skips)


def _counts(rule: Rule | None, option: Option) -> Counts:
    """The arguments that count elements of factors of which one is cut."""
    if rule is None:
        return {}
    return {
        name: tuple(tuple((rule.extent[f], option.cuts.get(f, WHOLE)) for f in group) for group in groups)
        for name, groups in rule.counts.items()
        if any(f in option.cuts for group in groups for f in group)
    }


def _unruled(node: fx.Node) -> str:
    return "its bodies run whole on every rank" if has_bodies(node) else "it has no rule"


def _reason(node: fx.Node, rule: Rule | None, best: _Candidate, refusals: dict[int, str]) -> str:
    if rule is None:
        return _unruled(node) if has_bodies(node) else "the op has no rule"
    cuts = [f"{factor} is cut by {' and '.join(cut.axes)}" for factor, cut in best.option.cuts.items()]
    through = [f"a pending {op} over {axis} passes through" for axis, (op, _) in best.option.through.items()]
    refused = [f"{op_name(node)}: {text}" for text in dict.fromkeys(refusals.values())]
    return "; ".join([*cuts, *through, *refused]) or "operands are replicated"


def _refuse(node: fx.Node, leaf: fx.Node, sharding: Sharding, why: str, walk: _Walk) -> None:
    """A weight is never gathered at run time, so a planned cut that its op cannot use is an error."""
    seed = walk.pinned[leaf]
    leaf = _behind(leaf)
    fqn = walk.fqns[leaf.name]
    value = leaf.meta["val"]
    help = f"pin '{fqn}' to R in the plan"
    what = f"cannot use '{fqn}' as {seed.sharding.text(walk.mesh)}: {node.target} says: {why}"
    for dim, cut in enumerate(seed.sharding.dims):
        if cut.axes:
            axis, size, degree = "' and '".join(cut.axes), value.shape[dim], walk.mesh.size(cut.axes)
            what = f"cannot shard '{fqn}' on dim {dim} of {size} by mesh axis '{axis}' of {degree}"
            what += f" for {node.target}: {why}"
            if size % degree:
                help = f"use a degree that divides {size}, or {help}"
    error = ShardingError(what, help=help, asked_by=seed.asked_by, used_at=edit.source_line(node))
    beside = [_behind(operand) for operand in edit.operands(node) if operand in walk.pinned]
    error.leaves = tuple(dict.fromkeys([fqn, *(walk.fqns[other.name] for other in beside)]))
    raise error


def _behind(value: fx.Node) -> fx.Node:
    """The leaf that a value only rearranges."""
    while value.op == "call_function":
        value = edit.operands(value)[0]
    return value


def mark_output(program: MarkedProgram) -> None:
    output = program.output
    values = output.args[0]
    leaves = {fqn: node for node, fqn in program.leaves()} | {n.name: n for n in program.user_inputs()}
    written = dict(program.mutations())
    wants = []
    for position, value in enumerate(values):  # type: ignore[arg-type]
        if edit.is_tensor(value):
            # A value written back keeps the sharding of its buffer, from call to call.
            owner = leaves[written[position]] if position in written else value
            wants.append(mark_of(owner).settled[0])
    output.meta[MARK] = Mark((), (), tuple(wants), "written back" if written else "the boundary")
