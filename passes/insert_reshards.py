"""Make every change of sharding visible."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import (
    MARK,
    RESHARD,
    Mark,
    MarkedProgram,
    Reshard,
    ReshardedProgram,
    Why,
    mark_of,
    pin,
    reshard,
)
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.passes._causes import refuses
from tpcompiler.rules.registry import rule_of


def insert_reshards(program: MarkedProgram) -> ReshardedProgram:
    """Make every change of sharding visible as a `reshard` node.

    Before    y: P(sum) -> R = linear(h, w2)
              pin_1: R = pin(y)
              return pin_1
    After     y: P(sum) = linear(h, w2)
              reshard: R = reshard(y)
              return reshard

    Assumes every value is marked. Leaves each operand with exactly the sharding its rule needs, and no `pin`.
    """
    graph = edit.copy_graph(program.graph)
    causes = {node: _find_cause(node, program.mesh) for node in graph.nodes if MARK in node.meta}
    for node in [n for n in graph.nodes if MARK in n.meta]:
        mark = mark_of(node)
        for index, operand in enumerate(edit.operands(node)):
            have, want = mark_of(operand).settled[0], mark.wants[index]
            if have != want:
                why: Why = "inherent" if have.partial else mark.why
                made = _reshard(
                    edit.insert_before(node, reshard, (operand,), "reshard"), operand, want, why, mark.reason
                )
                edit.replace_operand(node, index, made)
        if node.target is pin:
            edit.replace_uses(node, edit.operands(node)[0])
            edit.erase(node)
        elif len(mark.shardings) == 1 and mark.shardings != mark.settled:
            inserted = edit.insert_after(node, reshard, (node,), "reshard")
            edit.replace_uses(node, inserted, keep=[inserted])
            node.meta[MARK] = replace(mark, settled=mark.shardings)
            _reshard(inserted, node, mark.settled[0], *causes[node])
    return ReshardedProgram(program.source, graph, program.mesh, program.notes)


def _find_cause(node: fx.Node, mesh: Mesh) -> tuple[Why, str]:
    """Return why a value is changed once for all its users: its sum is pending, or some of them need the change."""
    mark = mark_of(node)
    if len(mark.shardings) != 1 or mark.shardings[0].partial or mark.shardings == mark.settled:
        ops = sorted({op for _, op in mark.shardings[0].partial}) if mark.shardings else []
        return "inherent", f"each rank has a partial {' and '.join(ops)} of '{node.name}'"
    uses = [(u, at) for u in node.users for at, o in enumerate(edit.operands(u)) if o is node and u.op != "output"]
    uses = [(user, at) for user, at in uses if mark_of(user).wants[at] == mark.settled[0]]
    for user, _ in uses:
        if mark_of(user).why == "plan-demanded":
            return "plan-demanded", mark_of(user).reason
    for user, at in uses:
        if (rule := rule_of(user)) and (text := refuses(rule, at, mark.shardings[0], mesh)):
            return "fallback", f"{op_name(user)}: {text}"
    return "fallback", f"the ops that use '{node.name}' need different shardings of it: it is resharded once for all"


def _reshard(made: fx.Node, value: fx.Node, target: Sharding, why: Why, reason: str) -> fx.Node:
    source = mark_of(value).settled[0]
    made.meta["val"] = value.meta["val"]
    made.meta[MARK] = Mark((target,), (target,), (source,), reason, why)
    made.meta[RESHARD] = Reshard(made.name, source, target, why, reason)
    return made
