"""Put the solution of the search on every node, and every change of sharding into the graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from torch import fx

from tpcompiler.errors import PlanError, ShardingError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AtRest, Constraint, Dims
from tpcompiler.ir.control_flow import has_bodies
from tpcompiler.ir.dim_sharding import WHOLE
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of
from tpcompiler.ir.node_placement import (
    PLACEMENT,
    Counts,
    LocalShare,
    NodePlacement,
    Reshard,
    placement_of,
    put_reshard,
    reshard_of,
)
from tpcompiler.ir.program import PIN, UNCUT, Note, PlacedProgram, PlannedProgram, pin, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.passes._notes import notes_of, shared_leaves, whole_leaves
from tpcompiler.passes._reshard_reasons import (
    ALSO_ASKED,
    OTHERS,
    Demand,
    Spared,
    completed_sum,
    find_demand,
    keep,
    refuses,
    sent_bytes,
)
from tpcompiler.rules.index_range import Ranges, door_ranges, is_needed, position_checks, with_checks
from tpcompiler.rules.infer import Option, Refusal
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.runtime.records import Why
from tpcompiler.solver.build_problem import FREE
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.turn import Strategy


@dataclass
class _Walk:
    """The marks of a program's nodes, made in order."""

    program: PlannedProgram
    found: Solution
    at_door: Ranges | None  # the inputs that `load` checks; None: no indices are checked
    settled: dict[fx.Node, Sharding] = field(default_factory=dict)  # the sharding that users of a value see
    pinned: dict[fx.Node, Constraint] = field(default_factory=dict)  # planned leaves, and rearrangements of them
    met: set[fx.Node] = field(default_factory=set)  # pins whose demand an earlier gather meets
    notes: list[Note] = field(default_factory=list)

    def seen(self, value: fx.Node) -> Sharding:
        """Return the sharding that users see of a value; for a value not marked yet, the sharding it is made with."""
        return self.settled.get(value) or self.found.sharding(value)


def place(program: PlannedProgram, found: Solution, *, check_indices: bool = True) -> PlacedProgram:
    """Put a NodePlacement on every node, as the search chose, and a `reshard` node at every change of sharding.

    Before    x, w1, w2, b1                         constraints: w1: dim 0, w2: dim 1
              h = linear(x, w1, b1)                 found: n is cut
              y = linear(h, w2)                     found: k is cut
              pin_1 = pin(y)                        pinned to R
    After     x: R, w1: S(0), w2: S(1), b1: S(0)    b1 as its one use wants it
              h: S(1) = linear(x, w1, b1)
              y: P(sum) = linear(h, w2)
              reshard: R = reshard(y)

    A pending reduction is done right after its producer where all that use it want the same of it, or for all of them
    where the search says so. The nodes of the solution are those of the program's own graph. With `check_indices` a
    body that masks positions of other ranks asserts first that all are in the whole dim, unless something else does.
    Leaves each operand with exactly the sharding that its rule needs, and no `pin`.

    Raises:
        ShardingError, PlanError: as `refuse_misfits`.
    """
    refuse_misfits(program, found)
    inputs = {node.name: found.leaves[node] for node in program.user_inputs()}
    walk = _Walk(program, found, door_ranges(program, inputs) if check_indices else None)
    leaves = {node.name: (node, fqn) for node, fqn in program.leaves()}
    marks = {node: _mark_node(node, walk) for node in program.graph.nodes if node.op != "output"}
    for leaf, request in program.resting.items():
        _put_to_rest(*leaves[leaf], request, walk, marks)
    marks[program.output] = _mark_output(program, walk)
    graph, seen = edit.copy_graph(program.graph), dict[fx.Node, Sharding]()
    for old, node in zip(program.graph.nodes, [*graph.nodes], strict=True):
        node.meta[PLACEMENT] = marks[old]
        if old in walk.settled:
            seen[node] = walk.settled[old]
    for node in [*graph.nodes]:
        _insert_reshards(node, seen, program)
    met = set[fx.Node]()
    for node in edit.calls(graph):
        if node.target is reshard and (summed := completed_sum(node, met)):
            reason = f"the rest of the sum of '{summed.name}': {placement_of(node).reason}"
            put_reshard(node, replace(reshard_of(node), why="inherent", reason=reason))
    placed = PlacedProgram(program.source, graph, program.mesh, program.notes)
    notes = (*shared_leaves(program, placed), *whole_leaves(program, placed), *walk.notes, *notes_of(placed))
    return PlacedProgram(program.source, graph, program.mesh, (*program.notes, *notes))


