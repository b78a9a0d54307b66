"""Compare all ranks with the single-device program, at a tolerance that the program itself sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import decomposed
from tpcompiler.errors import InputsError, MeshError
from tpcompiler.ir import edit
from tpcompiler.ir.claims import read_claim
from tpcompiler.verify.simulate import RankResult, flatten_inputs, simulate

# A sum of the same terms in another order has a rounding error of the same size as the first order's. The error of
# one order is measured (float32 against float64); 8 allows for the spread of the maximum over a few outputs. A wrong
# shard or a missing reduction is off by about 1, five orders of magnitude above.
SPREAD = 8.0
FLOOR = 16.0  # units of machine epsilon: below this an order of summation cannot be told from another
# In bfloat16 those bounds are 0.06 to 0.13, and leaving one all_reduce of 8 layers out changes the logits by 0.14. So a
# program in less than float32 is compared once more with all of it in float32, where they are about 1e-5.
WIDE = torch.float32


@dataclass(frozen=True)
class Difference:
    """One output (or value written back): the largest difference over all ranks, absolute and relative.

    `rel` is `abs` over the largest magnitude of the reference; `noise` the same between the reference and its own
    run in float64. `counted` says that it is made of integers or booleans, and `abs` and `rel` how many are wrong.
    """

    name: str
    abs: float
    rel: float
    tolerance: float
    ok: bool
    counted: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """The verdict. `first_diverging` names the first value, in the order of the program, that is wrong on some rank.

    `note` says what was run, where that is not the very program that was asked about.
    """

    ok: bool
    max_abs_err: float
    max_rel_err: float
    outputs: list[Difference] = field(default_factory=list)
    first_diverging: str | None = None
    note: str = ""

    def __str__(self) -> str:
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: "
            f"max abs err {self.max_abs_err:.3g}, max rel err {self.max_rel_err:.3g}"
        ]
        if self.note:
            lines.append(f"  {self.note}")
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
    `SPREAD` times the reference's own error against float64, and at least `FLOOR` machine epsilons. Integer and
    boolean outputs must be equal. A program with values in less than float32 is compared as it is, dtypes included, and
    once more in float32.

    Args:
        intermediate: the canonical single-device program, whose values are looked at to name the first wrong one.

    Raises:
        InputsError: arguments that the program does not take.
        MeshError: not one program per rank.
    """
    if not programs:
        raise MeshError("there is no rank program to compare", help="give one program per rank")
    flat = flatten_inputs(reference, args, kwargs)
    reference = decomposed(reference, {})  # functional, with every op as the user exported it
    shares = []
    for rank, program in enumerate(programs):
        named = iter(input_names)
        there = {n.name: n.meta["val"].device.type for n in program.graph.nodes if edit.is_tensor(n)}
        flat_here: list[Any] = []
        for value in flat:
            if isinstance(value, torch.Tensor):
                name = next(named)
                value = layout.cut(name, value, rank).to(there.get(name, value.device))
            flat_here.append(value)
        shares.append(flat_here)
    differences = _differences(reference, programs, flat, shares, layout, output_names)
    worst = max((d.abs for d in differences), default=0.0), max((d.rel for d in differences), default=0.0)
    if _is_narrow(reference):
        # Rounding decides between near equals there: what is counted or chosen is judged in float32.
        differences = [replace(d, ok=True) if d.counted and d.abs < float("inf") else d for d in differences]
        reference, programs = _promoted(reference, WIDE), [_promoted(program, WIDE) for program in programs]
        intermediate = intermediate and _promoted(intermediate, WIDE)
        flat, shares = [_cast(v, WIDE) for v in flat], [[_cast(v, WIDE) for v in share] for share in shares]
        wide = _differences(reference, programs, flat, shares, layout, output_names)
        differences += [replace(d, name=f"{d.name} in float32") for d in wide]
    ok = all(d.ok for d in differences)
    first = None
    if not ok and intermediate is not None:
        first = _first_diverging(intermediate, flat, programs, shares, layout)
    return VerifyReport(ok, *worst, differences, first)


