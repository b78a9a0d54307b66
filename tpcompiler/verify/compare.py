"""Compare all ranks with the single-device program, at a tolerance that the program itself sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import decomposed
from tpcompiler.errors import InputsError, MeshError
from tpcompiler.ir import edit
from tpcompiler.ir.claims import read_claim
from tpcompiler.ir.refused import refuse_hollow
from tpcompiler.verify.promote import Promoted, promoted
from tpcompiler.verify.simulate import RankResult, flatten_inputs, simulate

# A sum of the same terms in another order has a rounding error of the same size as the first order's. The error of
# one order is measured (float32 against float64); 8 allows for the spread of the maximum over a few outputs. A wrong
# shard or a missing reduction is off by about 1, five orders of magnitude above.
SPREAD = 8.0
FLOOR = 16.0  # units of machine epsilon: below this an order of summation cannot be told from another
# Where rounding decides between two branches, float32 and float64 may differ by anything. What is off by more than half
# of the output's scale is wrong all the same.
CEILING = 0.5
# A mask's -1e9 beside logits of 10: relative to that scale, no logit could be wrong. Values this far apart, the larger
# ones at least LARGE, are judged apart.
GAP, LARGE = 1e3, 1e4
# In bfloat16 those bounds are 0.06 to 0.13, and leaving one all_reduce of 8 layers out changes the logits by 0.14. So a
# program in less than float32 is compared once more with all of it in float32, where they are about 1e-5.
WIDE = torch.float32


@dataclass(frozen=True)
class Difference:
    """One output (or value written back): the largest difference over all ranks, absolute and relative.

    `rel` is an absolute difference over the largest magnitude of the reference, where it is largest beside its
    `tolerance` (`_bands`). `counted` says that it is made of integers or booleans, and `abs` and `rel` how many are
    wrong.
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
    then: Sequence[tuple[Sequence[Any], Mapping[str, Any]]] = (),
) -> VerifyReport:
    """Run the reference once, and once more in float64, and all ranks in lock step; compare every output on every rank.

    Outputs of the model and values written back to buffers and inputs are compared. Each output's tolerance is
    `SPREAD` times the reference's own error against float64, at least `FLOOR` machine epsilons and at most `CEILING`;
    values of very different magnitude (`_bands`) are judged by tolerances of their own. Integer and
    boolean outputs must be equal. A program with values in less than float32 is compared as it is, dtypes included, and
    once more in float32.

    Args:
        then: (args, kwargs) of further calls, each on the buffers that the calls before have written.
        intermediate: the canonical single-device program, whose values are looked at to name the first wrong one.

    Raises:
        InputsError: arguments that the program does not take.
        MeshError: not one program per rank.
        ProgramError: weights without values.
    """
    if not programs:
        raise MeshError("there is no rank program to compare", help="give one program per rank")
    refuse_hollow(reference, "run")
    reference = functional(reference)
    trials = [_Trial(reference, programs, layout, output_names)]
    if narrow := _is_narrow(reference):
        wide = [Promoted(program, WIDE) for program in programs]
        trials.append(_Trial(Promoted(reference, WIDE), wide, layout, output_names, WIDE))
        intermediate = intermediate and Promoted(intermediate, WIDE)  # type: ignore[assignment]
    differences: list[Difference] = []
    own: list[Difference] = []  # of the program in its own dtype
    first = None
    for number, (given, named) in enumerate([(args, kwargs), *then]):
        flat = flatten_inputs(reference, given, named)
        shares = _shares(flat, programs, layout, input_names)
        for trial in trials:
            found = trial.call(flat, shares)
            own += found if trial.dtype is None else []
            if narrow and trial.dtype is None:
                # Rounding decides between near equals there: what is counted or chosen is judged in float32.
                found = [replace(d, ok=True) if d.counted and d.abs < float("inf") else d for d in found]
            elif first is None and intermediate is not None and not all(d.ok for d in found):
                first = trial.first_diverging(intermediate, flat, shares)
            trial.remember()
            differences += [replace(d, name=f"call {number + 1}: {d.name}") if then else d for d in found]
    worst = max((d.abs for d in own), default=0.0), max((d.rel for d in own), default=0.0)
    return VerifyReport(all(d.ok for d in differences), *worst, differences, first)


