"""Reduce after an op instead of before it, where that moves fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import MARK, RESHARD, Mark, Reshard, ReshardedProgram, mark_of, reshard
from tpcompiler.rules.infer import Refusal, pass_through, shardings
from tpcompiler.rules.registry import rule_of


def delay_reductions(program: ReshardedProgram) -> ReshardedProgram:
    """Let pending sums pass through an op that is linear in them, if what it makes of them is cheaper to reduce.

    Before    a_1: R = reshard(a)                   a: P(sum)
              b_1: R = reshard(b)                   b: P(sum)
              c: R = add(a_1, b_1)
    After     c: P(sum) = add(a, b)
              c_1: R = reshard(c)

    Only reductions that nobody else needs are delayed. So branches that are added share one all_reduce, and rows of a
    table that are summed are reduced as their sum.
    """
    graph = edit.copy_graph(program.graph)
    for node in edit.calls(graph):
        if node.target is not reshard and edit.is_tensor(node):
            _delay(node, program.mesh)
    return ReshardedProgram(program.source, graph, program.mesh, program.notes)


def _delay(node: fx.Node, mesh: Mesh) -> None:
    operands = edit.operands(node)
    reductions = {i: o.meta[RESHARD] for i, o in enumerate(operands) if _is_reduction(o, node)}
    rule = rule_of(node) if reductions else None
    mark = mark_of(node)
    if rule is None:
        return
    first = next(iter(reductions))
    ((axis, op),) = reductions[first].source.partial
    option = pass_through(rule, first, axis, op)
    both = option if isinstance(option, Refusal) else shardings(rule, option, mesh)
    if isinstance(both, Refusal):
        return
    wants, (made,) = both
    changes = [reductions.get(i) for i in range(len(operands))]
    have = [mark_of(o).settled[0] if c is None else c.source for o, c in zip(operands, changes, strict=True)]
    if have != list(wants):
        return
    now = {operands[i]: _bytes(operands[i].meta["val"], change, mesh) for i, change in reductions.items()}
    late = Reshard("", made, mark.shardings[0], "inherent", f"'{node.name}' is a pending reduction")
    if _bytes(node.meta["val"], late, mesh) >= sum(now.values()):
        return
    for index in reductions:
        edit.replace_operand(node, index, edit.operands(operands[index])[0])
    for operand in now:
        edit.erase(operand)
    reason = f"a pending {op} over {axis} passes through: the result is cheaper to reduce"
    node.meta[MARK] = replace(mark, shardings=(made,), settled=(made,), wants=wants, reason=reason)
    after = edit.insert_after(node, reshard, (node,), "reshard")
    edit.replace_uses(node, after, keep=[after])
    after.meta["val"] = node.meta["val"]
    after.meta[MARK] = Mark((late.target,), (late.target,), (made,), late.reason, late.why)
    after.meta[RESHARD] = replace(late, name=after.name)


def _is_reduction(operand: fx.Node, user: fx.Node) -> bool:
    """Whether it is a pending reduction made whole for this user alone."""
    if operand.target is not reshard or list(operand.users) != [user]:
        return False
    change: Reshard = operand.meta[RESHARD]
    return len(change.source.partial) == 1 and change.target.is_replicated and change.why == "inherent"


def _bytes(value: torch.Tensor, change: Reshard, mesh: Mesh) -> int:
    return reshard_wire_bytes(change.source, change.target, value.shape, value.element_size(), mesh)
