"""Compare all ranks with the single-device program, at a tolerance derived from the program itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.export.graph_signature import InputKind

from tpcompiler.errors import InputsError, MeshError, one_line, reason
from tpcompiler.frontend.refused import refuse_hollow
from tpcompiler.ir.node_placement import Claim, claims_of
from tpcompiler.ir.shares import join, read_sharding
from tpcompiler.judge.compare.judge import (
    FEW,
    FLOOR,
    ROUNDINGS,
    SPREAD,
    Difference,
    difference,
    is_rounded,
    largest_difference,
    largest_magnitude,
    ordinary_magnitude,
    scale_and_noise,
    widened,
)
from tpcompiler.judge.compare.promote import Promoted, promoted
from tpcompiler.judge.compare.reference import WIDE, is_narrow, reference_of
from tpcompiler.judge.compare.simulate import RankResult, simulate
from tpcompiler.judge.compare.subject import Subject, deal
from tpcompiler.runtime.artifact import DROPPED, is_single
from tpcompiler.runtime.inputs import check_values, flatten_inputs
from tpcompiler.runtime.records import Record
from tpcompiler.terminal.tables import Shown

# The inputs of a further call: args, or (args, kwargs).
Call = Sequence[Any] | tuple[Sequence[Any], Mapping[str, Any]]
FAILURES = (RuntimeError, LookupError, ValueError, ArithmeticError)  # of ops, for inputs that they reject


class VerifyReport(Record, Shown, frozen=True, omit_defaults=False):
    """The verdict, and the largest errors of the program in its own dtype."""

    ok: bool  # true if all outputs are equal within their tolerances
    max_abs_err: float  # the largest difference
    max_rel_err: float  # the largest difference relative to its output's largest magnitude
    outputs: list[Difference] = []  # the outputs, and the values that are written back
    first_diverging: str | None = None  # the first value, in the order of the program, that is wrong on some rank
    note: str = ""  # which program was run, if it is not the one that was asked about; how many rows experts drop
    magnitude: float = 0.0  # the largest magnitude in the output that has the largest absolute error
    tolerance: float = 0.0  # the relative error that was allowed in the output that has the largest one

    def __str__(self) -> str:
        largest = f" in values up to {self.magnitude:.3g}" if self.magnitude else ""
        allowed = f" (tolerance {self.tolerance:.3g})" if self.tolerance else ""
        lines = [
            f"{'equal' if self.ok else 'NOT EQUAL'}: "
            f"max abs err {self.max_abs_err:.3g}{largest}, max rel err {self.max_rel_err:.3g}{allowed}"
        ]
        if self.note:
            lines.append(f"  {self.note}")
        for d in self.outputs:
            proved = "" if d.finite else ": it has no finite number, which proves nothing"
            if d.strays:
                proved = f": {d.strays} elements are NaN or infinite on one device or on a rank, and not on both"
            off = f"rel err {d.rel:.3g} (tolerance {d.tolerance:.3g})"
            if d.magnitude:
                off += f", abs err {d.abs:.3g} in values up to {d.magnitude:.3g}"
            lines.append(f"  {'ok ' if d.ok else 'BAD'} {d.name}: {off}{proved}")
        if self.first_diverging:
            lines.append(f"  first diverging value: {self.first_diverging}")
        return "\n".join(map(one_line, lines))


def read_call(call: Call) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return (args, kwargs) for a call given as both, or as args alone."""
    if len(call) == 2 and isinstance(call[0], (tuple, list)) and isinstance(call[1], Mapping):
        return call[0], call[1]
    return call, {}