def refuse_misfits(program: PlannedProgram, found: Solution) -> None:
    """Refuse planned leaves that their uses cannot take as they are cut.

    Raises:
        ShardingError: an op would change a planned leaf, or a rearrangement of one; no weight is gathered at run time.
        PlanError: a packed style, without sizes, of a leaf whose uses show no parts.
    """
    _refuse_without_parts(program, found)
    pinned = {leaf: own for leaf, _ in program.leaves() if (own := program.fixed(leaf))}
    for node in edit.calls(program.graph) if pinned else ():
        if (choice := found.choices.get(node)) is None or node.target is pin:
            continue
        operands, rule = edit.operands(node), choice.rule
        for index, (operand, want) in enumerate(zip(operands, choice.wants, strict=True)):
            if operand in pinned and (have := _settle(operand, found)) != want:
                is_sent = sent_bytes(operand, have, want, found.mesh) > 0
                if is_sent and not (want.has_spans and want.without_spans == have):
                    _refuse(node, index, have, program, found, pinned)
        if rule is not None and rule.relayout and operands[0] in pinned:
            pinned[node] = pinned[operands[0]]


def _refuse_without_parts(program: PlannedProgram, found: Solution) -> None:
    """Refuse a packed style of a layer none of whose weights is used in parts; what it has besides need not be."""
    layers: dict[tuple[str, str], list[tuple[str, bool]]] = {}
    for leaf, fqn in program.leaves():
        own = program.fixed(leaf)
        needs_parts = own is not None and isinstance(own.allowed, Dims) and own.allowed.needs_parts
        if own and needs_parts and program.mesh.size(own.sharding.cut_axes) > 1:
            has_parts = any(cut.parts or any(level.block for level in cut.levels) for cut in found.leaves[leaf].dims)
            layers.setdefault((own.asked_by, layer_of(fqn)), []).append((fqn, has_parts))
    for (asked_by, _), leaves in layers.items():
        if not any(has_parts for _, has_parts in leaves):
            raise PlanError(
                f"'{leaves[0][0]}' is to be cut in parts, but its uses show none",
                help="use the style without 'packed_', or give the sizes of the parts, as in 'packed_colwise:64,16,16'",
                asked_by=asked_by,
            )


def _mark_node(node: fx.Node, walk: _Walk) -> NodePlacement:
    """Return the placement of a node: its shardings as the search chose them, and the reason."""
    if node.op == "placeholder":
        mark = _mark_input(node, walk)
    elif node.op != "call_function":
        mark = NodePlacement((), (), "a body")
    elif node.target is operator.getitem and edit.is_tensor(node):
        mark = NodePlacement((walk.found.sharding(node),), (), f"a part of {node.args[0]}")
    elif not edit.outputs(node):
        operands = edit.operands(node)
        seen = tuple(walk.settled[o] for o in operands)
        whole = tuple(Sharding.replicated(edit.ndim(o)) for o in operands)
        mark = NodePlacement((), seen if node.target is FREE else whole, "no tensor")
    elif node.target is pin:
        choice = walk.found.choices[node]
        mark = NodePlacement(choice.made, choice.wants, node.meta[PIN].asked_by, "plan-demanded")
    else:
        mark = _mark_op(node, walk)
    if edit.is_tensor(node):
        walk.settled[node] = _settle(node, walk.found)
    return mark


