"""How long a call of a rank's program is predicted to take: kernels by the roofline, collectives by the links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tpcompiler._torch import HigherOrderOperator, OpOverload, calls_others, sym_hint
from tpcompiler.cost.kernels import find_kernels
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, Work, local_work
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.rules.infer import Option
from tpcompiler.rules.registry import rule_of

# Each row times one of the stacked matrices; torch's counter does not know them.
GROUPED = frozenset(("_grouped_mm", "grouped_mm_fallback"))
UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


class StepTime(NamedTuple):
    """Seconds of one call on one rank.

    Attributes:
        work: the bytes that kernels move, or their FLOPs, whichever takes longer.
        kernels: what kernels take on top of that, whatever their size.
        network: collectives, one after the other.
        host: what it takes to launch all of that, at the same time; 0 in a CUDA graph.
    """

    work: float
    kernels: float
    network: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return max(self.work + self.kernels + self.network, self.host)

    @property
    def text(self) -> str:
        parts = {"work": self.work, "kernels": self.kernels, "network": self.network, "host": self.host}
        each = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
        return f"takes {duration(self.total)} ({each})" if each else "takes no time"

    def to_data(self) -> dict[str, float]:
        """As JSON."""
        return {**self._asdict(), "total": self.total}


class Step(NamedTuple):
    """A node that takes time, in seconds.

    Attributes:
        work: of its bytes or FLOPs.
        floor: of the kernel that it begins, whatever its size.
        sent: of a collective.
        critical: it is on the chain of dependences that takes longest.
    """

    node: str
    module: str
    work: float
    floor: float
    sent: float
    critical: bool

    @property
    def compute(self) -> float:
        return self.work + self.floor


class Times(NamedTuple):
    """Predicted times of one call on one rank.

    Attributes:
        total: of all steps, one after the other.
        steps: kernels and collectives, in order.
        chain: the critical path: the nodes of the chain of dependences that takes longest, in order.
        uncounted: how many calls of which ops may multiply matrices, and take no time here: nobody knows their FLOPs.
    """

    total: StepTime
    steps: tuple[Step, ...]
    chain: tuple[str, ...]
    uncounted: Mapping[str, int]


def predict_times(graph: fx.Graph, sent: Mapping[str, float], machine: Machine, mesh: Mesh) -> Times:
    """Predict what each kernel and collective of a rank's program takes, with the sizes of the example.

    The prices are those of the search for placements, and the program has also what a search does not see, such as the
    copies around a collective. FLOPs are what torch's counter says of the rank's own shapes.

    Args:
        sent: seconds of each collective, by node.
    """
    objective, kernels, known = Objective.of(machine), find_kernels(graph, machine.fuses), dict[Any, int | None]()
    work, floors, uncounted = dict[fx.Node, float](), dict[fx.Node, float](), Counter[str]()
    for node in edit.calls(graph):
        if node.name not in sent and node in kernels:
            alike = node.target, key(node.args), key(node.kwargs)
            if alike not in known:
                known[alike] = _flops(node)
            if (flops := known[alike]) is None:
                uncounted[op_name(node)] += 1
            values = [*(operand.meta["val"] for operand in edit.operands(node)), *edit.outputs(node)]
            whole = [(value, Sharding.replicated(value.ndim)) for value in values]
            rule = rule_of(node) if edit.outputs(node) else None
            rows = local_work(node, rule, Option(), mesh).rows
            work[node] = objective.work_seconds(kernels[node], Work(flops or 0, rows), whole, mesh)
            floors[node] = objective.floor_seconds(kernels[node])
    links = {node: sent[node.name] for node in graph.nodes if node.name in sent}
    taken = {node: work.get(node, 0.0) + floors.get(node, 0.0) + links.get(node, 0.0) for node in graph.nodes}
    chain = _longest_chain(graph, taken)
    steps = (
        Step(
            node.name,
            edit.module_path(node),
            work.get(node, 0.0),
            floors.get(node, 0.0),
            links.get(node, 0.0),
            node in chain,
        )
        for node in graph.nodes
        if taken[node] or node in links
    )
    host = len(kernels) * machine.host.operation + len(links) * machine.host.collective
    total = StepTime(math.fsum(work.values()), math.fsum(floors.values()), math.fsum(links.values()), host)
    return Times(total, tuple(steps), tuple(node.name for node in chain), uncounted)


def duration(seconds: float) -> str:
    """Seconds as people read them: `2.9 ms`."""
    unit, name = next((pair for pair in UNITS_OF_TIME if seconds >= pair[0]), UNITS_OF_TIME[-1])
    return f"{seconds / unit:.3g} {name}"


def _flops(node: fx.Node) -> int | None:
    """By torch's counter, which sees what an op that is made of others calls; None where it cannot tell.

    A product has two operands or more. A body of control flow may run any number of times.
    """
    op, operands = node.target, edit.operands(node)
    if isinstance(op, HigherOrderOperator):
        return None
    if not isinstance(op, OpOverload) or len(operands) < 2:
        return 0
    if op_name(node) in GROUPED:
        rows, matrices = (_example(operand.meta["val"]) for operand in operands[:2])
        return int(2 * rows.numel() * matrices.shape[-1])
    if calls_others(op) or op.overloadpacket in flop_registry:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: _example(operand.meta["val"]))
        try:
            with FlopCounterMode(display=False) as counter:
                op(*args, **kwargs)
        except NotImplementedError:  # sizes depend on values
            return None
        if (count := int(counter.get_total_flops())) or op.overloadpacket in flop_registry:
            return count
    return None if _may_multiply(node) else 0


def _may_multiply(node: fx.Node) -> bool:
    """Whether a dim that operands share is summed, or nothing is known of the op."""
    if (rule := rule_of(node)) is None:
        return True
    terms = zip(rule.pattern.inputs, edit.operands(node), strict=True)
    held = [{factor for dim in term for factor in dim} for term, operand in terms if not _holds_indices(operand)]
    return any(sum(factor in each for each in held) > 1 for factor in rule.reduced)


def _holds_indices(operand: fx.Node) -> bool:
    return operand.meta["val"].dtype in (torch.int64, torch.bool)


def _example(value: Any) -> Any:
    """A value with the sizes of the example, without memory."""
    if isinstance(value, torch.Tensor):
        shape = [sym_hint(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return sym_hint(value)
    return [_example(each) for each in value] if isinstance(value, (list, tuple)) else value


def _longest_chain(graph: fx.Graph, seconds: Mapping[fx.Node, float]) -> dict[fx.Node, None]:
    """Its nodes in order."""
    ends: dict[fx.Node, float] = {}
    before: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        before[node] = max(node.all_input_nodes, key=lambda operand: ends[operand], default=None)
        ends[node] = seconds.get(node, 0.0) + ends.get(before[node], 0.0)  # type: ignore[arg-type]
    chain, last = list[fx.Node](), max(ends, key=lambda node: ends[node], default=None)
    while last is not None:
        chain.append(last)
        last = before[last]
    return dict.fromkeys(reversed(chain))