class _Trial:
    """The single-device program, the same in float64, and all ranks, side by side, call after call.

    Each goes on with the buffers that it has written itself. With a `dtype`, all floating-point inputs are in it.
    """

    def __init__(
        self,
        reference: Any,
        programs: Sequence[Any],
        layout: Layout,
        output_names: Sequence[str],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.reference, self.exact, self.programs = reference, Promoted(reference, torch.float64), programs
        self.layout, self.output_names, self.dtype = layout, output_names, dtype
        self.known: dict[str, torch.Tensor] = {}
        self.precise: dict[str, torch.Tensor] = {}
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in programs]

    def call(self, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> list[Difference]:
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        try:
            (self.expected,) = simulate([self.reference], [flat], state=[self.known])
        except RuntimeError as error:
            raise InputsError(
                f"the single-device program does not run on these inputs: {str(error).splitlines()[0]}",
                help="check shapes and values",
            ) from error
        (self.best,) = simulate([self.exact], [[promoted(v, torch.float64) for v in flat]], state=[self.precise])
        try:
            self.got = simulate(self.programs, shares, state=self.held)
        except RuntimeError as error:
            raise InputsError(
                f"a rank's program does not run on these inputs: {error}", help="check shapes and dtypes"
            ) from error
        triples = [
            (name, self.expected.outputs[at], self.best.outputs[at], [r.outputs[at] for r in self.got])
            for at, name in enumerate(self.output_names)
        ] + [
            (name, want, self.best.mutated[name], [r.mutated[name] for r in self.got])
            for name, want in self.expected.mutated.items()
        ]
        found = [_difference(*triple, self.layout) for triple in triples]
        return [replace(d, name=f"{d.name} in float32") for d in found] if self.dtype is not None else found

    def remember(self) -> None:
        """Let the next call start from what the last one wrote."""
        self.known.update(self.expected.mutated)
        self.precise.update(self.best.mutated)
        for before, result in zip(self.held, self.got, strict=True):
            before.update(result.mutated)

    def _cast(self, values: Sequence[Any]) -> list[Any]:
        return [promoted(v, self.dtype) for v in values] if self.dtype is not None else list(values)

    def first_diverging(self, intermediate: Any, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> str | None:
        """The first value whose claim (origin and sharding) does not hold, by name and source."""
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        wanted: dict[str, torch.Tensor] = {}
        found: dict[str, tuple[float, float]] = {}

        def keep(_: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and node.op == "call_function":
                wanted[node.name] = value.cpu()

        simulate([intermediate], [flat], state=[self.known], seen=keep)

        def measure(_: int, node: fx.Node, value: Any) -> None:
            if node.name in wanted and _is_rounded(wanted[node.name]):
                found[node.name] = _scale_and_noise(wanted[node.name], value.cpu())

        exact = Promoted(intermediate, torch.float64)
        simulate([exact], [[promoted(v, torch.float64) for v in flat]], state=[self.precise], seen=measure)
        # What pads uneven shards is in some graphs only, so that the nodes behind it bear other names; claims do not.
        names = [_claimed(program.graph) for program in self.programs]
        parts: dict[Any, dict[int, Any]] = {}

        def collect(rank: int, node: fx.Node, value: Any) -> None:
            if node in names[rank] and isinstance(value, torch.Tensor):
                parts.setdefault(names[rank][node], {})[rank] = value.cpu()

        simulate(self.programs, shares, state=self.held, seen=collect)
        for node, name in names[0].items():
            claim = read_claim(node)
            have = parts.get(name, {})
            origin = claim.get("origin", "")
            if len(have) != len(self.programs) or origin not in wanted:
                continue
            want = wanted[origin]
            text = claim["sharding"][0]
            try:
                whole = self.layout.join(f"={text}", [have[r] for r in sorted(have)], want.shape)
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


def _claimed(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Every node that claims a sharding, and what it is called in the graphs of all ranks."""
    seen: Counter[Any] = Counter()
    found = {}
    for node in graph.nodes:
        claim = read_claim(node)
        if claim.get("sharding"):
            said = (claim["origin"], claim.get("reshard"), *claim["sharding"])
            found[node] = (*said, seen[said])
            seen[said] += 1
    return found


def _shares(
    flat: Sequence[Any], programs: Sequence[ExportedProgram], layout: Layout, names: Sequence[str]
) -> list[list[Any]]:
    """Every rank's part of the inputs, on the rank's device.

    Raises:
        InputsError: a size of a dynamic dim that is cut and that the ranks do not divide.
    """
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    cut: list[list[torch.Tensor]] = [[] for _ in programs]
    takes = [_tensor_inputs(program) for program in programs]
    for position, (name, value) in enumerate(zip(names, tensors, strict=True)):
        parts = [layout.cut(name, value, rank).to(take[position].device.type) for rank, take in enumerate(takes)]
        for dim, size in enumerate(takes[0][position].shape):
            held = [part.shape[dim] for part in parts]
            if not isinstance(size, int) and len(set(held)) > 1:
                raise InputsError(
                    f"input '{name}' has {sum(held)} on dim {dim}, which is cut by {len(held)} ranks",
                    help=f"give a multiple of {len(held)}",
                )
        for own, part in zip(cut, parts, strict=True):
            own.append(part)
    feeds = [iter(own) for own in cut]
    return [[next(feed) if isinstance(value, torch.Tensor) else value for value in flat] for feed in feeds]


def _tensor_inputs(program: ExportedProgram) -> list[torch.Tensor]:
    """The fake values of the user's tensors, in order."""
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder")
    specs = program.graph_signature.input_specs
    return [
        node.meta["val"]
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind is InputKind.USER_INPUT and edit.is_tensor(node)
    ]


def _is_narrow(program: ExportedProgram) -> bool:
    floats = (v.dtype for node in program.graph.nodes for v in edit.outputs(node) if v.is_floating_point())
    return any(torch.finfo(dtype).bits < torch.finfo(WIDE).bits for dtype in floats)


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program with every op as the user exported it and nothing changed in place; itself when it is so already."""
    return decomposed(program, {}) if program.dialect == "TRAINING" else program


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """A functional single-device program by itself; with a dtype, every floating-point value in that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([Promoted(program, dtype)], [[promoted(v, dtype) for v in flat]])[0]


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
    if not _is_rounded(want):
        wrong = max(float((w != want).sum()) for w in whole)
        return Difference(name, wrong, wrong, 0.0, wrong == 0, counted=True)
    largest, verdicts = 0.0, []
    for band in _bands(exact):
        scale, noise = _scale_and_noise(want[band], exact[band])
        tolerance = min(max(SPREAD * noise, FLOOR * torch.finfo(want.dtype).eps), CEILING)
        off = max(_largest(w[band], want[band]) for w in whole)
        largest = max(largest, off)
        verdicts.append((off / scale / tolerance, off / scale, tolerance))
    _, rel, tolerance = max(verdicts)
    return Difference(name, largest, rel, tolerance, rel <= tolerance)


def _bands(exact: torch.Tensor) -> list[torch.Tensor]:
    """Masks of the elements that are judged together: one, or several where magnitudes leave a `GAP`."""
    size = exact.abs().nan_to_num(nan=0.0, posinf=0.0)
    if size.amax() < LARGE:
        return [torch.full_like(size, True, dtype=torch.bool)]
    rising = size.flatten().sort().values
    above = rising[1:][(rising[1:] >= LARGE) & (rising[1:] > GAP * rising[:-1])]
    number = torch.bucketize(size, above, right=True)
    return [number == band for band in range(len(above) + 1)]


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
