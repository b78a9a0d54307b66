"""Time of one call on a machine as the search predicts it, before a rank's program exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from tpcompiler.cost.kernels import PARTS, find_kernels, part_of
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, local_work
from tpcompiler.cost.path import FREE, Step, steps_between
from tpcompiler.cost.timeline import StepTime
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.sharding import Sharding
from tpcompiler.solver.solution import Solution

Sent = tuple[str, tuple[str, ...], int]  # kind, axes, wire bytes of a rank


def measure_step_time(found: Solution, machine: Machine) -> StepTime:
    """Predict a call: kernels and collectives one after the other, each as the search prices it."""
    objective = Objective.of(machine)
    kernels = {
        node: kernel
        for program in found.programs
        for node, kernel in find_kernels(program.graph, machine.fuses).items()
    }
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
    for program in found.programs:
        for node, kernel in find_kernels(program.graph, machine.fuses).items():
            if (choice := found.choices.get(node)) is not None:
                tensors = [*(edit.fake(operand) for operand in edit.operands(node)), *edit.outputs(node)]
                values = list(zip(tensors, (*choice.wants, *choice.made), strict=True))
                own = local_work(node, choice.rule, choice.option, found.mesh)
                yield node, objective.work_seconds(kernel, own, values, found.mesh)


def sent_by(found: Solution) -> Iterator[Sent]:
    """The collectives that a solution needs: each value once for each sharding that it is turned into."""
    return (sent for _, sent in sends_of(found))


def sends_of(found: Solution) -> Iterator[tuple[fx.Node, Sent]]:
    """Yield the collectives, each with the value that it changes."""
    for value, steps in changes_of(found):
        for step in steps:
            if step.kind not in FREE:
                yield value, (step.kind, step.axes, step.wire_bytes)


def sends_around(found: Solution, calls: Iterable[fx.Node]) -> Iterator[Sent]:
    """Yield the collectives that change what some calls read, or what they make."""
    values = {value for call in calls for value in (*edit.operands(call), *(made for made, _ in edit.results(call)))}
    return (sent for value, sent in sends_of(found) if value in values)


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