def _mark_input(node: fx.Node, walk: _Walk) -> NodePlacement:
    if node not in walk.found.leaves:
        return NodePlacement((), (), "no tensor")
    constraint, reason = walk.program.constraints.get(node.name), "as its uses want it"
    if constraint is not None and not constraint.leaf:
        reason = "an input"
    elif constraint is not None and constraint.is_fixed:
        walk.pinned[node] = constraint
        reason = f"plan: {constraint.asked_by}"
    return NodePlacement((walk.found.leaves[node],), (), reason)


def _settle(node: fx.Node, found: Solution) -> Sharding:
    """Return the sharding that the users of a value see: the search's for several, or the one that all of them want."""
    made = found.sharding(node)
    if node.op == "placeholder":
        return made
    users = [user for user in node.users if user in found.choices]
    operands = (pair for user in users for pair in zip(edit.operands(user), found.choices[user].wants, strict=True))
    wants = {want for operand, want in operands if operand is node}
    if not node.users or all(user.target is pin for user in node.users) or wants == {made}:
        return made
    if len(wants) == 1:  # other changes are left to each user, which has a reason for it
        return wants.pop() if made.partial else made
    return found.settled.get(node, made)


def _mark_op(node: fx.Node, walk: _Walk) -> NodePlacement:
    choice, operands = walk.found.choices[node], edit.operands(node)
    rule = choice.rule
    seen = [walk.settled[operand] for operand in operands]
    mesh, refusals, asked = walk.program.mesh, dict[int, str](), list[str]()
    for index, (operand, have, want) in enumerate(zip(operands, seen, choice.wants, strict=True)):
        sent = sent_bytes(operand, have, want, mesh)
        if have == want or not sent:
            continue
        if want.has_spans and want.without_spans == have:
            refusals[index] = "its windows reach elements of other ranks"
            continue
        if not have.partial:
            refusal = _unruled(node) if rule is None else refuses(rule, index, have, mesh)
            spared = Spared(sent, walk.met) if refusal else None
            demand = find_demand(node, seen, walk.seen, walk.pinned, mesh, spared=spared)
            if demand is not None:
                asked += [demand.text] if demand.is_planned else []
                refusal = f"{refusal}, {ALSO_ASKED} ({demand.text})" if refusal else ""
                refusal = refusal or _sooner(have, want, demand)
            refusals[index] = refusal or OTHERS
        if rule is None:
            text = f"{node.target} at '{node.name}' has no rule: '{operand.name}' is replicated"
            walk.notes.append(Note("no rule", text))
    pairs = zip(operands, seen, choice.wants, strict=True)
    kept = [operand for operand, have, want in pairs if have == want and have.axes and operand in walk.pinned]
    if rule is not None and rule.relayout and operands[0] in walk.pinned:
        walk.pinned[node] = walk.pinned[operands[0]]
    reason = _reason(node, rule, choice.option, refusals, walk.program.mesh)
    if kept:
        reason += f", asked by {' and '.join(dict.fromkeys(walk.pinned[operand].asked_by for operand in kept))}"
    why: Why = "plan-demanded" if kept or len(asked) == len(refusals) > 0 else "fallback"
    return _mark_choice(node, choice, reason, why, walk.at_door)


def _mark_choice(node: fx.Node, choice: Strategy, reason: str, why: Why, at_door: Ranges | None) -> NodePlacement:
    rule, option = choice.rule, choice.option
    sizes = {}
    local = None
    if rule is not None and edit.outputs(node):
        out = rule.pattern.outputs[0]
        sizes = {name: tuple(out.index(dim) if dim else -1 for dim in term) for name, term in rule.sizes.items()}
        if cuts := [(cut, rule.extent[factor]) for factor, cut in option.cuts.items() if factor in rule.local]:
            (body,) = {rule.local[factor] for factor in option.cuts if factor in rule.local}
            if at_door is not None:
                checks = position_checks(node, rule, option.cuts)
                body = with_checks(body, [check for check in checks if is_needed(check, node, at_door)])
            local = LocalShare(body, tuple(cuts), partial(rule.range_of, option.cuts))
    counts = _counts(rule, option)
    skips = rule is not None and rule.skips_empty
    return NodePlacement(choice.made, choice.wants, reason, why, sizes, local, counts, skips)