def compare_calls(
    subjects: Mapping[str, Subject], calls: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]]
) -> VerifyReport:
    """Run each reference, the same in float64, and all ranks in lock step; compare every output on every rank.

    Outputs of the model and values written back to buffers and inputs are compared. Each output's tolerance is
    `SPREAD` times the reference's own error against float64, at least `FLOOR` machine epsilons and at most `CEILING`;
    values of very different magnitude (`_bands`) have separate tolerances. Integer and boolean outputs must be equal. A
    program with values below float32 is compared unchanged, dtypes included, and once more in float32.

    Args:
        subjects: programs that share their buffers, by name.
        calls: (name, args, kwargs) of each call, which starts from the buffers that earlier calls have written.

    Raises:
        InputsError: a program rejects the arguments.
        MeshError: there is no program of a rank.
        ProgramError: weights have no values.
    """
    trials = {name: [_Trial(subject)] for name, subject in subjects.items()}
    simulated = all(subject.run is None for subject in subjects.values())
    if narrow := simulated and any(is_narrow(each[0].reference) for each in trials.values()):
        for name, subject in subjects.items():
            trials[name].append(_Trial(subject, WIDE))
    for each in zip(*trials.values(), strict=True):
        for trial in each[1:]:
            trial.share(each[0])
    dropped: list[torch.Tensor] = []
    differences: list[Difference] = []
    own: list[Difference] = []  # of the program in its own dtype
    first = None
    for number, (name, given, named) in enumerate(calls):
        flat = flatten_inputs(trials[name][0].reference, given, named)
        shares = deal(flat, subjects[name])
        for trial in trials[name]:
            try:
                results = trial.call(flat, shares)
            except _OneRaises as error:
                differences.append(Difference(str(error), float("inf"), float("inf"), 0.0, False))
                return VerifyReport(False, float("inf"), float("inf"), differences)
            own += results if trial.dtype is None else []
            dropped += trial.dropped if trial.dtype is None else []
            if narrow and trial.dtype is None:
                # In low precision, rounding decides between close values: counts and choices are judged in float32.
                results = [replace(d, ok=True) if d.counted and d.abs < float("inf") else d for d in results]
            elif first is None and not all(d.ok for d in results):
                first = trial.first_diverging(flat, shares)
            trial.remember()
            program = "" if is_single(subjects) else f" ({name})"
            of = f"call {number + 1}{program}: " if len(calls) > 1 else ""
            differences += [replace(d, name=f"{of}{d.name}") for d in results]
    nothing = Difference("", 0.0, 0.0, 0.0, True)
    furthest, worst = (max(own, key=key, default=nothing) for key in (_absolute, _relative))
    return VerifyReport(
        all(d.ok for d in differences),
        furthest.abs,
        worst.rel,
        differences,
        first,
        note=_count(dropped),
        magnitude=furthest.magnitude,
        tolerance=worst.tolerance,
    )


