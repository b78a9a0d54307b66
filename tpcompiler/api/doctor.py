"""Find how many ranks a model can use, the cost of each number, and the obstacles, with the search."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec.structs import astuple
from torch.export import ExportedProgram

from tpcompiler._torch import sym_hint
from tpcompiler.api import Given, Programs, conversions_of, read_calls, read_plan
from tpcompiler.api.placed import place_within
from tpcompiler.cost.amounts import read_memory
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import local_bytes
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.errors import MeshError, ShardingError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers
from tpcompiler.ir.optimizer import read_optimizer
from tpcompiler.ir.program import PlannedProgram, tied
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.runtime.artifact import is_single
from tpcompiler.runtime.records import Collective, Optimizer, Record, mesh_text
from tpcompiler.solver.estimate import Memory, measure_memory
from tpcompiler.solver.report import Obstacle, count_searches, find_obstacles
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Aim
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted
from tpcompiler.terminal.tables import Part, Shown, Table

MOST = 16  # largest degree to try
FURTHEST = 1024  # largest degree to look for if a limit on memory needs more
AXIS = "tp"  # the axis whose degrees are tried
SPOKEN = ("first token", "tokens/s", "of a row", "of a rank")


GENERATION = {"prefill": "tokens in a prompt", "decode": "in a step"}


class Sends(Record, frozen=True):
    """Equal collectives of a call."""

    kind: str  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    count: int  # their number
    wire_bytes: int  # of each, by a rank
    seconds: float  # of each

    @property
    def text(self) -> str:
        return f"{self.count} {self.kind} of {format_bytes(self.wire_bytes)}, {duration(self.seconds)} each"


class ProgramCall(Record, frozen=True):
    """One call of a program."""

    collectives: int  # their number
    wire_bytes: int  # of all of them
    seconds: StepTime  # of the call
    sends: list[Sends]  # the collectives, equal ones together
    rows: int  # the size of the first dim of its first input
    shape: str  # of its first input, such as 8 x 1

    def cells(self, alone: ProgramCall) -> tuple[str, ...]:
        """Show its time, and the speed-up over the call on one rank."""
        time = self.seconds
        parts = (time.work, time.kernels, time.network, time.host, time.total)
        times = (duration(part) if part else "-" for part in parts)
        speedup = f"{alone.seconds.total / time.total:.2f}" if time.total else "-"
        return str(self.collectives), *times, speedup


class HeldBytes(Record, frozen=True):
    """Bytes of the rank that holds most."""

    weights: int  # parameters, and buffers that are not written
    caches: int  # buffers that are written
    gradients: int  # of parameters
    optimizer: int  # its state for these
    activations: int  # at their peak, with inputs
    total: int  # of all

    @classmethod
    def of(cls, held: Memory) -> HeldBytes:
        return cls(held.weights, held.caches, held.gradients, held.state, held.activations, held.total)


class Degree(Record, frozen=True, kw_only=True):
    """A number of ranks that the model can be placed on."""

    ranks: int  # their number
    mesh: dict[str, int | list[int]]  # axis -> degree, or shares
    bytes: HeldBytes  # of the rank that holds most
    calls: dict[str, ProgramCall]  # of each program; one alone is called `model`
    fits: bool  # true within the limit, perhaps with more sent than without one
    searches: dict[str, int]  # how many there were, by their kind
    # what the degree does not divide, and the cost of uneven cuts, shared shares and layers that stay whole
    remarks: list[str]

    def limits(self, name: str) -> Iterator[str]:
        """Yield the parts of a call's time, and its collectives."""
        call, ranks, of = self.calls[name], _named(self.mesh), _of(name, self.calls)
        time = call.seconds
        shares = ((seconds / time.total, part) for part, seconds in time.parts.items())
        if named := [f"{share:.0%} {part}" for share, part in shares if share >= 0.005]:
            yield f"{ranks}: a call{of} is {', '.join(named)}"
        yield from (f"{ranks}: {each.text}" for each in call.sends)

    def spoken(self) -> tuple[str, ...]:
        """Return the generation speed as table cells: time to the first token, tokens of all rows, a row, a rank."""
        prefill, decode = self.calls["prefill"], self.calls["decode"]
        rate = 1 / decode.seconds.total if decode.seconds.total else math.inf
        rates = (f"{rows * rate:,.0f}" for rows in (decode.rows, 1, decode.rows / self.ranks))
        return _named(self.mesh), duration(prefill.seconds.total), *rates

    @property
    def seconds(self) -> float:
        """The time of a call of `decode`, or of one of each program if none is called so."""
        calls = [self.calls["decode"]] if "decode" in self.calls else self.calls.values()
        return math.fsum(each.seconds.total for each in calls)