def _counts(rule: Rule | None, option: Option) -> Counts:
    """Return the arguments that count elements of factors, at least one of which is sharded."""
    if rule is None:
        return {}
    return {
        name: tuple(tuple((rule.extent[f], option.cuts.get(f, WHOLE)) for f in group) for group in groups)
        for name, groups in rule.counts.items()
        if any(f in option.cuts for group in groups for f in group)
    }


def _sooner(have: Sharding, want: Sharding, demand: Demand) -> str:
    """Return why an operand is changed although the op could run on it as it is."""
    verb = "gather" if set(want.axes) < set(have.axes) else "reshard"
    return f"{verb}ed here because {verb}ing the result would cost more (needed for: {demand.text})"


def _unruled(node: fx.Node) -> str:
    if not has_bodies(node):
        return "it has no rule"
    return "its bodies run whole on every rank" + (f", as {why}" if (why := node.meta.get(UNCUT)) else "")


def _reason(node: fx.Node, rule: Rule | None, option: Option, refusals: Mapping[int, str], mesh: Mesh) -> str:
    if rule is None:
        return _unruled(node) if has_bodies(node) else "the op has no rule"
    cuts = [f"{factor} is cut by {mesh.text(cut.axes).replace('.', ' and ')}" for factor, cut in option.cuts.items()]
    through = [f"a pending {op} over {axis} passes through" for axis, (op, _) in option.through.items()]
    refused = [f"{op_name(node)}: {text}" for text in dict.fromkeys(refusals.values())]
    return "; ".join([*refused, *cuts, *through]) or "operands are replicated"  # a refused operand explains the change


def _find_misfit(node: fx.Node, index: int, have: Sharding, found: Solution) -> tuple[fx.Node, str, bool]:
    """Follow a value through ops that take it alone, such as a transposition, to the op that needs it otherwise.

    Return this op, the reason, and True if the sizes of the shards alone are the reason.
    """
    mesh, choices = found.mesh, found.choices
    while True:
        rule = choices[node].rule
        why = _unruled(node) if rule is None else refuses(rule, index, have, mesh)
        if why and rule is not None:
            return node, why, not refuses(replace(rule, shards="any", local_shards="any"), index, have, mesh)
        user = next((user for user in node.users if user in choices and user.target is not pin), None)
        made = keep(node, [have], mesh) if not why and len(edit.operands(node)) == 1 and edit.is_tensor(node) else None
        if user is None or made is None or isinstance(made, Refusal):
            return node, why or OTHERS, False
        node, index, have = user, edit.operands(user).index(node), made[0]


def _refuse(
    node: fx.Node,
    index: int,
    have: Sharding,
    program: PlannedProgram,
    found: Solution,
    pinned: Mapping[fx.Node, Constraint],
) -> NoReturn:
    constraint = pinned[edit.operands(node)[index]]
    node, why, is_uneven = _find_misfit(node, index, have, found)
    sharding, fqn, mesh = constraint.sharding, constraint.leaf, found.mesh
    shape = next(edit.shape(leaf) for leaf, name in program.leaves() if name == fqn)
    help = f"pin '{fqn}' to R in the plan"
    what = f"cannot use '{fqn}' as {sharding.text(mesh)}: {node.target} says: {why}"
    for size, cut, dim in zip(shape, sharding.dims, range(sharding.ndim), strict=True):
        if cut.axes:
            axis, degree = mesh.text(cut.axes).replace(".", "' and '"), mesh.size(cut.axes)
            what = f"cannot shard '{fqn}' on dim {dim} of {size} by mesh axis '{axis}' of {degree}"
            what += f" for {node.target}: {why}"
            if size % degree and is_uneven:
                help = f"use a degree that divides {size}, or {help}"
    error = ShardingError(what, help=help, asked_by=constraint.asked_by, used_at=edit.source_line(node))
    others = [pinned[each].leaf for each in edit.operands(node) if each in pinned]
    error.leaves = tuple(dict.fromkeys([fqn, *others]))
    raise error


