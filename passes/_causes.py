"""Why an operand is gathered: an op that needs it whole, or what somebody asked for further on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PIN, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, follow, merge, pass_through, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

MOST = 64  # ops that are looked at


def refuses(rule: Rule, index: int, have: Sharding, mesh: Mesh) -> str:
    """Why an op cannot take an operand as it is; nothing where it can."""
    found = follow(rule, rule.pattern.inputs[index], have, mesh)
    for axis, op in have.partial:
        if isinstance(found, Option):
            through = pass_through(rule, index, axis, op)
            found = through if isinstance(through, Refusal) else found
    both = found if isinstance(found, Refusal) else shardings(rule, found, mesh)
    return both.text if isinstance(both, Refusal) else ""


def find_demand(
    node: fx.Node, have: Sequence[Sharding], seen: Callable[[fx.Node], Sharding | None], mesh: Mesh
) -> str:
    """Who asks for what is made of a gathered operand: the words of a pin; nothing where an op needs it whole.

    The op is run on the operands as they are (`have`), and what it makes of them is followed to its users. `seen` says
    what their other operands are.
    """
    asked: dict[str, None] = {}
    queue: list[tuple[fx.Node, Sequence[Sharding]]] = [(node, have)]
    for count, (op, operands) in enumerate(queue):  # it grows
        made = _kept(op, operands, mesh)
        if made is None or count > MOST:
            return ""
        for user in op.users if edit.is_tensor(op) else [u for g in op.users for u in g.users]:
            if user.op == "output" or user.target is operator.getitem:
                continue
            if user.target is pin:
                asked[user.meta[PIN].asked_by] = None
                continue
            others = [made[0] if operand is op else seen(operand) for operand in edit.operands(user)]
            if edit.outputs(user) and (user, others) not in queue:
                if any(other is None for other in others):
                    return ""
                queue.append((user, [other for other in others if other is not None]))
    return " and ".join(asked)


def _kept(node: fx.Node, have: Sequence[Sharding], mesh: Mesh) -> tuple[Sharding, ...] | None:
    """What an op makes of operands that stay as they are, but for slices of whole ones."""
    rule = rule_of(node)
    if rule is None:
        return None
    options: list[Option] = []
    for index, sharding in enumerate(have):
        found: Any = follow(rule, rule.pattern.inputs[index], sharding.settled(), mesh) if sharding.cut_axes else None
        if isinstance(found, Refusal):
            return None
        options += [found] if found is not None else []
    option = merge(options)
    both = shardings(rule, option, mesh) if option is not None else Refusal("")
    if isinstance(both, Refusal):
        return None
    same = all(want == own.settled() or own.settled().is_replicated for want, own in zip(both[0], have, strict=True))
    return both[1] if same else None
