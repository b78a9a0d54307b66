"""Compare all ranks with the single-device program, at a tolerance that the program itself sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import FakeTensor, OpOverload, decomposed, tree_map
from tpcompiler.errors import InputsError, MeshError, ProgramError
from tpcompiler.ir import edit
from tpcompiler.ir.claims import read_claim
from tpcompiler.verify.simulate import RankResult, flatten_inputs, simulate

# A sum of the same terms in another order has a rounding error of the same size as the first order's. The error of
# one order is measured (float32 against float64); 8 allows for the spread of the maximum over a few outputs. A wrong
# shard or a missing reduction is off by about 1, five orders of magnitude above.
SPREAD = 8.0
FLOOR = 16.0  # units of machine epsilon: below this an order of summation cannot be told from another


@dataclass(frozen=True)
class Difference:
    """One output (or value written back): the largest difference over all ranks, absolute and relative.

    `rel` is `abs` over the largest magnitude of the reference; `noise` the same between the reference and its own
    run in float64.
    """

    name: str
    abs: float
    rel: float
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class VerifyReport:
    """The verdict. `first_diverging` names the first value, in the order of the program, that is wrong on some rank."""

    ok: bool
    max_abs_err: float
    max_rel_err: float
    outputs: list[Difference] = field(default_factory=list)
    first_diverging: str | None = None

    def __str__(self) -> str:
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: "
            f"max abs err {self.max_abs_err:.3g}, max rel err {self.max_rel_err:.3g}"
        ]
        for d in self.outputs:
            lines.append(f"  {'ok ' if d.ok else 'BAD'} {d.name}: rel err {d.rel:.3g} (tolerance {d.tolerance:.3g})")
        if self.first_diverging:
            lines.append(f"  first diverging value: {self.first_diverging}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Layout:
    """How tensors are laid out over the ranks, asked for by name.

    `cut(name, value, rank)` gives a rank's share of a global tensor; `join(name, parts, shape)` puts shares together.
    """

    cut: Callable[[str, torch.Tensor, int], torch.Tensor]
    join: Callable[[str, Sequence[torch.Tensor], torch.Size], list[torch.Tensor]]


def compare(
    reference: ExportedProgram,
    programs: Sequence[ExportedProgram],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layout: Layout,
    input_names: Sequence[str],
    output_names: Sequence[str],
    intermediate: ExportedProgram | None = None,
) -> VerifyReport:
    """Run the reference once, and once more in float64, and all ranks in lock step; compare every output on every rank.

    Outputs of the model and values written back to buffers and inputs are compared. Each output's tolerance is
    `SPREAD` times the reference's own float32 error against float64, and at least `FLOOR` machine epsilons. Integer
    and boolean outputs must be equal.

    Args:
        intermediate: the canonical single-device program, whose values are looked at to name the first wrong one.

    Raises:
        InputsError: arguments that the program does not take.
        MeshError: not one program per rank.
        ProgramError: weights without values.
    """
    if not programs:
        raise MeshError("there is no rank program to compare", help="give one program per rank")
    if hollow := [name for name, value in reference.state_dict.items() if isinstance(value, FakeTensor)]:
        raise ProgramError(
            f"the program cannot be run: its weights have no values ('{hollow[0]}' is a fake tensor)",
            help="compare a program that was exported with its weights",
        )
    flat = flatten_inputs(reference, args, kwargs)
    reference = decomposed(reference, {})  # functional, with every op as the user exported it
    try:
        expected = run_single(reference, flat)
    except RuntimeError as error:
        raise InputsError(
            f"the single-device program does not run on these inputs: {str(error).splitlines()[0]}",
            help="check shapes and values",
        ) from error
    exact = run_single(reference, flat, torch.float64)
    shares = []
    for rank in range(len(programs)):
        named = iter(input_names)
        shares.append([layout.cut(next(named), v, rank) if isinstance(v, torch.Tensor) else v for v in flat])
    try:
        got = simulate(programs, shares)
    except RuntimeError as error:
        raise InputsError(
            f"a rank's program does not run on these inputs: {error}", help="check shapes and dtypes"
        ) from error
    differences = []
    for position, name in enumerate(output_names):
        want, best = expected.outputs[position], exact.outputs[position]
        parts = [r.outputs[position] for r in got]
        differences.append(_difference(name, want, best, parts, layout))
    for name, want in expected.mutated.items():
        differences.append(_difference(name, want, exact.mutated[name], [r.mutated[name] for r in got], layout))
    ok = all(d.ok for d in differences)
    first = None
    if not ok and intermediate is not None:
        first = _first_diverging(intermediate, flat, programs, shares, layout)
    worst = max((d.abs for d in differences), default=0.0), max((d.rel for d in differences), default=0.0)
    return VerifyReport(ok, *worst, differences, first)


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """A functional single-device program by itself; with a dtype, every floating-point value in that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([_promoted(program, dtype)], [[_cast(v, dtype) for v in flat]])[0]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(_float(value.dtype, dtype)) if isinstance(value, torch.Tensor) else value


