"""The predicted time of a call of a rank's program: kernels by the roofline, collectives by the links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tpcompiler._torch import HigherOrderOperator, OpOverload, calls_others, sym_hint
from tpcompiler.cost.fusion import PARTS, Part, find_kernels, is_attention, part_of
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, Work, local_work
from tpcompiler.ir import edit
from tpcompiler.ir.local import key
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.rules.infer import Option
from tpcompiler.rules.registry import rule_of
from tpcompiler.runtime.records import Record

# Each row is multiplied by one of the stacked matrices; torch's counter does not know these ops.
GROUPED = frozenset(("_grouped_mm", "grouped_mm_fallback"))
UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


class StepTime(Record, frozen=True):
    """Seconds of one call on one rank."""

    # the bytes that kernels move, or their FLOPs, whichever takes longer:
    weights: float  # products with a stored matrix
    attention: float  # attention, with its caches, and products of two computed values
    copies: float  # ops that only move data, and writes to caches
    other: float  # all other ops
    kernels: float  # the floors of kernels, on top of their work
    network: float  # collectives, one after the other, except where other work hides them
    host: float  # launching all of that, at the same time; 0 in a CUDA graph
    total: float  # of the call

    @classmethod
    def of(cls, work: Mapping[Part, float], kernels: float, network: float, host: float = 0.0) -> StepTime:
        own: dict[str, float] = {part: work.get(part, 0.0) for part in PARTS}
        total = max(math.fsum(own.values()) + kernels + network, host)
        return cls(**own, kernels=kernels, network=network, host=host, total=total)

    @property
    def work(self) -> float:
        """The seconds of all kernels, without their floors."""
        return math.fsum((self.weights, self.attention, self.copies, self.other))

    @property
    def parts(self) -> dict[str, float]:
        """Return what the call consists of, by name."""
        return {
            name: seconds for name in self.__struct_fields__ if name != "total" and (seconds := getattr(self, name))
        }

    @property
    def text(self) -> str:
        each = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.parts.items())
        return f"takes {duration(self.total)} ({each})" if each else "takes no time"


class TimedNode(NamedTuple):
    """A node that takes time, in seconds.

    Attributes:
        work: for its bytes or FLOPs.
        floor: for the kernel that it starts, whatever its size.
        sent: for its collective.
        critical: True if the node is on the longest chain of dependences.
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
        total: of the whole call: kernels one after the other, and collectives one after the other next to them.
        steps: kernels and collectives, in order.
        chain: the critical path: the nodes of the longest chain of dependences, in order.
        uncounted: op -> number of calls that may multiply matrices but count 0 here, because their FLOPs are unknown.
    """

    total: StepTime
    steps: tuple[TimedNode, ...]
    chain: tuple[str, ...]
    uncounted: Mapping[str, int]


def predict_times(graph: fx.Graph, sent: Mapping[str, float], machine: Machine, mesh: Mesh) -> Times:
    """Predict the time of each kernel and collective of a rank's program, with the example's sizes.

    The prices are those of the search for placements. The program also has ops that no search sees, such as copies
    around a collective. FLOPs are torch's count for the rank's own shapes.

    Args:
        sent: seconds of each collective, by node.
    """
    objective, kernels, flops_of = Objective.of(machine), find_kernels(graph, machine.fuses), dict[Any, float | None]()
    work, floors, uncounted = dict[fx.Node, float](), dict[fx.Node, float](), Counter[str]()
    parts = dict.fromkeys(PARTS, 0.0)
    for node in edit.calls(graph):
        if node.name not in sent and node in kernels:
            values = [*(edit.fake(operand) for operand in edit.operands(node)), *edit.outputs(node)]
            whole = [(value, Sharding.replicated(value.ndim)) for value in values]
            own = local_work(node, rule_of(node) if edit.outputs(node) else None, Option(), mesh)
            call = node.target, key(node.args), key(node.kwargs)
            if call not in flops_of:
                flops_of[call] = own.flops if is_attention(node) else _flops(node)
            if (flops := flops_of[call]) is None:
                uncounted[op_name(node)] += 1
            work[node] = objective.work_seconds(kernels[node], Work(flops or 0, own.rows), whole, mesh)
            parts[part_of(node, kernels[node])] += work[node]
            floors[node] = objective.floor_seconds(kernels[node])
    links = {node: sent[node.name] for node in graph.nodes if node.name in sent}
    seconds = {node: work.get(node, 0.0) + floors.get(node, 0.0) + links.get(node, 0.0) for node in graph.nodes}
    chain = _longest_chain(graph, seconds)
    steps = (
        TimedNode(
            node.name,
            edit.module_path(node),
            work.get(node, 0.0),
            floors.get(node, 0.0),
            links.get(node, 0.0),
            node in chain,
        )
        for node in graph.nodes
        if seconds[node] or node in links
    )
    host = len(kernels) * machine.host.operation + len(links) * machine.host.collective
    network = _exposed_seconds(graph, seconds, links)
    total = StepTime.of(parts, math.fsum(floors.values()), network, host)
    return Times(total, tuple(steps), tuple(node.name for node in chain), uncounted)


def _exposed_seconds(graph: fx.Graph, seconds: Mapping[fx.Node, float], links: Mapping[fx.Node, float]) -> float:
    """Return the seconds of collectives that no kernel hides.

    Collectives run one after the other, next to the kernels between a start and its wait; an op over symmetric memory
    waits at once.
    """
    left: dict[fx.Node, float] = {}  # of the collectives in flight, in order
    exposed: list[float] = []
    for node in graph.nodes:
        if node in links:
            left[node] = links[node]
        elif not edit.is_wait(node):
            hidden = seconds[node]
            for start in left:
                part = min(hidden, left[start])
                left[start], hidden = left[start] - part, hidden - part
        done = edit.started(node) if edit.is_wait(node) else None if edit.waits_of(node) else node
        while done in left:
            exposed.append(left.pop(next(iter(left))))
    return math.fsum((*exposed, *left.values()))


def duration(seconds: float) -> str:
    """Format seconds for people: `2.9 ms`."""
    rounded = float(f"{seconds:.3g}")
    unit, name = next((pair for pair in UNITS_OF_TIME if rounded >= pair[0]), UNITS_OF_TIME[-1])
    return f"{seconds / unit:.3g} {name}"


def _flops(node: fx.Node) -> int | None:
    """Count FLOPs by torch's counter, which sees the calls inside composite ops; None if it cannot know them.

    A product has at least two operands. A body of control flow may run any number of times.
    """
    op, operands = node.target, edit.operands(node)
    if isinstance(op, HigherOrderOperator):
        return None
    if not isinstance(op, OpOverload) or len(operands) < 2:
        return 0
    if op_name(node) in GROUPED:
        rows, matrices = (_example(edit.fake(operand)) for operand in operands[:2])
        return int(2 * rows.numel() * matrices.shape[-1])
    if calls_others(op) or op.overloadpacket in flop_registry:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: _example(edit.fake(operand)))
        try:
            with FlopCounterMode(display=False) as counter:
                op(*args, **kwargs)
        except NotImplementedError:  # sizes depend on values
            return None
        if (count := int(counter.get_total_flops())) or op.overloadpacket in flop_registry:
            return count
    return None if _may_multiply(node) else 0


def _may_multiply(node: fx.Node) -> bool:
    """Return True if a dim shared by operands is summed, or if the op has no rule."""
    if (rule := rule_of(node)) is None:
        return True
    terms = zip(rule.pattern.inputs, edit.operands(node), strict=True)
    indices = (torch.int64, torch.bool)
    values = (term for term, operand in terms if edit.fake(operand).dtype not in indices)
    factors = [{factor for dim in term for factor in dim} for term in values]
    return any(sum(factor in each for each in factors) > 1 for factor in rule.reduced)


def _example(value: Any) -> Any:
    """Return a value with the example's sizes, without memory."""
    if isinstance(value, torch.Tensor):
        shape = [sym_hint(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return sym_hint(value)
    return [_example(each) for each in value] if isinstance(value, (list, tuple)) else value


def _longest_chain(graph: fx.Graph, seconds: Mapping[fx.Node, float]) -> dict[fx.Node, None]:
    """Return the nodes of the longest chain, in order."""
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
