"""Run the single device and all ranks, call after call, and compare their results."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler.errors import InputsError, MeshError, reason
from tpcompiler.frontend.refused import refuse_hollow
from tpcompiler.frontend.written_back import find_overwritten, keep_old_values
from tpcompiler.ir.exported import copy_signature
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import Claim, claims_of
from tpcompiler.ir.shares import join, read_sharding
from tpcompiler.judge.compare.judge import (
    FEW,
    FLOOR,
    ROUNDINGS,
    SPREAD,
    Difference,
    difference,
    incomparable,
    is_rounded,
    largest_difference,
    largest_magnitude,
    ordinary_magnitude,
    scale_and_noise,
    widened,
)
from tpcompiler.judge.compare.promote import Promoted, promoted
from tpcompiler.judge.compare.simulate import RankResult, simulate
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.runtime.inputs import check_values

Watched = Callable[..., Any]  # runs programs in lock step, and calls `seen(rank, node, value)` for every value
FAILURES = (RuntimeError, LookupError, ValueError, ArithmeticError)  # of ops, for inputs that they reject


def reference_of(program: ExportedProgram) -> ExportedProgram:
    """Return the program that the user exported, whose ops run in order, in place.

    If a functional program returns the old value of a buffer that it writes, return a copy that clones the value:
    torch's own module would return another value than the graph specifies.
    """
    if not any(find_overwritten(program)):
        return program
    return keep_old_values(
        program._update(copy.deepcopy(program.graph_module), copy_signature(program.graph_signature))
    )


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """Run a single-device program; with a dtype, every floating-point value has that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([Promoted(program, dtype)], [[promoted(v, dtype) for v in flat]])[0]


class SingleDeviceRaises(Exception):
    """The single device raises, and no rank does."""


class Trial:
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
        self.family = subject.family

    def share(self, other: Trial) -> None:
        """Share the buffers of another program's trial."""
        self.known, self.precise, self.held = other.known, other.precise, other.held

    def call(self, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> list[Difference]:
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        try:
            (self.expected,) = simulate([self.reference], [flat], state=[self.known])
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
            (name, f"output {name}", self.expected.outputs[at], best.outputs[at], [r.outputs[at] for r in self.got])
            for at, name in enumerate(self.output_names)
        ] + [(name, name, want, exact, parts) for name, (want, exact, *parts) in after.items() if name not in lost]
        magnitude = max(self.weights, ordinary_magnitude([*flat, *self.expected.outputs]))
        found = [difference(*each, self.layout, magnitude) for each in made]
        few = [
            at for at in range(len(self.output_names)) if not found[at].ok and _lacks_noise(self.expected.outputs[at])
        ]
        others = [self._round_otherwise(flat, seed) for seed in range(ROUNDINGS)] if few else []
        for at in few:
            found[at] = difference(*made[at], self.layout, magnitude, [other.outputs[at] for other in others])
        forgotten = {name for name in after if any(name not in result.mutated for *_, result in runs)}
        found = [
            d if d.ok or d.name not in forgotten else replace(d, name=f"{d.name}, which not all write") for d in found
        ]
        found += [incomparable(f"{name}, which not all have") for name in lost]
        if not all(_drew_alike(result, self.expected) for result in self.got):
            found.append(incomparable("the random numbers drawn"))
        return [replace(d, name=f"{d.name} in float32") for d in found] if self.dtype is not None else found

    def _round_otherwise(self, flat: Sequence[Any], seed: int) -> RankResult:
        """Run the single device on floats that are each moved by at most a unit in the last place."""
        generator = torch.Generator().manual_seed(seed)

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            wide = widened(value.detach())  # in the default dtype the step of a float64 would be none
            steps = torch.randint(-1, 2, value.shape, generator=generator).to(wide)
            return (wide + wide * steps * torch.finfo(value.dtype).eps).to(value.dtype)

        state = {name: moved(value) for name, value in {**self.reference.state_dict, **self.known}.items()}
        return simulate([self.reference], [list(map(moved, flat))], state=[state])[0]

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
                return SingleDeviceRaises(f"the single-device program raises ({line}), and no rank does")
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

    def made(self) -> dict[str, Any]:
        """Return the outputs of the single device's last call, by name."""
        return dict(zip(self.output_names, self.expected.outputs, strict=True))

    def _cast(self, values: Sequence[Any]) -> list[Any]:
        return [promoted(v, self.dtype) for v in values] if self.dtype is not None else list(values)

    def first_diverging(self, flat: Sequence[Any], shares: Sequence[Sequence[Any]]) -> str | None:
        """Return the first value whose claim (origin and sharding) is wrong, by name and source."""
        if (intermediate := self.intermediate) is None:
            return None
        flat, shares = self._cast(flat), [self._cast(share) for share in shares]
        single = partial(simulate, [intermediate], [flat], state=[self.known])
        precise = [promoted(v, torch.float64) for v in flat]
        exact = partial(simulate, [Promoted(intermediate, torch.float64)], [precise], state=[self.precise])
        ranks = partial(simulate, self.programs, shares, state=self.held)
        claims = [_claimed(program.graph) for program in self.programs]
        return _find_first_diverging(single, exact, ranks, claims, self.layout.mesh)


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