def _has_few(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and 0 < value.numel() <= FEW


def _count(dropped: Sequence[torch.Tensor]) -> str:
    """Report how many rows of tokens exceed the capacity of their expert."""
    count, rows = sum(int(own.sum()) for own in dropped), sum(own.numel() for own in dropped)
    return f"{count} of {rows} rows of tokens exceed the capacity of their expert, and are dropped" if dropped else ""


def _absolute(found: Difference) -> tuple[float, float]:
    return found.abs, found.magnitude


def _relative(found: Difference) -> tuple[float, float]:
    return found.rel, found.tolerance


class _OneRaises(Exception):
    """The single device raises, and no rank does."""


class _Trial:
    """The single-device program, the same in float64, and all ranks, run side by side, call after call.

    Each keeps the buffers that it has written. With a `dtype`, all floating-point inputs are in it.
    """

    def __init__(self, subject: Subject, dtype: torch.dtype | None = None) -> None:
        if not subject.programs:
            raise MeshError("there is no rank program to compare", help="give one program per rank")
        refuse_hollow(subject.reference, "run")
        self.dtype, self.layout, self.output_names = dtype, subject.layout, subject.output_names
        signature, state = subject.reference.graph_signature, subject.reference.state_dict
        self.weights = largest_magnitude(state[name] for name in signature.parameters)
        self.reference: Any = reference_of(subject.reference)
        self.programs: Sequence[Any] = subject.programs
        self.intermediate: Any = subject.intermediate
        if dtype is not None:
            self.reference = Promoted(self.reference, dtype)
            self.programs = [Promoted(program, dtype) for program in subject.programs]
            self.intermediate = self.intermediate and Promoted(self.intermediate, dtype)
        self.exact = Promoted(self.reference, torch.float64)
        self.run, self.indices = subject.run, subject.indices
        self.input_names = subject.input_names
        self.known: dict[str, torch.Tensor] = {}
        self.precise: dict[str, torch.Tensor] = {}
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in subject.programs]

    def share(self, other: _Trial) -> None:
        """Share the buffers of another program's trial."""
        self.known, self.precise, self.held = other.known, other.precise, other.held

    def call(self, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> list[Difference]:
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        try:
            self.dropped: list[torch.Tensor] = []
            drops = any(node.name.startswith(DROPPED) for node in self.reference.graph.nodes)
            seen = self._keep_dropped if drops else None
            (self.expected,) = simulate([self.reference], [flat], state=[self.known], seen=seen)
            (self.best,) = simulate([self.exact], [[promoted(v, torch.float64) for v in flat]], state=[self.precise])
        except FAILURES as error:
            raise self._refused(error, shares) from error
        _refuse_nothing_finite(self.expected.outputs, self.output_names)
        try:
            self._check_at_door(shares)
            self.got = self.run(shares) if self.run else simulate(self.programs, shares, state=self.held)
        except (*FAILURES, InputsError) as error:
            raise InputsError(
                f"a rank's program does not run on these inputs: {error}", help="check shapes and dtypes"
            ) from error
        best = self.best if _drew_alike(self.best, self.expected) else self.expected  # its noise means nothing
        single = (self.reference, self.known, flat, self.expected), (self.exact, self.precise, flat, best)
        ranks = zip(self.programs, self.held, shares, self.got, strict=True)
        runs = [*single, *ranks]
        written = dict.fromkeys(name for *_, result in runs for name in result.mutated)
        after = {name: [_value_after(name, *run) for run in runs] for name in written}
        lost = [name for name, values in after.items() if any(value is None for value in values)]
        made = [
            (
                name,
                f"output {name}",
                self.expected.outputs[at],
                best.outputs[at],
                [r.outputs[at] for r in self.got],
            )
            for at, name in enumerate(self.output_names)
        ] + [(name, name, want, exact, parts) for name, (want, exact, *parts) in after.items() if name not in lost]
        magnitude = max(self.weights, ordinary_magnitude([*flat, *self.expected.outputs]))
        found = [difference(*each, self.layout, magnitude) for each in made]
        few = [at for at in range(len(self.output_names)) if not found[at].ok and _has_few(self.expected.outputs[at])]
        others = [self._round_otherwise(flat, seed) for seed in range(ROUNDINGS)] if few else []
        for at in few:
            found[at] = difference(*made[at], self.layout, magnitude, [other.outputs[at] for other in others])
        forgotten = {name for name in after if any(name not in result.mutated for *_, result in runs)}
        found = [
            d if d.ok or d.name not in forgotten else replace(d, name=f"{d.name}, which not all write") for d in found
        ]
        found += [Difference(f"{name}, which not all have", float("inf"), float("inf"), 0.0, False) for name in lost]
        if not all(_drew_alike(result, self.expected) for result in self.got):
            found.append(Difference("the random numbers drawn", float("inf"), float("inf"), 0.0, False))
        return [replace(d, name=f"{d.name} in float32") for d in found] if self.dtype is not None else found

    def _round_otherwise(self, flat: Sequence[Any], seed: int) -> RankResult:
        """Run the single device on floats that are each moved by at most a unit in the last place."""
        generator = torch.Generator().manual_seed(seed)

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            steps = torch.randint(-1, 2, value.shape, generator=generator).to(value.device)
            return (value.detach() * (1 + steps * torch.finfo(value.dtype).eps)).to(value.dtype)

        state = {name: moved(value) for name, value in {**self.reference.state_dict, **self.known}.items()}
        return simulate([self.reference], [list(map(moved, flat))], state=[state])[0]

    def _keep_dropped(self, rank: int, node: fx.Node, value: Any) -> None:
        self.dropped += [value] if node.name.startswith(DROPPED) else []

    def _check_at_door(self, shares: Sequence[Sequence[Any]]) -> None:
        """Reject inputs that `load` rejects.

        Raises:
            InputsError: an index is out of range.
        """
        for share in shares:
            tensors = [value for value in share if isinstance(value, torch.Tensor)]
            check_values(dict(zip(self.input_names, tensors, strict=True)), self.indices)

    def _refused(self, error: Exception, shares: Sequence[Sequence[Any]]) -> Exception:
        """Return the error to raise if the single device raises: a rank must raise too, which stops the others.

        A rank with correct inputs may answer, if its results do not depend on the rank that raises.
        """
        line = reason(error)
        failed: dict[int, Exception] = {}
        if self.run is None:
            try:
                self._check_at_door(shares)
                simulate(self.programs, shares, state=self.held, failed=failed)
            except InputsError as refused:
                failed = dict.fromkeys(range(len(self.programs)), refused)
            if not failed:
                return _OneRaises(f"the single-device program raises ({line}), and no rank does")
        who = "all ranks raise" if len(failed) == len(self.programs) else f"rank {min(failed, default=0)} raises"
        also = f"; {who} too: {reason(failed[min(failed)])}" if failed else ""
        return InputsError(
            f"the single-device program does not run on these inputs: {line}{also}", help="check shapes and values"
        )

    def remember(self) -> None:
        """Make the next call start from the buffers that the last one wrote."""
        self.known.update(self.expected.mutated)
        self.precise.update(self.best.mutated)
        for before, result in zip(self.held, self.got, strict=True):
            before.update(result.mutated)

    def _cast(self, values: Sequence[Any]) -> list[Any]:
        return [promoted(v, self.dtype) for v in values] if self.dtype is not None else list(values)

    def first_diverging(self, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> str | None:
        """Return the first value whose claim (origin and sharding) is wrong, by name and source."""
        if (intermediate := self.intermediate) is None:
            return None
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        wanted: dict[str, torch.Tensor] = {}
        errors: dict[str, tuple[float, float]] = {}

        def keep(_: int, node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and node.op == "call_function":
                wanted[node.name] = value.cpu()

        simulate([intermediate], [flat], state=[self.known], seen=keep)

        def measure(_: int, node: fx.Node, value: Any) -> None:
            if node.name in wanted and is_rounded(wanted[node.name]):
                errors[node.name] = scale_and_noise(wanted[node.name], value.cpu())

        exact = Promoted(intermediate, torch.float64)
        simulate([exact], [[promoted(v, torch.float64) for v in flat]], state=[self.precise], seen=measure)
        # Padding of uneven shards appears in some graphs only and shifts the names of later nodes; claims stay the
        # same.
        claims = [_claimed(program.graph) for program in self.programs]
        parts: dict[Any, dict[int, Any]] = {}

        def collect(rank: int, node: fx.Node, value: Any) -> None:
            if node in claims[rank] and isinstance(value, torch.Tensor):
                parts.setdefault(claims[rank][node][0], {})[rank] = value.cpu()

        simulate(self.programs, shares, state=self.held, seen=collect)
        for node, (name, claim) in claims[0].items():
            have = parts.get(name, {})
            origin = claim.origin or ""
            if len(have) != len(self.programs) or origin not in wanted:
                continue
            want = wanted[origin]
            text = (claim.sharding or [""])[0]
            try:
                sharding = read_sharding(text, self.layout.mesh, want.ndim)
                whole = join([have[r] for r in sorted(have)], sharding, self.layout.mesh, want.shape)
            except (RuntimeError, ValueError):
                return f"'{node.name}' ({node.target}, claimed {text}) has shapes that do not fit together"
            if not want.numel():
                continue
            scale, noise = errors.get(origin, (1.0, 0.0))
            limit = max(SPREAD * noise, FLOOR * 1.2e-7)
            if any(largest_difference(w, want) / scale > limit for w in whole):
                reason = claim.reshard_reason or claim.reason or ""
                return f"'{node.name}' ({node.target}, claimed {text}); {reason}"
        return None


def _value_after(name: str, program: Any, held: Mapping[str, Any], flat: Sequence[Any], result: RankResult) -> Any:
    """Return a leaf or input after a call that may have written it; None if the program has none."""
    specs = program.graph_signature.input_specs
    inputs = (spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT)
    given = dict(zip(inputs, flat, strict=True))
    places = (result.mutated, held, program.state_dict, program.constants, given)
    return next((place[name] for place in places if name in place), None)


def _drew_alike(result: RankResult, expected: RankResult) -> bool:
    """Return True if two runs leave the generators in the same state, or if a state is unknown."""
    if result.drawn is None or expected.drawn is None:
        return True
    pairs = zip(result.drawn, expected.drawn, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _refuse_nothing_finite(outputs: Sequence[Any], names: Sequence[str]) -> None:
    """Reject outputs without a finite number: NaN equals NaN on any ranks, which would prove nothing.

    Raises:
        InputsError: no rounded output has a finite number.
    """
    rounded = {n: v for n, v in zip(names, outputs, strict=False) if isinstance(v, torch.Tensor) and is_rounded(v)}
    if any(not value.numel() or widened(value).isfinite().any() for value in rounded.values()) or not rounded:
        return
    count = sum(value.numel() for value in rounded.values())
    raise InputsError(
        f"the single-device program gives no finite number in {count} ({', '.join(map(repr, rounded))}): there is "
        "nothing to compare",
        help="look for NaN and infinity in the inputs and the weights",
    )


def _claimed(graph: fx.Graph) -> dict[fx.Node, tuple[Any, Claim]]:
    """Return every node that claims a sharding, with a name that is the same in the graphs of all ranks."""
    counts: Counter[Any] = Counter()
    found = {}
    for node, claim in claims_of(graph):
        if claim.sharding:
            key = (claim.origin, claim.reshard, *claim.sharding)
            found[node] = (*key, counts[key]), claim
            counts[key] += 1
    return found
