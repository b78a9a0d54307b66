"""Random small programs with a plan, a mesh and placements at the boundary, as a hypothesis strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, ExportedProgram, export

from tests.property.steps import KINDS, ROWS, Draw, Int8, Shape
from tpcompiler._torch import symbols_of

Spec = str | dict[str, str] | None
MESHES: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"dp": 2, "tp": 2},
    {"tp": 3},
    {"tp": 4},
    {"tp": [2, 1, 1]},
    {"dp": 2, "tp": [3, 1]},
)
USUAL = [
    "linear",
    "mlp",
    "attention",
    "embedding",
    "linear",
    "residual",
    "layer_norm",
    "unflatten",
    "transpose",
    "gated",
]
SMALL = 2048  # elements of a value
LARGE = 1e3  # magnitude of a value


@dataclass(frozen=True)
class Step:
    """One op: which values before it it takes, and its other arguments."""

    kind: str
    on: tuple[int, ...]
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join([*(f'v{i}' for i in self.on), *map(str, self.args)])})"


class Net(nn.Module):
    """Runs its steps one after the other, on two tensors of numbers and one of row ids."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.returned: tuple[int, ...] = ()

    def add(self, step: Step, shape: Shape) -> None:
        """Append a step that takes a first operand of this shape, with random weights."""
        make = KINDS[step.kind].own
        if make is not None:
            made = make(shape, *step.args)
            own = made if isinstance(made, nn.Module) else nn.Parameter(made)
            with torch.no_grad():
                for parameter in own.parameters() if isinstance(own, nn.Module) else ():
                    parameter.add_(0.2 * torch.randn_like(parameter))  # a bias of zeros is seen by nobody
            setattr(self, f"{step.kind}{len(self.steps)}", own)
        self.steps.append(step)

    def drop(self) -> None:
        """Take the last step back."""
        step = self.steps.pop()
        if KINDS[step.kind].own is not None:
            delattr(self, f"{step.kind}{len(self.steps)}")

    def forward(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> Any:
        values = [x, y]
        for at in range(len(self.steps)):
            values.append(self.run(at, values, ids))
        return tuple(values[i] for i in self.returned)

    def run(self, at: int, values: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        step = self.steps[at]
        kind = KINDS[step.kind]
        given: list[Any] = [ids] if kind.takes == "ids" else [values[i] for i in step.on]
        own = [] if kind.own is None else [getattr(self, f"{step.kind}{at}")]
        return kind.run(*given, *own, *step.args)


@dataclass(frozen=True)
class Case:
    """A program and how it is to be cut.

    `dynamic`: the leading dims of every input whose sizes are free. `dialect`: "training", "canonical" or "core" ATen.
    """

    net: Net
    args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dynamic: tuple[int, ...]
    dialect: str
    mesh: dict[str, Any]
    plan: dict[str, Any]
    inputs: list[Spec]
    outputs: list[Spec]
    strange: tuple[str, ...] = ()  # where NaN and infinities are

    def exported(self) -> ExportedProgram:
        free: Any = dict.fromkeys(self.dynamic, Dim.AUTO)
        program = export(self.net, self.args, dynamic_shapes=(free, free, free) if free else None)
        if self.dialect == "training":
            return program
        return program.run_decompositions(*([{}] if self.dialect == "canonical" else []))

    def __str__(self) -> str:
        x, y, ids = (list(a.shape) for a in self.args)
        steps = "\n".join(f"  v{i + 2} = {step}" for i, step in enumerate(self.net.steps))
        return (
            f"v0 {x}, v1 {y}, ids {ids}, dynamic {list(self.dynamic)}, {self.dialect}\n{steps}\n"
            f"  return {', '.join(f'v{i}' for i in self.net.returned)}\n"
            f"  mesh {self.mesh}, plan {self.plan}\n  inputs {self.inputs}, outputs {self.outputs}"
            f"{', '.join(['', *self.strange])}"
        )


@st.composite
def cases(draw: Draw, most: int) -> Case:
    """A program of three to `most` steps; every value that no step takes is returned."""
    torch.manual_seed(0)
    net = Net()
    lead = tuple(draw(st.lists(st.sampled_from([2, 4, 3, 5, 1, 8, 7, 12]), min_size=1, max_size=3)))
    width = draw(st.sampled_from([4, 8, 6, 5, 12, 3, 7]))
    args = (torch.randn(*lead, width), torch.randn(*lead, width), torch.randint(ROWS, lead))
    values = list(args[:2])
    for number in range(draw(st.integers(3, most))):
        kinds = USUAL if number == 0 or draw(st.integers(0, 4)) == 4 else list(KINDS)
        _grow(draw, net, values, args[2], draw(st.sampled_from(kinds)))
    used = {i for step in net.steps for i in step.on}
    ends = [i for i in range(2, len(values)) if i not in used] or [0]
    also = draw(st.lists(st.integers(0, len(values) - 1), max_size=1))
    net.returned = tuple(dict.fromkeys([*ends, *also]))
    mesh = draw(st.sampled_from(MESHES))
    inputs = [_boundary(draw, value, mesh) for value in args]
    outputs = [_boundary(draw, values[i], mesh) for i in net.returned]
    free = draw(st.sampled_from([(), (), (0,), (1,), (0, 1)]))
    dynamic = tuple(dim for dim in free if dim < len(lead) and lead[dim] > 1)
    dialect = draw(st.sampled_from(["training", "training", "training", "canonical", "core"]))
    plan = _plan(draw, net, mesh)
    strange = _put_strange_numbers(draw, net, args) if draw(st.sampled_from([True, False, False, False])) else ()
    return Case(net, args, dynamic, dialect, mesh, plan, inputs, outputs, strange)


def _put_strange_numbers(draw: Draw, net: Net, args: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    """Write NaN or an infinity over one or two numbers; in weights NaN alone, for shares of a sum times an infinity may
    make NaN (docs/promises.md)."""
    named = [(name, value, True) for name, value in zip("xy", args, strict=False)]
    named += [(name, leaf.detach(), False) for name, leaf in (*net.named_parameters(), *net.named_buffers())]
    named = [each for each in named if each[1].is_floating_point() and each[1].numel()]
    put = []
    for _ in range(draw(st.integers(1, 2))):
        name, value, is_input = draw(st.sampled_from(named[:2] if draw(st.booleans()) else named))
        number = draw(st.sampled_from([math.nan, math.inf, -math.inf] if is_input else [math.nan]))
        at = draw(st.integers(0, value.numel() - 1))
        value.view(-1)[at] = number
        put.append(f"{number} at {at} of {name}")
    return tuple(put)


def _grow(draw: Draw, net: Net, values: list[torch.Tensor], ids: torch.Tensor, name: str) -> None:
    """Append a step of this kind where it can be, and its value."""
    kind = KINDS[name]
    first = len(values) - 1 if draw(st.booleans()) else draw(st.integers(0, len(values) - 1))
    shape = tuple(values[first].shape)
    if kind.takes != "ids" and (len(shape) < kind.ndim or 0 in shape):
        return
    fits = PARTNERS.get(kind.takes)
    others = [i for i, value in enumerate(values) if fits is not None and fits(shape, tuple(value.shape))]
    if fits is not None and not others:
        return
    args = kind.args(draw, shape)
    if args is None:
        return
    on = () if kind.takes == "ids" else (first, draw(st.sampled_from(others))) if others else (first,)
    net.add(Step(name, on, args), shape)
    with torch.no_grad():
        try:
            made = net.run(len(net.steps) - 1, values, ids).clone()
        except (RuntimeError, IndexError, ValueError):  # torch itself does not run this op on this shape
            net.drop()
            return
    if not 0 < made.numel() <= SMALL or made.ndim > 5 or not made.abs().amax() < LARGE:
        net.drop()
        return
    values.append(made)


def _broadcasts(one: Shape, other: Shape) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def _fits_columns(one: Shape, other: Shape) -> bool:
    return len(other) == len(one) and other[-2] == one[-1] and _broadcasts(one[:-2], other[:-2])


PARTNERS: dict[str, Callable[[Shape, Shape], bool]] = {
    "same": lambda one, other: one == other,
    "broadcast": _broadcasts,
    "columns": _fits_columns,
}

STYLES = ("colwise", "rowwise", "colwise_gather_output", "replicate")


def _plan(draw: Draw, net: Net, mesh: dict[str, Any]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | Int8):
            usual = "rowwise" if name.endswith((".down", ".o")) else "colwise"
            style = draw(st.sampled_from([usual, usual, *STYLES, "", *_packed(net, name)]))
            if style:
                plan[name] = style
        elif name.startswith("shaped"):
            wanted = _over(draw, ["S(0)", "S(-1)", "R"], mesh)
            plan[name] = {draw(st.sampled_from(["inputs", "outputs"])): [wanted]}
    leaves = [*net.named_parameters(), *net.named_buffers()]
    for name, leaf in leaves:
        if leaf.ndim and leaf.is_floating_point() and ("." not in name or draw(st.integers(0, 3)) == 3):
            if draw(st.booleans()):
                plan[name] = _over(draw, ["R", *(f"S({d})" for d in range(leaf.ndim))], mesh)
    return plan


def _packed(net: Net, layer: str) -> list[str]:
    """Styles of a layer whose result is taken apart."""
    made = 2 + next((at for at, step in enumerate(net.steps) if layer == f"{step.kind}{at}"), len(net.steps))
    return ["packed_colwise"] * any(made in step.on and step.kind in ("gated", "half", "turned") for step in net.steps)


def _over(draw: Draw, possible: list[str], mesh: dict[str, Any]) -> Any:
    """One of these placements; of a mesh of several axes one for each or for some."""
    if len(mesh) == 1:
        return draw(st.sampled_from(possible))
    axes = [axis for axis in mesh if draw(st.booleans())] or [draw(st.sampled_from(list(mesh)))]
    return {axis: draw(st.sampled_from(possible)) for axis in axes}


def _boundary(draw: Draw, value: torch.Tensor, mesh: dict[str, Any]) -> Spec:
    possible = ["R", "R", *(f"S({d})" for d in range(value.ndim))]
    if value.is_floating_point():
        possible.append("P(sum)")
    return _over(draw, possible, mesh)


def resized(program: ExportedProgram, args: tuple[torch.Tensor, ...], size: int) -> tuple[torch.Tensor, ...] | None:
    """Inputs with every free size made `size`; None where the program has no free sizes or takes none such."""
    taken = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][-len(args) :]
    symbols = symbols_of(size for value in taken for size in value.shape)
    if not symbols:
        return None
    bounds = program.range_constraints
    if any(s in bounds and not bounds[s].lower <= size <= bounds[s].upper for s in symbols):
        return None
    chosen = dict.fromkeys(symbols, size)
    torch.manual_seed(1)
    made = []
    for value, given in zip(taken, args, strict=True):
        shape = [s if isinstance(s, int) else int(s.node.expr.subs(chosen)) for s in value.shape]
        made.append(torch.randn(shape) if given.is_floating_point() else torch.randint(ROWS, shape))
    return tuple(made)
