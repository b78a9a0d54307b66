"""Estimates of a solution before a rank's program exists: the memory of a rank, and the time of a call."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx

from tpcompiler.cost.amounts import STATE_BYTES
from tpcompiler.cost.fusion import PARTS, Kernel, find_kernels, part_of
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, local_bytes, local_work
from tpcompiler.cost.path import FREE, Step, steps_between
from tpcompiler.cost.peak import ValueSizes, find_peak, is_view, written_in_place
from tpcompiler.cost.timeline import StepTime
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.program import PlannedProgram, pin, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.solution import Solution
from tpcompiler.terminal.printed import format_bytes


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        caches: buffers that are written.
        activations: at the peak, which is at the op `at`; inputs count too. What the backward needs of the forward is
            among them; gradients of parameters are not.
        floats: of the leaves that have a price in the search.
        largest: the leaves that take most, with their bytes.
        gradients: of parameters, from call to call, as gradients that add up are held.
        state: of the optimizer of these parameters.
        optimizer: its name.
    """

    weights: int
    caches: int
    activations: int
    at: str
    floats: int
    largest: tuple[tuple[str, int], ...]
    gradients: int = 0
    state: int = 0
    optimizer: str = ""

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.gradients + self.state + self.activations

    @property
    def text(self) -> str:
        more = f"gradients {format_bytes(self.gradients)}, " if self.gradients else ""
        more += f"state of {self.optimizer} {format_bytes(self.state)}, " if self.state else ""
        return (
            f"{format_bytes(self.total)}: weights {format_bytes(self.weights)}, caches {format_bytes(self.caches)}, "
            f"{more}activations {format_bytes(self.activations)} at the peak ('{self.at}')"
        )