class Stop(Record, frozen=True):
    """A number of ranks that no placement suits, or that was not tried."""

    ranks: int  # their number
    mesh: dict[str, int | list[int]]  # axis -> degree, or shares
    reason: str  # in words

    @classmethod
    def of(cls, mesh: Mesh, reason: str) -> Stop:
        return cls(mesh.world_size, mesh.written, reason)


class Diagnosis(Record, Shown, frozen=True, kw_only=True):
    """The numbers of ranks that a model fits on."""

    machine: str  # whose step times are predicted
    limit: int  # bytes that a rank may hold
    least: int  # the smallest number of ranks that fits
    fastest: int  # the number of ranks, of those that fit, with the fastest call (of decode, of several programs)
    cheapest: int  # likewise, with the least time of a call multiplied by its ranks
    latency: float | None  # seconds that a call may take, if a limit was given
    within: int | None  # the smallest number of ranks that fits and takes no longer
    degrees: list[Degree]  # those that are possible
    stopped: list[Stop]  # those that no placement suits
    untried: list[Stop]  # those that do not divide what is cut
    optimizer: str  # whose state ranks hold, if the program returns gradients

    def parts(self) -> Iterator[Part]:
        """Yield a line for each degree, then the obstacles and costs."""
        yield f"on {self.machine} a rank may hold {format_bytes(self.limit)}"
        ranks = "ranks" if [*self.degrees[0].mesh] == [AXIS] else "mesh"
        parts = ("weights", "caches", "gradients", f"{self.optimizer} state", "at peak", "in all")
        trains = any(each.bytes.gradients for each in self.degrees)
        shown = [at for at in range(len(parts)) if trains or at not in (2, 3)]
        held = (ranks, *(parts[at] for at in shown))
        rows = [
            (_named(each.mesh), *(format_bytes(own[at]) for at in shown), "yes" if each.fits else "no")
            for each in self.degrees
            for own in [astuple(each.bytes)]
        ]
        yield Table("a rank holds", (*held, "fits"), rows, right=held)
        called = ("sends", "work", "kernels", "network", "host", "step", "speed-up")
        for name, alone in self.degrees[0].calls.items():
            rows = [(_named(each.mesh), *each.calls[name].cells(alone)) for each in self.degrees]
            title = f"one call{_of(name, self.degrees[0].calls)}"
            yield Table(title, (ranks, *called), rows, right=(ranks, *called))
        if {"prefill", "decode"} <= self.degrees[0].calls.keys():
            first = self.degrees[0]
            steps = " and ".join(f"{first.calls[name].shape} {what}" for name, what in GENERATION.items())
            title = f"generation: {steps}, over caches of {format_bytes(first.bytes.caches)} in all"
            rows = [each.spoken() for each in self.degrees]
            yield Table(title, (ranks, *SPOKEN), rows, right=(ranks, *SPOKEN))
        yield from self._limits()
        lines = [f"{_named(each.mesh)}: {remark}" for each in self.degrees for remark in each.remarks]
        lines += [f"{_named(stop.mesh)}: not possible: {stop.reason}" for stop in self.stopped]
        lines += _folded(self.untried)
        lines.append(count_searches(sum((Counter(each.searches) for each in self.degrees), Counter())))
        yield from (*lines, "")
        yield from self._answers()

    def _answers(self) -> Iterator[str]:
        """Yield the numbers of ranks to take: the smallest, the fastest, the cheapest, the smallest within a limit."""
        calls = self.degrees[0].calls
        of = " of decode" if "decode" in calls else " of each program" if len(calls) > 1 else ""
        by_ranks = {each.ranks: each for each in self.degrees}
        fastest = by_ranks[self.fastest].seconds
        yield f"the smallest that fits: {self._option(self.least)}"
        yield f"the fastest: {self._option(self.fastest)}, {duration(fastest)} for a call{of}"
        cost = duration(self.cheapest * by_ranks[self.cheapest].seconds)
        yield f"the cheapest: {self._option(self.cheapest)}, {cost} of one device for a call{of}"
        if self.latency is not None:
            limit = f"within {duration(self.latency)} for a call{of}"
            if self.within is None:
                yield f"{limit}: none; the fastest takes {duration(fastest)}"
            else:
                yield f"the smallest {limit}: {self._option(self.within)}"

    def _option(self, ranks: int) -> str:
        mesh = next(each.mesh for each in self.degrees if each.ranks == ranks)
        return f"--tp {ranks}" if [*mesh] == [AXIS] else f"--mesh {_named(mesh)}"

    def _limits(self) -> Iterator[str]:
        """Yield the bottlenecks of the smallest degree that fits and of the fastest, and the degree where gains end."""
        fitting = [each for each in self.degrees if each.fits]
        for name in fitting[0].calls:
            of = _of(name, fitting[0].calls)
            fastest = min(fitting, key=lambda each: each.calls[name].seconds.total)
            for each in [fitting[0], *([fastest] if fastest is not fitting[0] else [])]:
                yield from each.limits(name)
            least = min(self.degrees, key=lambda each: each.calls[name].seconds.total)
            if least is not self.degrees[-1]:
                yield f"beyond --tp {least.mesh[AXIS]} a call{of} takes no less: the network takes what is saved"
        if len(self.degrees) > 1 and len({each.bytes.weights for each in self.degrees}) == 1:
            yield (
                "nothing is cut: convert says how much longer a call would take with each layer cut; "
                "--optimize memory cuts all the same"
            )


