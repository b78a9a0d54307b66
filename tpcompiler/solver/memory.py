"""Estimate the memory of the rank that holds most, while it runs a program as placed by the search."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from tpcompiler._torch import OpOverload
from tpcompiler.cost.objective import local_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.program import PlannedProgram, pin, tied
from tpcompiler.runtime.in_place import IN_PLACE
from tpcompiler.solver.solution import Solution
from tpcompiler.terminal.printed import format_bytes


class Memory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        caches: buffers that are written.
        activations: at the peak, which is at the op `at`; inputs count too.
        floats: of the leaves that have a price in the search.
        largest: the leaves that take most, with their bytes.
    """

    weights: int
    caches: int
    activations: int
    at: str
    floats: int
    largest: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.activations

    @property
    def text(self) -> str:
        return (
            f"{format_bytes(self.total)}: weights {format_bytes(self.weights)}, caches {format_bytes(self.caches)}, "
            f"activations {format_bytes(self.activations)} at the peak ('{self.at}')"
        )


def measure_memory(found: Solution) -> Memory:
    """Estimate the memory of programs that share their leaves and run one at a time."""
    held: dict[str, int] = {}
    floats: set[str] = set()
    written: set[str] = set()
    peaks = []
    for program in found.programs:
        first_of, names = tied(program), {node.name: fqn for node, fqn in program.leaves()}
        written |= {fqn for _, fqn in program.written()}
        for node, fqn in program.leaves():
            if first_of[node.name] == node.name:
                held[fqn] = local_bytes(edit.fake(node), found.leaves[node], program.mesh)
                floats |= {fqn} if edit.fake(node).is_floating_point() else set()
        peaks.append(_find_peak(program, found, set(names)))
    caches = sum(count for fqn, count in held.items() if fqn in written)
    largest = sorted(held.items(), key=lambda pair: (-pair[1], pair[0]))[:3]
    counted = sum(held[fqn] for fqn in floats)
    return Memory(sum(held.values()) - caches, caches, *max(peaks), counted, tuple(largest))


def _find_peak(program: PlannedProgram, found: Solution, leaves: set[str]) -> tuple[int, str]:
    """The most bytes of activations and inputs at once, and at which op. Inputs are the caller's; a view holds
    what it is a view of, and a buffer that is written in place is no activation."""
    in_place = set(_written_in_place(program))
    owner: dict[fx.Node, fx.Node] = {}
    size: dict[fx.Node, int] = {}
    gathered: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(program.graph.nodes):
        for operand in node.all_input_nodes:
            if operand in owner:
                last[owner[operand]] = max(last[owner[operand]], at)
        if node.name in leaves or not edit.outputs(node):
            continue
        gathered[node] = _gathered_bytes(found, node)
        is_view = node.op == "call_function" and _is_view(node) and not gathered[node]
        if is_view and (source := node.all_input_nodes[0]) in owner:
            owner[node] = owner[source]
            continue
        owner[node], last[node] = node, len(program.graph.nodes) if node.op == "placeholder" else at
        values, settled = edit.outputs(node), found.settled.get(node)
        size[node] = sum(
            0
            if node in in_place
            else max(local_bytes(value, each, program.mesh) for each in ([own] if settled is None else [own, settled]))
            for value, own in zip(values, found.made(node), strict=True)
        )
    now, most = 0, (0, "")
    ends: dict[int, list[fx.Node]] = {}
    for node, at in last.items():
        ends.setdefault(at, []).append(node)
    for at, node in enumerate(program.graph.nodes):
        now += size.get(node, 0)
        beside = gathered.get(node, 0) if node.target is not pin else 0  # what a pin gathers is its result
        most = max(most, (now + beside, node.name), key=lambda pair: pair[0])
        now -= sum(size[ended] for ended in ends.get(at, ()))
    return most


def _written_in_place(program: PlannedProgram) -> Iterator[fx.Node]:
    """The values that `load` writes into the buffer that they are made of (`runtime/in_place.py`)."""
    names = {fqn: node for node, fqn in program.leaves()}
    for value, fqn in program.written():
        buffer = names.get(fqn)
        if value.target in IN_PLACE and value.args[0] is buffer and buffer is not None and len(buffer.users) == 1:
            yield value


def _gathered_bytes(found: Solution, node: fx.Node) -> int:
    """Return the bytes of operands that are gathered for this op only."""
    total = 0
    if node in found.choices:
        for operand, want in zip(edit.operands(node), found.choices[node].wants, strict=True):
            held, wanted = (local_bytes(edit.fake(operand), each, found.mesh) for each in (found.seen(operand), want))
            total += wanted if wanted > held else 0
    return total


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    return target in (operator.getitem, pin) or (isinstance(target, OpOverload) and target.is_view)