def _lacks_noise(value: Any) -> bool:
    """Return True if a run in float64 measures too little of an output's rounding: few elements, or float64 itself."""
    if not isinstance(value, torch.Tensor) or not is_rounded(value) or not value.numel():
        return False
    return value.numel() <= FEW or value.dtype in (torch.float64, torch.complex128)


def _find_first_diverging(
    single: Watched, exact: Watched, ranks: Watched, claims: Sequence[Mapping[fx.Node, tuple[Any, Claim]]], mesh: Mesh
) -> str | None:
    """Return the first value whose claim (origin and sharding) is wrong, by name and source.

    Args:
        single: the program whose nodes the claims name as origins, on one device.
        exact: the same in float64, which tells how far rounding takes each value.
        ranks: all ranks.
        claims: of every rank's nodes, with names that are the same on all (`_claimed`).
        mesh: the mesh of the claims.
    """
    wanted: dict[str, torch.Tensor] = {}
    errors: dict[str, tuple[float, float]] = {}

    def keep(_: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            wanted[node.name] = value.cpu()

    single(seen=keep)

    def measure(_: int, node: fx.Node, value: Any) -> None:
        if node.name in wanted and is_rounded(wanted[node.name]):
            errors[node.name] = scale_and_noise(wanted[node.name], value.cpu())

    exact(seen=measure)
    parts: dict[Any, dict[int, Any]] = {}

    def collect(rank: int, node: fx.Node, value: Any) -> None:
        if node in claims[rank] and isinstance(value, torch.Tensor):
            parts.setdefault(claims[rank][node][0], {})[rank] = value.cpu()

    ranks(seen=collect)
    for node, (name, claim) in claims[0].items():
        have = parts.get(name, {})
        origin = claim.origin or ""
        if len(have) != len(claims) or origin not in wanted:
            continue
        want = wanted[origin]
        text = (claim.sharding or [""])[0]
        try:
            sharding = read_sharding(text, mesh, want.ndim)
            if sharding.has_spans:  # its shares overlap, and may leave elements out
                continue
            whole = join([have[r] for r in sorted(have)], sharding, mesh, want.shape)
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


def _claimed(graph: fx.Graph) -> dict[fx.Node, tuple[Any, Claim]]:
    """Return every node that claims a sharding, with a name that is the same in the graphs of all ranks.

    Padding of uneven shards appears in some graphs only and shifts the names of later nodes; claims stay the same.
    """
    counts: Counter[Any] = Counter()
    found = {}
    for node, claim in claims_of(graph):
        if claim.sharding:
            key = (claim.origin, claim.reshard, *claim.sharding)
            found[node] = (*key, counts[key]), claim
            counts[key] += 1
    return found