def measure_memory(found: Solution, rank: int = 0) -> Memory:
    """Estimate the memory of programs that share their leaves and run one at a time, by default on the first rank."""
    held = measure_leaves(found, rank)
    written = {fqn for program in found.programs for _, fqn in program.written()}
    peaks = [_find_peak(program, found, rank) for program in found.programs]
    caches = sum(count for fqn, count in held.items() if fqn in written)
    largest = sorted(held.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
    counted = measure_priced(found, rank)
    weights = sum(held.values()) - caches
    gradients, state = _measure_gradients(found, held)
    return Memory(weights, caches, *max(peaks), counted, tuple(largest), gradients, state, found.optimizer)


def measure_state(found: Solution) -> int:
    """Return the bytes of the optimizer's state."""
    return _measure_gradients(found, measure_leaves(found))[1]


def _measure_gradients(found: Solution, held: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes of gradients, and of the optimizer's state for their parameters."""
    graded = {name for program in found.programs for _, name in program.gradients()} & held.keys()
    sizes = {fqn: edit.fake(node).element_size() for program in found.programs for node, fqn in program.leaves()}
    elements = sum(held[fqn] // sizes[fqn] for fqn in graded)
    return sum(held[fqn] for fqn in graded), elements * STATE_BYTES[found.optimizer]


def measure_leaves(found: Solution, rank: int = 0) -> dict[str, int]:
    """Return the bytes of each leaf on a rank, the first of which holds most; of tied leaves, the first has them."""
    held: dict[str, int] = {}
    for program in found.programs:
        first_of = tied(program)
        for node, fqn in program.leaves():
            if first_of[node.name] == node.name:
                held[fqn] = local_bytes(edit.fake(node), program.at_rest(node, found.leaves[node]), program.mesh, rank)
    return held


def measure_priced(found: Solution, rank: int = 0) -> int:
    """Return the bytes on a rank of the leaves whose bytes have a price in the search: those of floats."""
    leaves = (leaf for program in found.programs for leaf in program.leaves())
    floats = {fqn for node, fqn in leaves if edit.fake(node).is_floating_point()}
    return sum(count for fqn, count in measure_leaves(found, rank).items() if fqn in floats)


def _find_peak(program: PlannedProgram, found: Solution, rank: int) -> tuple[int, str]:
    """The most bytes of activations and inputs at once, and at which op. Inputs are the caller's; a view holds
    what it is a view of, and a buffer that is written in place is no activation."""
    leaves, in_place = {node for node, _ in program.leaves()}, set(written_in_place(program))
    graded = _made_as_gradients(program)
    owner: dict[fx.Node, fx.Node] = {}
    size: dict[fx.Node, int] = {}
    gathered: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node in leaves or not edit.outputs(node):
            continue
        gathered[node] = _gathered_bytes(found, node, program, rank)
        if is_view(node) and not gathered[node] and (source := node.all_input_nodes[0]) in owner:
            owner[node] = owner[source]
            continue
        values, settled = edit.outputs(node), found.settled.get(node)
        owner[node] = node
        parts = [
            0
            if node in in_place
            else max(
                local_bytes(value, each, program.mesh, rank) for each in ([own] if settled is None else [own, settled])
            )
            for value, own in zip(values, found.made(node), strict=True)
        ]
        reduced = sum(count for at, count in enumerate(parts) if (node, at) in graded)
        size[node], gathered[node] = sum(parts) - reduced, gathered[node] + reduced
    besides = {node: own for node, own in gathered.items() if node.target is not pin}  # a pin's is its result
    most, at = find_peak(list(program.graph.nodes), ValueSizes(size, owner), besides)
    while most and at.target is pin:  # which the pass `place` takes away
        (at,) = edit.operands(at)
    return most, at.name if most else ""


def _made_as_gradients(program: PlannedProgram) -> set[tuple[fx.Node, int]]:
    """Return the results of ops that are gradients of parameters, perhaps by views of them: (op, which of its results).

    `Memory.gradients` has what a rank keeps of them; they are whole only until they are reduced.
    """
    parameters, values = {fqn for _, fqn in program.leaves()}, program.output.args[0]
    made = set[tuple[fx.Node, int]]()
    for position, name in program.gradients():
        value: Any = values[position]  # type: ignore[index]
        while name in parameters and value.target is not operator.getitem and is_view(value):
            value = value.args[0]
        if name in parameters and value.op == "call_function":
            made.add(edit.producer(value))
    return made


def _gathered_bytes(found: Solution, node: fx.Node, program: PlannedProgram, rank: int) -> int:
    """Return the bytes of operands that are gathered for this op only."""
    total = 0
    if node in found.choices:
        for operand, want in zip(edit.operands(node), found.choices[node].wants, strict=True):
            seen = program.at_rest(operand, found.seen(operand))
            if seen != want:
                held, wanted = (local_bytes(edit.fake(operand), each, found.mesh, rank) for each in (seen, want))
                total += wanted if wanted > held else 0
    return total


Sent = tuple[str, tuple[str, ...], int]  # kind, axes, wire bytes of a rank


def measure_step_time(found: Solution, machine: Machine) -> StepTime:
    """Predict a call: kernels and collectives one after the other, each as the search prices it."""
    objective, kernels = Objective.of(machine), dict(_kernels_of(found, machine))
    work, floors = dict.fromkeys(PARTS, 0.0), sum(map(objective.floor_seconds, kernels.values()))
    for node, seconds in seconds_of_ops(found, machine):
        work[part_of(node, kernels[node])] += seconds
    for value, steps in changes_of(found):
        work["copies"] += objective.copy_seconds(steps, edit.fake(value), found.mesh)
    sent = [machine.collective_seconds(kind, axes, count, found.mesh) for kind, axes, count in sent_by(found)]
    host = len(kernels) * machine.host.operation + len(sent) * machine.host.collective
    return StepTime.of(work, floors, sum(sent), host)


def seconds_of_ops(found: Solution, machine: Machine) -> Iterator[tuple[fx.Node, float]]:
    """Yield the seconds of each op of the programs, without floors."""
    objective = Objective.of(machine)
    for node, kernel in _kernels_of(found, machine):
        if (choice := found.choices.get(node)) is not None:
            tensors = [*(edit.fake(operand) for operand in edit.operands(node)), *edit.outputs(node)]
            values = list(zip(tensors, (*choice.wants, *choice.made), strict=True))
            own = local_work(node, choice.rule, choice.option, found.mesh)
            yield node, objective.work_seconds(kernel, own, values, found.mesh)


def _kernels_of(found: Solution, machine: Machine) -> Iterator[tuple[fx.Node, Kernel]]:
    """Yield each op with its part in a kernel, as the search found it if its machine fuses as this one does."""
    for program in found.programs:
        known = found.kernels.get(program.graph) if machine.fuses == found.machine.fuses else None
        yield from (find_kernels(program.graph, machine.fuses) if known is None else known).items()


def sent_by(found: Solution) -> Iterator[Sent]:
    """The collectives that a solution needs: each value once for each sharding that it is turned into."""
    return (sent for _, sent in sends_of(found))


def sends_of(found: Solution) -> Iterator[tuple[fx.Node, Sent]]:
    """Yield the collectives, each with the value that it changes."""
    for value, steps in changes_of(found):
        for step in steps:
            if step.kind not in FREE:
                yield value, (step.kind, step.axes, step.wire_bytes)


def changes_of(found: Solution) -> Iterator[tuple[fx.Node, tuple[Step, ...]]]:
    """The steps of each change of sharding that a solution needs."""
    for program in found.programs:
        changes: dict[tuple[fx.Node, Sharding, Sharding, bool], None] = {}  # a leaf at rest is gathered twice
        for node in edit.calls(program.graph):
            wants = found.choices[node].wants if node in found.choices else ()
            for operand, want in zip(edit.operands(node), wants, strict=False):
                have = program.at_rest(operand, found.seen(operand))
                changes[operand, have, want, operand.name in program.resting and is_backward(node)] = None
        for value, settled in found.settled.items():
            if value.graph is program.graph:
                changes[value, found.sharding(value), settled, False] = None
        names = {fqn: node for node, fqn in program.leaves()} | {node.name: node for node in program.user_inputs()}
        for value, name in program.followers():
            leaf = names[name]
            changes[value, found.seen(value), program.at_rest(leaf, found.leaves[leaf]), False] = None
        for value, have, want, _ in changes:
            tensor = edit.fake(value)
            yield value, steps_between(have, want, tensor.shape, tensor.element_size(), found.mesh, found.machine)