def _put_to_rest(leaf: fx.Node, fqn: str, request: AtRest, walk: _Walk, marks: dict[fx.Node, NodePlacement]) -> None:
    """Let ranks hold a parameter in shards, from which each use gathers it."""
    used, shape = walk.settled[leaf], edit.shape(leaf)
    sharding = walk.program.at_rest(leaf, used)
    if sharding == used:
        over = f"{request.axis}={walk.program.mesh.degree(request.axis)}"
        text = f"'{fqn}' {list(shape)} is held whole over {over}, which divides no dim ({request.asked_by})"
        walk.notes.append(Note("plan", text))
    walk.settled[leaf] = sharding
    marks[leaf] = replace(
        marks[leaf], shardings=(sharding,), reason=f"{marks[leaf].reason}; at rest: {request.asked_by}"
    )


def _mark_output(program: PlannedProgram, walk: _Walk) -> NodePlacement:
    leaves = {fqn: node for node, fqn in program.leaves()} | {n.name: n for n in program.user_inputs()}
    written = dict(program.mutations())
    leading = {**written, **dict(program.gradients())}
    # A value written back keeps the sharding of its buffer, from call to call; a gradient has its parameter's.
    wants = tuple(
        walk.settled[leaves[leading[position]] if position in leading else value]
        for position, value in enumerate(program.output.args[0])  # type: ignore[arg-type]
        if edit.is_tensor(value)
    )
    return NodePlacement((), wants, "written back" if written else "the boundary")


def _insert_reshards(node: fx.Node, seen: dict[fx.Node, Sharding], program: PlannedProgram) -> None:
    """Insert the changes before a node, and those after it for all of its users. `seen`: what users see of a value."""
    mark = placement_of(node)
    for index, operand in enumerate(edit.operands(node)):
        have, want = seen[operand], mark.wants[index]
        if have != want:
            made = edit.insert_before(node, reshard, (operand,), "reshard")
            reaches = want.has_spans and want.without_spans == have
            why, reason = "inherent" if have.partial or reaches else mark.why, mark.reason
            if rests := program.resting.get(operand.name):
                why, reason = "plan-demanded", rests.asked_by
            edit.record(made, edit.fake(operand))
            put_reshard(made, Reshard(made.name, have, want, why, reason))
            seen[made] = want
            if node.target is pin:
                made.meta[PIN] = node.meta[PIN]
            edit.replace_operand(node, index, made)
    if node.target is pin:
        (value,) = edit.operands(node)
        edit.replace_uses(node, value)
        edit.erase(node)
    elif node in seen and mark.shardings[0] != seen[node]:
        (made_as,), settled = mark.shardings, seen[node]
        why, reason = _find_cause(node, made_as, settled, program)
        inserted = edit.insert_after(node, reshard, (node,), "reshard")
        edit.replace_uses(node, inserted, keep=[inserted])
        edit.record(inserted, edit.fake(node))
        put_reshard(inserted, Reshard(inserted.name, made_as, settled, why, reason))
        seen[inserted], seen[node] = settled, made_as


def _find_cause(node: fx.Node, made: Sharding, settled: Sharding, program: PlannedProgram) -> tuple[Why, str]:
    """Return why a value is changed once for all of its users: its sum is pending, or some of them want it so."""
    if made.partial:
        ops = sorted({op for _, op in made.partial})
        return "inherent", f"each rank has a partial {' and '.join(ops)} of '{node.name}'"
    uses = [(u, at) for u in node.users for at, o in enumerate(edit.operands(u)) if o is node and u.op != "output"]
    uses = [(user, at) for user, at in uses if placement_of(user).wants[at] == settled]
    for user, _ in uses:
        if placement_of(user).why == "plan-demanded":
            return "plan-demanded", placement_of(user).reason
    for user, at in uses:
        if (rule := rule_of(user)) and (text := refuses(rule, at, made, program.mesh)):
            return "fallback", f"{op_name(user)}: {text}"
    return "fallback", f"the ops that use '{node.name}' need different shardings of it: it is resharded once for all"