class _Promoted:
    """A program with all floating-point state and dtype arguments in one dtype, as far as `simulate` reads it."""

    def __init__(self, program: ExportedProgram, dtype: torch.dtype) -> None:
        self.graph_signature = program.graph_signature
        self.state_dict = {name: _cast(value, dtype) for name, value in program.state_dict.items()}
        self.constants = {name: _cast(value, dtype) for name, value in program.constants.items()}
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(program.graph, {}))
        for node in list(self.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                self.graph.erase_node(node)  # it states the dtype that was exported
                continue
            if isinstance(node.target, OpOverload):
                node.target = _Widened(node, dtype)


def _float(argument: Any, dtype: torch.dtype) -> Any:
    if not isinstance(argument, torch.dtype):
        return argument
    return dtype if argument.is_floating_point else dtype.to_complex() if argument.is_complex else argument


class _Widened:
    """An op in another dtype; where it has no such kernel, as exported, with operands rounded and results widened."""

    def __init__(self, node: fx.Node, dtype: torch.dtype) -> None:
        self.target: Any = node.target
        self.exported = [operand.meta["val"].dtype for operand in edit.operands(node)]
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        widened = tree_map(lambda a: _float(a, self.dtype), (args, kwargs))
        try:
            return self.target(*widened[0], **widened[1])
        except Exception:  # whatever the op raises at a dtype that it does not know
            exported = iter(self.exported)
            rounded = tree_map(lambda a: a.to(next(exported)) if isinstance(a, torch.Tensor) else a, (args, kwargs))
            return tree_map(lambda v: _cast(v, self.dtype), self.target(*rounded[0], **rounded[1]))


def _promoted(program: ExportedProgram, dtype: torch.dtype) -> Any:
    return _Promoted(program, dtype)


def _difference(name: str, want: Any, exact: Any, parts: Sequence[Any], layout: Layout) -> Difference:
    if not isinstance(want, torch.Tensor):
        same = all(part == want for part in parts)
        return Difference(name, 0.0 if same else float("inf"), 0.0 if same else float("inf"), 0.0, same)
    try:
        whole = layout.join(name, parts, want.shape)
    except (RuntimeError, ValueError):
        return Difference(name, float("inf"), float("inf"), 0.0, False)
    if any(w.shape != want.shape or w.dtype != want.dtype for w in whole):
        return Difference(name, float("inf"), float("inf"), 0.0, False)
    if not want.numel():
        return Difference(name, 0.0, 0.0, 0.0, True)
    if not _is_rounded(want):
        wrong = max(float((w != want).sum()) for w in whole)
        return Difference(name, wrong, wrong, 0.0, wrong == 0)
    scale, noise = _scale_and_noise(want, exact)
    tolerance = max(SPREAD * noise, FLOOR * torch.finfo(want.dtype).eps)
    largest = max(_largest(w, want) for w in whole)
    return Difference(name, largest, largest / scale, tolerance, largest / scale <= tolerance)


def _scale_and_noise(want: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """The largest magnitude, and the rounding error relative to it, of what is finite."""
    finite = want.isfinite() & exact.isfinite()
    if not finite.any():
        return 1.0, 0.0
    scale = float(exact[finite].abs().amax()) or 1.0
    return scale, float((_wide(want[finite]) - _wide(exact[finite])).abs().amax()) / scale


def _largest(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs in the same places are equal."""
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (_wide(got) - _wide(want)).abs())
    return float(apart.nan_to_num(nan=float("inf")).amax())


def _is_rounded(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _first_diverging(
    reference: ExportedProgram,
    flat: Sequence[Any],
    programs: Sequence[ExportedProgram],
    shares: Sequence[Sequence[Any]],
    layout: Layout,
) -> str | None:
    """The first value whose claim (origin and sharding) does not hold, by name and source."""
    wanted: dict[str, torch.Tensor] = {}
    found: dict[str, tuple[float, float]] = {}

    def keep(_: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            wanted[node.name] = value

    simulate([reference], [flat], seen=keep)

    def measure(_: int, node: fx.Node, value: Any) -> None:
        if node.name in wanted and _is_rounded(wanted[node.name]):
            found[node.name] = _scale_and_noise(wanted[node.name], value)

    simulate([_promoted(reference, torch.float64)], [[_cast(v, torch.float64) for v in flat]], seen=measure)
    parts: dict[str, dict[int, Any]] = {}

    def collect(rank: int, node: fx.Node, value: Any) -> None:
        if read_claim(node).get("sharding") and isinstance(value, torch.Tensor):
            parts.setdefault(node.name, {})[rank] = value

    simulate(programs, shares, seen=collect)
    for node in programs[0].graph.nodes:
        claim = read_claim(node)
        have = parts.get(node.name, {})
        origin = claim.get("origin", "")
        if len(have) != len(programs) or origin not in wanted:
            continue
        want = wanted[origin]
        text = claim["sharding"][0]
        try:
            whole = layout.join(f"={text}", [have[r] for r in sorted(have)], want.shape)
        except (RuntimeError, ValueError):
            return f"'{node.name}' ({node.target}, claimed {text}) has shapes that do not fit together"
        if not want.numel():
            continue
        scale, noise = found.get(origin, (1.0, 0.0))
        limit = max(SPREAD * noise, FLOOR * 1.2e-7)
        if any(_largest(w, want) / scale > limit for w in whole):
            reason = claim.get("reshard_reason") or claim.get("reason", "")
            return f"'{node.name}' ({node.target}, claimed {text}); {reason}"
    return None
