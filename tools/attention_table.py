"""Write the table of methods in docs/long-context.md: what attention over a cut sequence sends and takes by each.

`python -m tools.attention_table` takes a minute.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import export

from tpcompiler._torch import FakeTensorMode
from tpcompiler.api import conversions_of, read_plan
from tpcompiler.cost.kernels import is_attention
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import duration
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.split_axis import on_split_axis
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.pipeline import find_placements, plan_program
from tpcompiler.solver.problem import Problem
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.step_time import collectives_of, measure_step_time
from tpcompiler.solver.task import Aim, Held, Task
from tpcompiler.terminal.printed import format_bytes

PAGE = Path(__file__).parent.parent / "docs" / "long-context.md"
HEADER = "| tokens | heads | ranks | gather | all_to_all | both | turns |\n|---|---|---|---|---|---|---|\n"
STEPS, HEADS, FEATURES = (8, 32, 128), (8, 16, 64), 128  # thousands of tokens (1,024 each)
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "4": ("h100", {"cp": 4}),
    "8": ("h100", {"cp": 8}),
    "16": ("h100", {"cp": 16}),
    "2 x 8": ("h100-2x8", {"cp": 2, "tp": 8}),
}
STEPS_DIM, HEADS_DIM = 2, 1


class Cost(NamedTuple):
    """The bytes that a rank sends in a call, and its predicted seconds."""

    wire_bytes: int
    seconds: float

    @classmethod
    def of(cls, found: Solution, machine: Machine) -> Cost:
        sent = sum(count for *_, count in collectives_of(found))
        return cls(sent, measure_step_time(found, machine).total)

    @property
    def text(self) -> str:
        return f"{format_bytes(self.wire_bytes)}, {duration(self.seconds)}"


class Attention(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Layer(nn.Module):
    """Attention of a layer, by a name that a style can have."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.attention(q, k, v)


def conversion_of(thousands: int, heads: int, mesh: Mapping[str, int]) -> Conversion:
    """Return attention in bfloat16 with the sequence of inputs and output cut over every axis."""
    with FakeTensorMode():
        qkv = tuple(torch.empty(1, heads, thousands * 1024, FEATURES, dtype=torch.bfloat16) for _ in range(3))
    cut = dict.fromkeys(mesh, f"S({STEPS_DIM})")
    return next(iter(conversions_of(export(Layer(), qkv), mesh, read_plan("auto"), [cut] * 3, [cut]).values()))


def costs(own: Conversion, heads: int, machine: Machine) -> Iterator[tuple[str, Cost]]:
    """Yield each method that the sizes allow, with its cost."""
    planned, axes, objective = plan_program(own, own.plan), own.mesh.names, Objective.of(machine)
    ways = {"gather": dict.fromkeys(axes, STEPS_DIM), "all_to_all": dict.fromkeys(axes, HEADS_DIM)}
    both = planned
    if len(axes) == 1 and heads < own.mesh.world_size:  # as many ranks as heads, next to each other
        both = on_split_axis(planned, *axes, own.mesh.world_size // heads)
        axes = both.mesh.names
    if len(axes) == 2:
        ways["both"] = dict(zip(axes, (STEPS_DIM, HEADS_DIM), strict=True))
    with no_new_guards(planned.graph, both.graph):
        for method, dims in ways.items():
            task = Task([both if method == "both" else planned], objective, model=tuple(dims)[-1:])
            found = search(task_held(task, dims))
            yield method, Cost.of(found, machine)
        turns = own.with_styles({"attention": "attend_in_turns"})
        yield "turns", Cost.of(search(Task([plan_program(turns, turns.plan)], objective)), machine)


def task_held(task: Task, dims: Mapping[str, int]) -> Task:
    """Return the task with attention cut along one dim over each axis, all axes at once."""

    def held(problem: Problem) -> Iterator[tuple[int, list[bool]]]:
        for node, variable in problem.variables.items():
            if is_attention(node):
                made = [choice.made[0] for choice in problem.choices[node].each]
                yield variable, [all(own.dims_cut_by(axis) == [dim] for axis, dim in dims.items()) for own in made]

    hold: Held = held
    return Task(task.programs, task.objective, model=task.model, held=hold, turns=(tuple(dims),))


def row(thousands: int, heads: int, ranks: str) -> tuple[dict[str, Cost], Cost]:
    """Return the cost of each method, and that of `auto`."""
    name, mesh = MESHES[ranks]
    machine, own = read_machine(name), conversion_of(thousands, heads, mesh)
    return dict(costs(own, heads, machine)), Cost.of(find_placements([own], Aim(machine)), machine)


def row_text(thousands: int, heads: int, ranks: str) -> str:
    """Return a line of the table; what `auto` takes is bold."""
    methods, auto = row(thousands, heads, ranks)
    cells = (
        "-" if (cost := methods.get(method)) is None else f"**{cost.text}**" if cost == auto else cost.text
        for method in ("gather", "all_to_all", "both", "turns")
    )
    return f"| {' | '.join((f'{thousands}k', str(heads), ranks, *cells))} |\n"


def table() -> str:
    return HEADER + "".join(itertools.starmap(row_text, itertools.product(STEPS, HEADS, MESHES)))


if __name__ == "__main__":
    text, rows = PAGE.read_text(encoding="utf-8"), re.escape(HEADER) + r"(\|.*\n)*"
    PAGE.write_text(re.sub(rows, lambda _: table(), text), encoding="utf-8")
