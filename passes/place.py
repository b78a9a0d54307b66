"""Put the solution of the search on every node, and every change of sharding into the graph."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.constraints import AtRest
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, Reshard, placement_of, reshard_of
from tpcompiler.ir.program import PIN, Note, PlacedProgram, PlannedProgram, pin, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.passes._notes import notes_of, shared_leaves, whole_leaves
from tpcompiler.passes._placements import Walk, mark_node, refuse_misfits
from tpcompiler.passes._reshard_reasons import completed_sum, refuses
from tpcompiler.rules.index_range import door_ranges
from tpcompiler.rules.registry import rule_of
from tpcompiler.runtime.records import Why
from tpcompiler.solver.solution import Solution


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
    walk = Walk(program, found, door_ranges(program, inputs) if check_indices else None)
    leaves = {node.name: (node, fqn) for node, fqn in program.leaves()}
    marks = {node: mark_node(node, walk) for node in program.graph.nodes if node.op != "output"}
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
            own = placement_of(node)
            reason = f"the rest of the sum of '{summed.name}': {own.reason}"
            change = replace(reshard_of(node), why="inherent", reason=reason)
            node.meta[PLACEMENT] = replace(own, why="inherent", reason=reason, reshard=change)
    placed = PlacedProgram(program.source, graph, program.mesh, program.notes)
    notes = (*shared_leaves(program, placed), *whole_leaves(program, placed), *walk.notes, *notes_of(placed))
    return PlacedProgram(program.source, graph, program.mesh, (*program.notes, *notes))


def _put_to_rest(leaf: fx.Node, fqn: str, request: AtRest, walk: Walk, marks: dict[fx.Node, NodePlacement]) -> None:
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


def _mark_output(program: PlannedProgram, walk: Walk) -> NodePlacement:
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
            change = Reshard(made.name, have, want, why, reason)
            seen[_put_change(made, change)] = want
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
        seen[_put_change(inserted, Reshard(inserted.name, made_as, settled, why, reason))] = settled
        seen[node] = made_as


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


def _put_change(made: fx.Node, change: Reshard) -> fx.Node:
    made.meta["val"] = edit.fake(edit.operands(made)[0])
    made.meta[PLACEMENT] = NodePlacement((change.target,), (change.source,), change.reason, change.why, reshard=change)
    return made