def _is_narrow(program: Any) -> bool:
    floats = (v.dtype for node in program.graph.nodes for v in edit.outputs(node) if v.is_floating_point())
    return any(torch.finfo(dtype).bits < torch.finfo(WIDE).bits for dtype in floats)


def _differences(
    reference: Any,
    programs: Sequence[Any],
    flat: Sequence[Any],
    shares: Sequence[Sequence[Any]],
    layout: Layout,
    output_names: Sequence[str],
) -> list[Difference]:
    expected = run_single(reference, flat)
    exact = run_single(reference, flat, torch.float64)
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
    return differences


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """A functional single-device program by itself; with a dtype, every floating-point value in that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([_promoted(program, dtype)], [[_cast(v, dtype) for v in flat]])[0]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Promoted:
    """A program with all floating-point state and dtype arguments in one dtype, as far as `simulate` reads it."""

    def __init__(self, program: ExportedProgram, dtype: torch.dtype) -> None:
        self.graph_signature = program.graph_signature
        self.state_dict = {name: _cast(value, dtype) for name, value in program.state_dict.items()}
        self.constants = {name: _cast(value, dtype) for name, value in program.constants.items()}
        self.graph = edit.copy_graph(program.graph)
        for node in list(self.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                self.graph.erase_node(node)  # it states the dtype that was exported
                continue
            node.args = fx.node.map_aggregate(node.args, lambda a: _float(a, dtype))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: _float(a, dtype))


def _float(argument: Any, dtype: torch.dtype) -> Any:
    return dtype if isinstance(argument, torch.dtype) and argument.is_floating_point else argument


def _promoted(program: ExportedProgram, dtype: torch.dtype) -> Any:
    return _Promoted(program, dtype)


def _difference(name: str, want: Any, exact: Any, parts: Sequence[Any], layout: Layout) -> Difference:
    if not isinstance(want, torch.Tensor):
        same = all(part == want for part in parts)
        return Difference(name, 0.0 if same else float("inf"), 0.0 if same else float("inf"), 0.0, same)
    want, exact, parts = want.cpu(), exact.cpu(), [part.cpu() for part in parts]  # a program may have two devices
    try:
        whole = layout.join(name, parts, want.shape)
    except (RuntimeError, ValueError):
        return Difference(name, float("inf"), float("inf"), 0.0, False)
    if any(w.shape != want.shape or w.dtype != want.dtype for w in whole):
        return Difference(name, float("inf"), float("inf"), 0.0, False)
    if not want.numel():
        return Difference(name, 0.0, 0.0, 0.0, True)
    if not want.is_floating_point():
        wrong = max(float((w != want).sum()) for w in whole)
        return Difference(name, wrong, wrong, 0.0, wrong == 0, counted=True)
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
    return scale, float((want[finite].double() - exact[finite].double()).abs().amax()) / scale


def _largest(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference; equal infinities and NaNs in the same places are equal."""
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (got.double() - want.double()).abs())
    return float(apart.nan_to_num(nan=float("inf")).amax())


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
            wanted[node.name] = value.cpu()

    simulate([reference], [flat], seen=keep)

    def measure(_: int, node: fx.Node, value: Any) -> None:
        if node.name in wanted and wanted[node.name].is_floating_point():
            found[node.name] = _scale_and_noise(wanted[node.name], value.cpu())

    simulate([_promoted(reference, torch.float64)], [[_cast(v, torch.float64) for v in flat]], seen=measure)
    parts: dict[str, dict[int, Any]] = {}

    def collect(rank: int, node: fx.Node, value: Any) -> None:
        if read_claim(node).get("sharding") and isinstance(value, torch.Tensor):
            parts.setdefault(node.name, {})[rank] = value.cpu()

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
