"""Find out why an operand is gathered: its op needs it whole, or somebody further on does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Constraint
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of, reshard_of
from tpcompiler.ir.program import PIN, pin, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.rules.infer import Option, Refusal, follow, merge, pass_through, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

MOST = 64  # ops to examine
OTHERS = "other operands are cut differently"
ALSO_ASKED = "which is also asked for"  # a dim that the op needs whole and the boundary does too


def refuses(rule: Rule, index: int, have: Sharding, mesh: Mesh) -> str:
    """Return why an op cannot take an operand as it is, or ""."""
    option = follow(rule, rule.pattern.inputs[index], have, mesh)
    for axis, op in have.partial:
        if isinstance(option, Option):
            through = pass_through(rule, index, axis, op)
            option = through if isinstance(through, Refusal) else option
    both = option if isinstance(option, Refusal) else shardings(rule, option, mesh)
    return both.text if isinstance(both, Refusal) else ""


class Demand(NamedTuple):
    """A reason for resharding a value that comes from a later use; `is_planned`: from the plan or the caller."""

    text: str
    is_planned: bool


class Spared(NamedTuple):
    """A hypothetically removed gather: its bytes, and the pins whose demand earlier gathers meet."""

    wire_bytes: int
    met: set[fx.Node]

    def meets(self, demanding: fx.Node, wire_bytes: int) -> bool:
        """Return True if a pin would change as many bytes without the gather, and no other gather spares it that."""
        if demanding in self.met or wire_bytes < self.wire_bytes:
            return False
        self.met.add(demanding)
        return True


def find_demand(
    node: fx.Node,
    have: Sequence[Sharding],
    seen: Callable[[fx.Node], Sharding],
    pinned: Mapping[fx.Node, Constraint],
    mesh: Mesh,
    *,
    spared: Spared | None = None,
) -> Demand | None:
    """Return who needs the result of a gathered operand in another sharding than the op would produce, if anyone does.

    The op is run on the operands as they are (`have`), and its results are followed to their users. `seen` returns the
    shardings of other operands. None: the op itself needs the gather.

    With `spared`, ops count as able to run on dims that they need whole. A demand is then a pin, such as a whole
    output, that would have to change as many bytes without the gather. Each pin is met by one gather.
    """
    demands: dict[str, None] = {}
    queue: list[tuple[fx.Node, Sequence[Sharding]]] = [(node, have)]
    for count, (op, operands) in enumerate(queue):  # it grows
        produced = keep(op, operands, mesh, despite=spared is not None)
        entries = [pinned[operand].asked_by for operand in edit.operands(op) if operand in pinned]
        if isinstance(produced, Refusal) and entries and op is not node and spared is None:
            demands.update(dict.fromkeys(entries))
            continue
        if isinstance(produced, Refusal) and spared is not None and op is not node:
            continue
        if isinstance(produced, Refusal) or count > MOST:
            why = f" ({produced.text})" if isinstance(produced, Refusal) else ""
            return None if op is node or spared is not None else Demand(f"'{op.name}'{why}", False)
        for value, at in edit.results(op):
            is_cut_again = spared is not None and not produced[at].axes.isdisjoint(seen(value).axes)
            for user in () if is_cut_again else value.users:
                if user.target is pin:
                    if spared is None or spared.meets(user, _changed(value, produced[at], user.meta[PIN], mesh)):
                        demands[user.meta[PIN].asked_by] = None
                elif user.op == "call_function" and user.target is not operator.getitem and edit.outputs(user):
                    others = [produced[at] if operand is value else seen(operand) for operand in edit.operands(user)]
                    if (user, others) not in queue:
                        queue.append((user, others))
    first = next(iter(demands), "")
    return Demand(f"{first} and {len(demands) - 1} more" if len(demands) > 1 else first, True) if demands else None


def _changed(value: fx.Node, have: Sharding, asked: Constraint, mesh: Mesh) -> int:
    """Return the bytes of a value that a pin changes."""
    want = asked.apply(have)
    return sent_bytes(value, have, want, mesh) if have.cut_axes else 0


def keep(
    node: fx.Node, have: Sequence[Sharding], mesh: Mesh, *, despite: bool = False
) -> tuple[Sharding, ...] | Refusal:
    """Return an op's results for operands that stay as they are, apart from slices of whole operands.

    `despite`: pretend that it can run on a share of a dim that it needs whole and produces too.
    """
    rule, options = rule_of(node), list[Option]()
    if rule is not None and despite:
        rule = replace(rule, pattern=replace(rule.pattern, whole=rule.pattern.whole - rule.made))
    for index, sharding in enumerate(have if rule is not None else ()):
        assert rule is not None
        if sharding.cut_axes:
            choice = follow(rule, rule.pattern.inputs[index], sharding.without_partial, mesh)
            if isinstance(choice, Refusal):
                return choice
            options.append(choice)
    option = merge(options)
    if rule is None or option is None:
        return Refusal("it has no rule" if rule is None else OTHERS)
    both = shardings(rule, option, mesh)
    if isinstance(both, Refusal):
        return both
    pairs = zip(edit.operands(node), both[0], have, strict=True)
    same = all(not sent_bytes(value, own.without_partial, want, mesh) for value, want, own in pairs)
    return both[1] if same else Refusal(OTHERS)


def completed_sum(change: fx.Node, met: set[fx.Node]) -> fx.Node | None:
    """Return the scattered sum that a fallback gather completes, and add it to `met`; None if it completes none.

    The gathered value was computed from the sum. Both changes together move at most the bytes of an all_reduce of it.
    Each sum is completed once.
    """
    own, queue, most = reshard_of(change), edit.operands(change), edit.fake(change)
    axes = own.source.axes - own.target.axes
    if own.why != "fallback" or not axes:
        return None
    for node in queue:  # it grows
        if node.target is reshard:
            before, (value,) = reshard_of(node).source, edit.operands(node)
            is_as_large = statically_equal(edit.fake(value).numel(), most.numel())
            is_sum = axes <= {axis for axis, _ in before.partial} and edit.fake(value).itemsize >= most.itemsize
            if is_sum and is_as_large and node not in met:
                met.add(node)
                return value
        elif node.op == "call_function" and len(queue) < MOST:
            source, _ = edit.producer(node)
            for operand, want in zip(edit.operands(source), placement_of(source).wants, strict=True):
                if axes <= want.axes and operand not in queue:
                    queue.append(operand)
    return None


def sent_bytes(value: fx.Node, have: Sharding, want: Sharding, mesh: Mesh) -> int:
    """Return the least wire bytes per rank of a change of a value's sharding."""
    tensor = edit.fake(value)
    return reshard_wire_bytes(have, want, tensor.shape, tensor.element_size(), mesh)