@collector_rests()
def diagnose(
    exported_program: ExportedProgram | Programs,
    *,
    other_axes: Mapping[str, int] | None = None,
    inputs: Given = None,
    outputs: Given = None,
    machine: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    optimizer: Optimizer = "adamw",
    weights: Mapping[str, float] | None = None,
    latency: float | None = None,
) -> Diagnosis:
    """Place a model on every degree up to 16 that is a power of two, or divides every dim that two ranks cut.

    Args:
        exported_program: one program, or several that share their weights, as in `parallelize`.
        other_axes: the other axes of the mesh, such as `{"dp": 2}`, before `tp`, whose degrees are tried.
        inputs: as in `parallelize`, like `outputs`: `{"x": {"dp": "S(0)"}}`.
        machine: the machine to predict step times for: a YAML file that describes one device and its links, or "h100".
        memory: limit on a rank's bytes (or "24GB"); by default 0.9 of the machine's, less 0.4 GB for NCCL.
        optimizer: whose state counts as memory, if the program returns gradients, as in `parallelize`.
        weights: the number of calls of each of several programs, as in `parallelize`.
        latency: seconds that a call may take: the result names the smallest number of ranks within it.

    Raises:
        ShardingError: no degree fits, with the excess and the smallest degree that does.
        MeshError: `other_axes` has the axis `tp`, or is not a mesh.
        MachineError, PlanError, ProgramError, UnsupportedError: as `parallelize`.
    """
    described = read_machine(machine)
    limit = described.usable_memory if memory is None else read_memory(memory)
    if other_axes and AXIS in other_axes:
        raise MeshError(f"the degrees of {AXIS} are tried, and none is given", help="give the other axes, such as dp=2")
    one = Mesh.of({**(other_axes or {}), AXIS: 1})
    conversions = conversions_of(exported_program, one, read_plan("auto"), inputs, outputs)
    calls = tuple(read_calls(weights, conversions).values())
    examined = _Examined(conversions, Aim(described, calls=calls, optimizer=read_optimizer(optimizer)), limit)
    degrees, stopped = {1: examined.degree(1)}, list[Stop]()
    candidates = [2]
    for tp in counted(candidates, "trying degrees", "degrees"):  # more of them by what two ranks cut
        try:
            degrees[tp] = examined.degree(tp)
        except (ShardingError, UnsupportedError) as error:
            stopped.append(Stop.of(examined.mesh(tp), error.message))
        if tp == 2:
            common = math.gcd(*(each.count for each in examined.obstacles))
            candidates += [n for n in range(3, MOST + 1) if n & (n - 1) == 0 or (common and common % n == 0)]
    fitting = sorted((each for each in degrees.values() if each.fits), key=lambda each: each.ranks)
    if not fitting:
        raise _too_large(examined)
    untried = [
        Stop.of(examined.mesh(tp), _undivided(examined.obstacles, tp, foremost=True))
        for tp in range(3, MOST + 1)
        if tp not in candidates and examined.obstacles
    ]
    return Diagnosis(
        machine=described.name,
        limit=limit,
        least=fitting[0].ranks,
        fastest=min(fitting, key=lambda each: each.seconds).ranks,
        cheapest=min(fitting, key=lambda each: each.seconds * each.ranks).ranks,
        latency=latency,
        within=next((each.ranks for each in fitting if latency is not None and each.seconds <= latency), None),
        degrees=list(degrees.values()),
        stopped=stopped,
        untried=untried,
        optimizer=optimizer,
    )


