"""Why an operand is gathered: an op that needs it whole, or what somebody asked for further on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PIN, Seed, pin
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, follow, merge, pass_through, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.domain import results

MOST = 64  # ops that are looked at
ALSO_ASKED = "which is also asked for"  # of what an op needs whole, and the boundary too


def refuses(rule: Rule, index: int, have: Sharding, mesh: Mesh) -> str:
    """Why an op cannot take an operand as it is; nothing where it can."""
    found = follow(rule, rule.pattern.inputs[index], have, mesh)
    for axis, op in have.partial:
        if isinstance(found, Option):
            through = pass_through(rule, index, axis, op)
            found = through if isinstance(through, Refusal) else found
    both = found if isinstance(found, Refusal) else shardings(rule, found, mesh)
    return both.text if isinstance(both, Refusal) else ""


class Demand(NamedTuple):
    """Why somebody further on wants a value otherwise; `is_planned`: because of what the plan or the caller says."""

    text: str
    is_planned: bool


class Spared(NamedTuple):
    """A gather that is thought away: its bytes, and the pins whose demand the gathers before it meet."""

    wire_bytes: int
    met: set[fx.Node]

    def meets(self, asked: fx.Node, wire_bytes: int) -> bool:
        """True if a pin would change as many bytes without the gather, and no other gather spares it that."""
        if asked in self.met or wire_bytes < self.wire_bytes:
            return False
        self.met.add(asked)
        return True


def find_demand(
    node: fx.Node,
    have: Sequence[Sharding],
    seen: Callable[[fx.Node], Sharding | None],
    pinned: Mapping[fx.Node, Seed],
    mesh: Mesh,
    *,
    spared: Spared | None = None,
) -> Demand | None:
    """Who wants what is made of a gathered operand otherwise than the op would make it; None where the op itself does.

    The op is run on the operands as they are (`have`), and what it makes of them is followed to its users. `seen` says
    what their other operands are.

    With `spared`, as if ops could run on what they need whole: a demand is then a pin that would have to change as many
    bytes, had the gather been spared, such as an output that is whole. Each is met by one
    gather.
    """
    asked: dict[str, None] = {}
    queue: list[tuple[fx.Node, Sequence[Sharding]]] = [(node, have)]
    for count, (op, operands) in enumerate(queue):  # it grows
        made = _kept(op, operands, mesh, despite=spared is not None)
        seeds = [pinned[operand].asked_by for operand in edit.operands(op) if operand in pinned]
        if isinstance(made, Refusal) and seeds and op is not node and spared is None:
            asked.update(dict.fromkeys(seeds))
            continue
        if isinstance(made, Refusal) and spared is not None and op is not node:
            continue
        if isinstance(made, Refusal) or count > MOST:
            why = f" ({made.text})" if isinstance(made, Refusal) else ""
            return None if op is node or spared is not None else Demand(f"'{op.name}'{why}", False)
        for value, at in results(op):
            is_cut_again = spared is not None and not set(made[at].axes).isdisjoint((seen(value) or made[at]).axes)
            for user in () if is_cut_again else value.users:
                if user.target is pin:
                    if spared is None or spared.meets(user, _changed(value, made[at], user.meta[PIN], mesh)):
                        asked[user.meta[PIN].asked_by] = None
                elif user.op == "call_function" and user.target is not operator.getitem and edit.outputs(user):
                    others = [made[at] if operand is value else seen(operand) for operand in edit.operands(user)]
                    known = [other for other in others if other is not None]
                    if len(known) == len(others) and (user, known) not in queue:
                        queue.append((user, known))
    first = next(iter(asked), "")
    return Demand(f"{first} and {len(asked) - 1} more" if len(asked) > 1 else first, True) if asked else None


def _changed(value: fx.Node, have: Sharding, asked: Seed, mesh: Mesh) -> int:
    """The bytes that a pin changes of a value."""
    want, tensor = asked.over(have) if asked.axes else asked.sharding, value.meta["val"]
    return reshard_wire_bytes(have, want, tensor.shape, tensor.element_size(), mesh) if have.cut_axes else 0


def _kept(node: fx.Node, have: Sequence[Sharding], mesh: Mesh, *, despite: bool) -> tuple[Sharding, ...] | Refusal:
    """What an op makes of operands that stay as they are, but for slices of whole ones.

    `despite`: as if it could run on a share of a dim that it needs whole, and makes as well.
    """
    rule, options = rule_of(node), list[Option]()
    if rule is not None and despite:
        made = {factor for term in rule.pattern.outputs for dim in term for factor in dim}
        rule = replace(rule, pattern=replace(rule.pattern, whole=rule.pattern.whole - made))
    for index, sharding in enumerate(have if rule is not None else ()):
        assert rule is not None
        if sharding.cut_axes:
            found = follow(rule, rule.pattern.inputs[index], sharding.settled(), mesh)
            if isinstance(found, Refusal):
                return found
            options.append(found)
    option = merge(options)
    if rule is None or option is None:
        return Refusal("it has no rule" if rule is None else "other operands are cut differently")
    both = shardings(rule, option, mesh)
    if isinstance(both, Refusal):
        return both
    pairs = zip(edit.operands(node), both[0], have, strict=True)
    same = all(not _wire_bytes(value, own.settled(), want, mesh) for value, want, own in pairs)
    return both[1] if same else Refusal("other operands are cut differently")


def _wire_bytes(value: fx.Node, have: Sharding, want: Sharding, mesh: Mesh) -> int:
    tensor = value.meta["val"]
    return reshard_wire_bytes(have, want, tensor.shape, tensor.element_size(), mesh)
