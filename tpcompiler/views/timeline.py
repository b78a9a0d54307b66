"""How long a call is predicted to take, layer by layer: compute by the roofline, communication by the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tpcompiler._torch import HigherOrderOperator, OpOverload, calls_others, sym_hint
from tpcompiler.cost.kernels import find_kernels
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, Work, local_work, moved_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.text import op_name
from tpcompiler.rules.infer import Option
from tpcompiler.rules.registry import rule_of

# Each row times one of the stacked matrices; torch's counter does not know them.
GROUPED = frozenset(("_grouped_mm", "grouped_mm_fallback"))


class Step(NamedTuple):
    """A node that takes time, in seconds; `critical`: it is on the chain of dependences that takes longest."""

    node: str
    module: str
    compute: float
    sent: float
    critical: bool


class Times(NamedTuple):
    """Predicted times of one call on one rank.

    Attributes:
        steps: kernels and collectives, in order.
        chain: the critical path: the nodes of the chain of dependences that takes longest, in order.
        uncounted: how many calls of which ops may multiply matrices, and take no time here: nobody knows their FLOPs.
    """

    steps: tuple[Step, ...]
    chain: tuple[str, ...]
    uncounted: Mapping[str, int]


def predict_times(
    exported: ExportedProgram, records: Mapping[str, Mapping[str, Any]], machine: Machine, mesh: Mesh
) -> Times:
    """Predict what each kernel and collective of a rank's program takes, with the sizes of the example.

    The prices are those of the search for placements. FLOPs are what torch's counter says of the rank's own shapes.

    Args:
        records: the manifest's record of each collective, by node.
    """
    objective, kernels = Objective.of(machine), find_kernels(exported.graph)
    compute, sent, uncounted = dict[fx.Node, float](), dict[fx.Node, float](), Counter[str]()
    for node in edit.calls(exported.graph):
        if node.name in records:
            record = records[node.name]
            sent[node] = machine.collective_seconds(
                record["kind"], record["axis"].split("."), record["wire_bytes"], mesh
            )
        elif node in kernels:
            if (flops := _flops(node)) is None:
                uncounted[op_name(node)] += 1
            values = [*(operand.meta["val"] for operand in edit.operands(node)), *edit.outputs(node)]
            moved = moved_bytes(kernels[node], [(v, Sharding.replicated(v.ndim)) for v in values], mesh)
            rule = rule_of(node) if edit.outputs(node) else None
            work = Work(flops or 0, local_work(node, rule, Option(), mesh).rows)
            compute[node] = objective.floor_seconds(kernels[node]) + objective.work_seconds(work, moved)
    chain = _longest_chain(exported.graph, compute | sent)
    steps = (
        Step(node.name, edit.module_path(node), compute.get(node, 0.0), sent.get(node, 0.0), node in chain)
        for node in exported.graph.nodes
        if compute.get(node, 0.0) or node in sent
    )
    return Times(tuple(steps), tuple(node.name for node in chain), uncounted)


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