class _Examined:
    """Programs placed on one degree after another; the result of two ranks is kept to compare the others with."""

    def __init__(self, conversions: Mapping[str, Conversion], aim: Aim, limit: int) -> None:
        self.conversions, self.aim, self.machine, self.limit = conversions, aim, aim.machine, limit
        self.pair: Solution | None = None
        self.obstacles: Sequence[Obstacle] = ()
        self.least: dict[int, Memory] = {}  # by ranks, where each holds as little as the search can do with

    def mesh(self, tp: int) -> Mesh:
        first = next(iter(self.conversions.values())).mesh
        return replace(first, axes=tuple((axis, tp if axis == AXIS else degree) for axis, degree in first.axes))

    def degree(self, tp: int) -> Degree:
        """Place the programs on so many ranks.

        Raises:
            ShardingError, UnsupportedError: no placement suits the degree.
        """
        asked = self.mesh(tp)
        found, made, least, searches = place_within(self.conversions, asked, self.aim, self.limit)
        calls = {}
        for (name, own), program in zip(made.items(), found.programs, strict=True):
            sends = _sends(own.partition.collectives(), found.mesh, self.machine)
            calls[name] = ProgramCall(
                sum(each.count for each in sends),
                sum(each.count * each.wire_bytes for each in sends),
                own.predict(self.machine).total,
                sends,
                *_rows(program),
            )
        if tp == 2:
            self.pair, self.obstacles = found, find_obstacles(found)
        notes = dict.fromkeys(note.text for own in made.values() for note in own.resharded.notes if note.kind == "cut")
        uneven = (text for text in notes if "largest share" in text)
        undivided = filter(None, [_undivided(self.obstacles, tp)])
        held = measure_memory(found)
        self.least[asked.world_size] = least
        return Degree(
            ranks=asked.world_size,
            mesh=asked.written,
            bytes=HeldBytes.of(held),
            calls=calls,
            fits=least.total <= self.limit,
            searches=dict(searches),
            remarks=[*undivided, *uneven, *_shared(found), *_whole(found, self.pair)],
        )


