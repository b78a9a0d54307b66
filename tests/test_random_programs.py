"""Random small programs under random plans: all ranks together are equal to the single device, or are refused politely.

A program counts only if an op ran sharded and a reshard was executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tpcompiler.ir import edit
from tpcompiler.ir.program import MARK, Mark, reshard
from tpcompiler.ir.text import op_name

pytestmark = pytest.mark.slow

Shape = tuple[int, ...]
REFUSALS = (tpcompiler.PlanError, tpcompiler.ShardingError, tpcompiler.UnsupportedError)
ROWS = 11  # of an embedding: over 2 to 4 ranks never even


@dataclass(frozen=True)
class Step:
    """One op: which earlier values it takes, and its other arguments."""

    kind: str
    on: tuple[int, ...]
    args: tuple[Any, ...] = ()


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention over [b, s, width]; every `groups` query heads share a key and value head."""

    def __init__(self, width: int, heads: int, groups: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        self.q = nn.Linear(width, heads * 3)
        self.k = nn.Linear(width, heads // groups * 3, bias=False)
        self.v = nn.Linear(width, heads // groups * 3)
        self.o = nn.Linear(heads * 3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], -1, 3).transpose(1, 2) for f in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups > 1)
        return x + self.o(made.transpose(1, 2).reshape(*x.shape[:2], -1))


class Net(nn.Module):
    """Runs its steps one after the other; steps 0 and 1 are the inputs, a tensor of numbers and one of row ids."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.returned: tuple[int, ...] = ()

    def add(self, step: Step, shape: Shape) -> None:
        """Append a step that takes a first operand of this shape, with random parameters."""
        at = len(self.steps)
        if step.kind in LAYERS:
            setattr(self, f"{step.kind}{at}", LAYERS[step.kind](shape[-1], *step.args))
        elif step.kind in ("bias", "scale"):
            setattr(self, f"{step.kind}{at}", nn.Parameter(torch.randn(shape[-step.args[0] :])))
        elif step.kind == "weight":
            setattr(self, f"weight{at}", nn.Parameter(torch.randn(shape[-1], step.args[0]) / shape[-1] ** 0.5))
        self.steps.append(step)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        values = [x]
        for at, step in enumerate(self.steps):
            values.append(self.run(at, step, [ids] if step.kind == "embedding" else [values[i] for i in step.on]))
        return tuple(values[i] for i in self.returned)

    def run(self, at: int, step: Step, given: list[torch.Tensor]) -> torch.Tensor:
        own = getattr(self, f"{step.kind}{at}", None)
        if step.kind in LAYERS:
            return own(*given)
        return FUNCTIONS[step.kind](*given, *([] if own is None else [own]), *step.args)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": nn.Linear,
    "embedding": lambda _, width: nn.Embedding(ROWS, width),
    "layer_norm": nn.LayerNorm,
    "mlp": Mlp,
    "attention": Attention,
}

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "bias": lambda a, b, _: a + b,
    "scale": lambda a, b, _: a * b,
    "weight": lambda a, b, _: a @ b,
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "double": lambda x: x + x,
    "add": torch.add,
    "mul": lambda a, b: torch.tanh(a) * b,
    "gram": lambda a: torch.tanh(a) @ a.transpose(-1, -2),
    "bmm": lambda a, b: a @ b.transpose(-1, -2),
    "softmax": torch.softmax,
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "cat": lambda a, b, dim: torch.cat([a, b], dim),
    "halves": lambda a, dim: torch.chunk(a, 2, dim)[1],
    "parts": lambda a, dim, size: torch.split(a, size, dim)[0] * 2,
    "slice": lambda a, dim, start: a.narrow(dim, start, a.shape[dim] - start),
    "select": lambda a, dim, index: a.select(dim, index),
    "transpose": lambda a, i, j: a.transpose(i, j),
    "permute": lambda a, order: a.permute(order),
    "view": lambda a, shape: a.reshape(shape),
    "unsqueeze": lambda a, dim: a.unsqueeze(dim),
    "squeeze": lambda a, dim: a.squeeze(dim),
    "grow": lambda a, n: a.unsqueeze(0).expand(n, *a.shape) + 1,
}


def _dim(draw: st.DrawFn, shape: Shape) -> int:
    return draw(st.integers(-len(shape), len(shape) - 1))


def _args(draw: st.DrawFn, kind: str, shape: Shape) -> tuple[Any, ...] | None:
    """The other arguments of a step on a value of this shape; None where the step cannot be."""
    ndim = len(shape)
    width = st.sampled_from([4, 5, 6, 8])
    if kind == "embedding":
        return (draw(width),)
    if kind in ("linear", "weight"):
        return (draw(width), draw(st.booleans())) if kind == "linear" else (draw(width),)
    if ndim == 0:
        return () if kind in ("relu", "gelu", "tanh", "double", "add", "mul") else None
    if kind in ("bias", "scale"):
        return (draw(st.integers(1, ndim)),)
    if kind in ("sum", "mean", "amax"):
        return _dim(draw, shape), draw(st.booleans())
    if kind in ("softmax", "unsqueeze"):
        return (_dim(draw, shape),)
    if kind == "halves":
        return (draw(st.sampled_from([d for d in range(ndim) if shape[d] > 1] or [0])),) if max(shape) > 1 else None
    if kind == "squeeze":
        return (_dim(draw, shape),)
    if kind == "cat":
        return (_dim(draw, shape),)
    if kind == "parts":
        return _dim(draw, shape), draw(st.integers(1, 4))
    if kind in ("slice", "select"):
        dim = _dim(draw, shape)
        return dim, draw(st.integers(0, shape[dim] - 1))
    if kind == "transpose":
        return _dim(draw, shape), _dim(draw, shape)
    if kind == "permute":
        return (tuple(draw(st.permutations(range(ndim)))),)
    if kind == "view":
        return (_reshaped(draw, shape),)
    if kind == "grow":
        return (draw(st.integers(2, 4)),)
    if kind == "attention":
        heads, groups = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (4, 4)]))
        return (heads, groups, draw(st.booleans())) if ndim == 3 else None
    if kind == "mlp":
        return (draw(st.sampled_from([6, 8, 9])),)
    return ()


def _reshaped(draw: st.DrawFn, shape: Shape) -> Shape:
    """Two neighbours merged, or one dim split."""
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()) and dim + 1 < len(shape):
        return (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    factor = draw(st.sampled_from([f for f in range(1, shape[dim] + 1) if shape[dim] % f == 0]))
    return (*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :])


def _partner(draw: st.DrawFn, kind: str, shapes: list[Shape], first: int) -> tuple[int, ...] | None:
    """The second operand of kinds that take two."""
    if kind in ("add", "mul", "cat", "bmm"):
        return (first, draw(st.sampled_from([i for i, s in enumerate(shapes) if s == shapes[first]])))
    return (first,)


KINDS = (*LAYERS, "linear", "mlp", "attention", "attention", "view", *FUNCTIONS)
SLICING = ("halves", "parts", "slice", "select")  # of a dynamic dim: sizes that depend on each other
PAIRED = ("gram", "bmm", "linear", "weight", "layer_norm", "mlp")


@dataclass(frozen=True)
class Case:
    """`wishes` pick among the placements that the tensors at the boundary can have: inputs, then outputs."""

    net: Net
    args: tuple[torch.Tensor, torch.Tensor]
    dynamic: bool  # the leading dim of both inputs
    world: int
    plan: dict[str, str]
    wishes: tuple[int, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {i + 1}: {s.kind}{s.on} {s.args or ''}" for i, s in enumerate(self.net.steps))
        return (
            f"{[tuple(a.shape) for a in self.args]} dynamic {self.dynamic}\n{steps}\n  return {self.net.returned}\n"
            f"  world {self.world}, plan {self.plan}"
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(0)
    net = Net()
    lead = tuple(draw(st.lists(st.integers(2, 5), min_size=draw(st.integers(1, 2)), max_size=2)))
    x = torch.randn(*lead, draw(st.sampled_from([4, 5, 6, 8])))
    ids = torch.randint(ROWS, lead)
    values = [x]
    for _ in range(draw(st.integers(3, 8))):
        kind = draw(st.sampled_from(KINDS))
        first = len(values) - 1 if draw(st.booleans()) else draw(st.integers(0, len(values) - 1))
        shape = tuple(values[first].shape)
        args = _args(draw, kind, shape)
        fits = args is not None and (len(shape) > 1 or kind not in PAIRED)
        if not fits:
            continue
        on = _partner(draw, kind, [tuple(v.shape) for v in values], first)
        step = Step(kind, on, args)
        net.add(step, shape)
        with torch.no_grad():
            made = net.run(len(net.steps) - 1, step, [ids] if kind == "embedding" else [values[i] for i in on])
        if made.numel() > 4096 or made.ndim > 5:
            net.steps.pop()
            continue
        values.append(made)
    used = {i for step in net.steps for i in step.on if step.kind != "embedding"}
    net.returned = tuple(i for i in range(len(values)) if i not in used)
    wishes = tuple(draw(st.integers(0, 6)) for _ in range(2 + len(net.returned)))
    dynamic = draw(st.booleans()) and not any(step.kind in SLICING for step in net.steps)
    return Case(net, (x, ids), dynamic, draw(st.integers(2, 4)), _plan(draw, net), wishes)


def _plan(draw: st.DrawFn, net: Net) -> dict[str, str]:
    plan = {}
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            usual = "rowwise" if name.endswith((".down", ".o")) else "colwise"
            style = draw(
                st.sampled_from([usual, usual, "colwise", "rowwise", "colwise_gather_output", "replicate", ""])
            )
            if style:
                plan[name] = style
    for name, parameter in net.named_parameters():
        if "." not in name and draw(st.booleans()):
            plan[name] = draw(st.sampled_from(["R", *(f"S({d})" for d in range(parameter.ndim))]))
    return plan


def _placements(values: list[torch.Tensor], wishes: tuple[int, ...]) -> list[str]:
    """A placement for each value, cutting static dims only."""
    chosen = []
    for value, wish in zip(values, wishes, strict=True):
        possible = [f"S({d})" for d, size in enumerate(value.shape) if isinstance(size, int)]
        possible += ["R"] + ["P(sum)"] * value.is_floating_point()
        chosen.append(possible[wish % len(possible)])
    return chosen


@dataclass
class Tally:
    """What the programs were."""

    counted: int = 0
    unsharded: int = 0
    dynamic: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    sharded_ops: Counter[str] = field(default_factory=Counter)
    worlds: Counter[int] = field(default_factory=Counter)

    def run(self, case: Case) -> None:
        shapes = ({0: Dim.AUTO}, {0: Dim.AUTO}) if case.dynamic else None
        program = export(case.net, case.args, dynamic_shapes=shapes)
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        inputs = _placements([values[name] for name in program.graph_signature.user_inputs], case.wishes[:2])
        outputs = _placements([values[name] for name in program.graph_signature.user_outputs], case.wishes[2:])
        note(f"{case}, inputs {inputs}, outputs {outputs}")
        try:
            made = tpcompiler.parallelize(program, case.world, case.plan, inputs=inputs, outputs=outputs)
        except REFUSALS as refusal:
            self.refused[str(refusal).splitlines()[0]] += 1
            return
        report = made.verify(case.args)
        assert report.ok, str(report)
        calls = [node for node in edit.calls(made.resharded.graph) if MARK in node.meta]
        ran = {op_name(node) for node in calls if node.target is not reshard and _is_sharded(node.meta[MARK])}
        if ran and any(node.target is reshard for node in calls):
            self.counted += 1
            self.sharded_ops.update(ran)
            self.worlds[case.world] += 1
            self.dynamic += case.dynamic
        else:
            self.unsharded += 1

    def __str__(self) -> str:
        ops = ", ".join(f"{name} {n}" for name, n in self.sharded_ops.most_common())
        return (
            f"{self.counted} counted ({self.dynamic} dynamic, worlds {dict(sorted(self.worlds.items()))}), "
            f"{self.unsharded} ran unsharded, refused {dict(self.refused)}\nran sharded: {ops}"
        )


def _is_sharded(mark: Mark) -> bool:
    return any(not s.is_replicated for s in (*mark.wants, *mark.shardings))


def _run(examples: int) -> Tally:
    tally = Tally()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases())
    def run(case: Case) -> None:
        tally.run(case)

    run()
    print(tally)
    return tally


def test_random_programs() -> None:
    tally = _run(50)
    assert tally.counted >= 40
    assert tally.dynamic >= 5
    assert set(tally.worlds) == {2, 3, 4}
    assert len(tally.sharded_ops) >= 20
    assert sum(tally.refused.values()) <= 2


def test_many_random_programs() -> None:
    tally = _run(175)
    assert tally.counted >= 130
    assert len(tally.sharded_ops) >= 22
    assert sum(tally.refused.values()) <= 4