def _sends(collectives: Sequence[Collective], mesh: Mesh, machine: Machine) -> list[Sends]:
    alike = Counter(
        (each.kind, each.wire_bytes, machine.collective_seconds(each.kind, mesh.read(each.axis), each.wire_bytes, mesh))
        for each in collectives
    )
    return [Sends(kind, count, wire_bytes, seconds) for (kind, wire_bytes, seconds), count in alike.items()]


def _rows(program: PlannedProgram) -> tuple[int, str]:
    """Return the size of the first dim of the first input that has one, and all its sizes."""
    sizes = next((shape for node in program.user_inputs() if (shape := edit.shape(node))), (1,))
    return sym_hint(sizes[0]), " x ".join(str(sym_hint(size)) for size in sizes)


def _undivided(obstacles: Sequence[Obstacle], tp: int, foremost: bool = False) -> str:
    """Describe the dims that so many ranks cannot share evenly; `foremost`: those of the first kind only."""
    uneven = [each for each in obstacles if each.count % tp]
    listed = [each for each in uneven if not foremost or each.kind == uneven[0].kind]
    return f"{', '.join(map(str, listed))} do not divide evenly" if listed else ""


def _folded(stops: Sequence[Stop]) -> Iterator[str]:
    """Put stops with one reason on one line."""
    alike: dict[str, list[str]] = {}
    for stop in stops:
        alike.setdefault(stop.reason, []).append(_named(stop.mesh))
    yield from (f"{' '.join(names)}: not tried: {reason}" for reason, names in alike.items())


def _of(name: str, programs: Iterable[str]) -> str:
    return "" if is_single(programs) else f" of {name}"


def _named(mesh: Mapping[str, int | list[int]]) -> str:
    return mesh_text(mesh).removeprefix(f"{AXIS}=")


def _shared(found: Solution) -> Iterator[str]:
    """Describe weights that only one half of the axis cuts, and the additional bytes of a rank."""
    split, more = found.mesh.size(found.model), dict[str, tuple[int, int]]()
    for program in found.programs:
        first_of = tied(program)
        for node, fqn in program.leaves():
            shares = found.mesh.size(tuple(axis for axis in found.leaves[node].cut_axes if axis in found.model))
            if 1 < shares < split and first_of[node.name] == node.name and edit.ndim(node) > 1:
                held = local_bytes(edit.fake(node), found.leaves[node], found.mesh)
                more[fqn] = shares, held - held * shares // split
    alike = Counter[tuple[str, int]]()
    for fqn, (shares, count) in more.items():
        alike[fold_layers(fqn), shares] += count
    for (name, shares), count in alike.items():
        yield f"{name}: {shares} shares, each on {split // shares} ranks: each rank holds {format_bytes(count)} more"


def _whole(found: Solution, pair: Solution | None) -> Iterator[str]:
    """Describe layers that two ranks cut and this degree does not."""
    cut = {own.name for own in pair.layers.values() if own.dim is not None} if pair is not None else set()
    for name in dict.fromkeys(fold_layers(o.name) for o in found.layers.values() if o.dim is None and o.name in cut):
        yield f"{name}: whole on every rank: cutting it would cost more, or its dims are too small"


def _too_large(examined: _Examined) -> ShardingError:
    (ranks, least), limit = min(examined.least.items(), key=lambda each: each[1].total), examined.limit
    further = (2 * MOST << power for power in itertools.count())
    tp = next((n for n in further if n > FURTHEST or examined.degree(n).fits), FURTHEST)
    return ShardingError(
        f"no degree up to {MOST} fits: one of {ranks} ranks would hold {least.text}; that is "
        f"{format_bytes(least.total - limit)} more than the limit of {format_bytes(limit)}",
        help=(f"use {examined.mesh(tp).world_size} ranks, or " if tp <= FURTHEST else "use ")
        + f"a limit of at least {least.total} bytes",
    )
