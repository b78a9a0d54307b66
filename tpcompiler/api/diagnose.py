"""Find how many ranks a model can use, or the shares of unequal devices, with the search on a list of meshes."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch.export import ExportedProgram

from tpcompiler.api.request import AUTO, Given, Programs, Request, read_calls
from tpcompiler.api.try_meshes import AXIS, Device, MeshCosts, MeshTrials, undivided_by
from tpcompiler.cost.amounts import read_memory
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import MeshError, PlanError, ShardingError, UnsupportedError, option
from tpcompiler.ir.dim_sharding import apportion
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.runtime.artifact import is_single
from tpcompiler.runtime.records import Optimizer, Record, mesh_text
from tpcompiler.solver.report import count_searches
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted
from tpcompiler.terminal.tables import Part, Shown, Table

MOST = 16  # largest degree to try
FURTHEST = 1024  # largest degree to look for if a limit on memory needs more
FINEST = 16  # parts into which small shares divide a model
CLOSE = 0.03  # of the whole: shares in fewer parts are taken if none is further from what was asked
GENERATION = {"prefill": "tokens in a prompt", "decode": "in a step"}


class Diagnosis(Record, Shown, frozen=True, kw_only=True):
    """The meshes that a model can be placed on; a mesh is named as `--mesh` takes it, such as `tp=2:1:1`."""

    machine: str  # whose step times are predicted
    optimizer: str  # whose state ranks hold, if the program returns gradients
    meshes: dict[str, MeshCosts]  # those that are possible; of unequal devices, equal shares are the first
    left_out: dict[str, str]  # the reason for each other mesh
    least: str  # the smallest mesh that fits
    fastest: str  # of those that fit, the mesh with the fastest calls
    cheapest: str  # likewise, with the least time of the calls multiplied by the ranks
    latency: float | None  # seconds that the calls may take, if a limit was given
    within: str | None  # the smallest mesh that fits and takes no longer
    # how often each program is called in these times: as asked, or `decode` once, or each once
    calls: dict[str, float]
    shapes: dict[str, list[int]]  # the sizes of each program's first input
    searches: dict[str, int]  # how many there were, by their kind

    def seconds(self, mesh: str) -> float:
        """Return the time of the calls on a mesh."""
        return _seconds(self.calls, self.meshes[mesh])

    def parts(self) -> Iterator[Part]:
        """Yield a line for each mesh, then the obstacles and costs, then the meshes to take."""
        first = next(iter(self.meshes.values()))
        if not self._has_devices:
            yield f"on {self.machine} a rank may hold {format_bytes(first.costs[0].limit)}"
        yield self._table()
        if GENERATION.keys() <= self.shapes.keys():
            steps = (f"{' x '.join(map(str, self.shapes[name]))} {what}" for name, what in GENERATION.items())
            yield f"generation: {' and '.join(steps)}, over caches of {format_bytes(first.costs[0].caches)} in all"
        yield from self._limits()
        yield from (f"{each.name}: {remark}" for each in self.meshes.values() for remark in each.remarks)
        for reason in dict.fromkeys(self.left_out.values()):
            names = (name.removeprefix(f"{AXIS}=") for name, own in self.left_out.items() if own == reason)
            yield f"{' '.join(names)}: {reason}"
        yield from (count_searches(Counter(self.searches)), "")
        yield from self._answers()

    @property
    def _has_devices(self) -> bool:
        return len(next(iter(self.meshes.values())).costs) > 1

    def _table(self) -> Table:
        """Return a row for each mesh, or for each device on each mesh."""
        rows = [(each, rank, own) for each in self.meshes.values() for rank, own in enumerate(each.costs)]
        first = rows[0][0]
        header = "mesh" if [*first.mesh] != [AXIS] else "shares" if self._has_devices else "ranks"
        columns = {header: [each.name for each, _, _ in rows]}
        if self._has_devices:
            columns["rank"] = [str(rank) for _, rank, _ in rows]
            columns["device"] = [own.device for _, _, own in rows]
            columns["may hold"] = [format_bytes(own.limit) for _, _, own in rows]
        kinds = ("weights", "caches", "gradients", f"{self.optimizer} state", "at peak", "in all")
        for kind, counts in zip(kinds, zip(*(own.held for _, _, own in rows), strict=True), strict=True):
            if any(counts):
                columns[kind] = [*map(format_bytes, counts)]
        columns["fits"] = ["yes" if each.fits else "no" for each, _, _ in rows]
        for name in self.shapes:
            columns[f"step{self._of(name)}"] = [duration(own.seconds[name].total) for _, _, own in rows]
        if GENERATION.keys() <= self.shapes.keys():
            rows_of = self.shapes["decode"][0]
            columns["tokens/s"] = [f"{_ratio(rows_of, each.seconds['decode'].total):,.0f}" for each, _, _ in rows]
        alone = _seconds(self.calls, first)
        columns["speed-up"] = [f"{_ratio(alone, _seconds(self.calls, each)):.2f}" for each, _, _ in rows]
        right = [header for header in columns if header not in ("device", "fits")]
        return Table("a rank holds, and a call takes", [*columns], [*zip(*columns.values(), strict=True)], right)

    def _of(self, name: str) -> str:
        return "" if is_single(self.shapes) else f" of {name}"

    def _limits(self) -> Iterator[str]:
        """Yield the bottlenecks of the smallest mesh that fits and of the fastest, and the degree where gains end."""
        fitting = [each for each in self.meshes.values() if each.fits]
        for name in self.shapes:
            fastest = min(fitting, key=lambda each: each.seconds[name].total)
            for each in [fitting[0], *([fastest] if fastest is not fitting[0] else [])]:
                time = each.seconds[name]
                shares = ((seconds / time.total, part) for part, seconds in time.parts.items())
                if named := [f"{share:.0%} {part}" for share, part in shares if share >= 0.005]:
                    yield f"{each.name}: a call{self._of(name)} is {', '.join(named)}"
                if count := each.collectives[name]:
                    yield f"{each.name}: collectives: {count}, {format_bytes(each.wire_bytes[name])} sent by a rank"
            *_, last = self.meshes.values()
            least = min(self.meshes.values(), key=lambda each: each.seconds[name].total)
            if least is not last and not self._has_devices:
                text = f"beyond --tp {least.mesh[AXIS]} a call{self._of(name)} takes no less"
                yield f"{text}: the network takes what is saved"
        weights = [max(own.weights for own in each.costs) for each in self.meshes.values()]
        if len(weights) > 1 and len(set(weights)) == 1:
            yield (
                "nothing is cut: convert says how much longer a call would take with each layer cut; "
                "--optimize memory cuts all the same"
            )

    def _answers(self) -> Iterator[str]:
        """Yield the meshes to take: the smallest, the fastest, the cheapest, the smallest within a limit."""
        of = " of decode" if [*self.calls] == ["decode"] else " of each program" if len(self.calls) > 1 else ""
        of += ", as often as asked" if len(set(self.calls.values())) > 1 else ""
        fastest = self.meshes[self.fastest]
        if not self._has_devices:
            yield f"the smallest that fits: {self.meshes[self.least].option}"
        yield f"the fastest: {fastest.option}, {duration(self.seconds(self.fastest))} for a call{of}"
        if not self._has_devices:
            cheapest = self.meshes[self.cheapest]
            cost = duration(cheapest.ranks * self.seconds(self.cheapest))
            yield f"the cheapest: {cheapest.option}, {cost} of one device for a call{of}"
        if self.latency is not None:
            limit = f"within {duration(self.latency)} for a call{of}"
            if self.within is None:
                yield f"{limit}: none; the fastest takes {duration(self.seconds(self.fastest))}"
            else:
                yield f"the smallest {limit}: {self.meshes[self.within].option}"
        equal = next(iter(self.meshes))
        if self._has_devices and equal != self.fastest:
            yield self._compare_equal(self.meshes[equal], self.seconds(equal) / self.seconds(self.fastest))

    def _compare_equal(self, equal: MeshCosts, times: float) -> str:
        if equal.fits:
            return f"equal shares, {equal.option}, take {times:.2f} times as long: the slowest rank counts"
        last = equal.costs[-1]
        return (
            f"equal shares, {equal.option}, do not fit: a rank holds at least {format_bytes(equal.least)}, and "
            f"{last.device} may hold {format_bytes(last.limit)}"
        )


@collector_rests()
def diagnose(
    exported_program: ExportedProgram | Programs,
    *,
    devices: Sequence[str] | None = None,
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

    With `devices`: on these, in equal shares, and in those of their memory, bandwidth and FLOP/s. A call takes as long
    as its slowest rank, each on its own machine.

    Args:
        exported_program: one program, or several that share their weights, as in `parallelize`.
        devices: of each rank, the largest first: the bytes that it may hold ("24GB"), or a machine ("h100", a file).
        other_axes: the other axes of the mesh, such as `{"dp": 2}`, before `tp`, whose degrees are tried.
        inputs: as in `parallelize`, like `outputs`: `{"x": {"dp": "S(0)"}}`.
        machine: the machine to predict step times for: a YAML file that describes one device and its links, or "h100".
        memory: limit on a rank's bytes (or "24GB"); by default 0.9 of the machine's, less 0.4 GB for NCCL.
        optimizer: whose state counts as memory, if the program returns gradients, as in `parallelize`.
        weights: the number of calls of each of several programs, as in `parallelize`.
        latency: seconds that a call may take: the result names the smallest mesh within it.

    Raises:
        ShardingError: no mesh fits, with the excess and the smallest degree that does.
        MeshError: `other_axes` has the axis `tp`, or is not a mesh; fewer than two devices, one that holds more than
            one before it, or devices with other axes or a limit.
        BudgetError, MachineError, PlanError, ProgramError, UnsupportedError: as `parallelize`.
    """
    described = read_machine(machine)
    if devices is None:
        if other_axes and AXIS in other_axes:
            help = "give the other axes, such as dp=2"
            raise MeshError(f"the degrees of {AXIS} are tried, and none is given", help=help)
        limit = described.usable_memory if memory is None else read_memory(memory)
        own, first = [Device(described.name, described, limit)], Mesh.of({**(other_axes or {}), AXIS: 1})
    elif other_axes or memory is not None:
        given = option("--other-axes", "other_axes") if other_axes else option("--memory", "memory")
        raise MeshError(f"{given} next to {option('--devices', 'devices')}", help=f"leave out {given}")
    else:
        own = _read_devices(devices, described)
        first = Mesh.of(len(own))
    chosen = own[0].machine
    request = Request(
        exported_program, first, AUTO, inputs, outputs, machine=chosen, optimizer=optimizer, weights=weights
    )
    conversions = {name: each.with_asked(memory=None) for name, each in request.conversions().items()}
    if any(each.cuts_batch for each in conversions.values()):
        raise PlanError(f"inputs={AUTO!r} where meshes are compared", help="place the batch by hand")
    calls = read_calls(weights, conversions)
    trials = MeshTrials(conversions, own)
    meshes = [trials.degree(1), trials.degree(2)] if devices is None else [*_share_meshes(own)]
    placed, impossible, untried = dict[str, MeshCosts](), dict[str, str](), dict[str, str]()
    for mesh in counted(meshes, "trying meshes", "meshes"):  # more of them by what two ranks cut
        try:
            placed[mesh_text(mesh.written)] = trials.place(mesh)
        except (ShardingError, UnsupportedError) as error:
            if not placed:
                raise
            impossible[mesh_text(mesh.written)] = f"not possible: {error.message}"
        if devices is None and mesh.degree(AXIS) == 2:
            common = math.gcd(*(each.count for each in trials.obstacles))
            for tp in range(3, MOST + 1):
                if tp & (tp - 1) == 0 or (common and common % tp == 0):
                    meshes.append(trials.degree(tp))
                elif reason := undivided_by(trials.obstacles, tp, foremost=True):
                    untried[mesh_text(trials.degree(tp).written)] = f"not tried: {reason}"
    fitting = {name: each for name, each in placed.items() if each.fits}
    if not fitting:
        raise _too_large(trials, placed)
    counts = calls or ({"decode": 1.0} if "decode" in conversions else dict.fromkeys(conversions, 1.0))
    seconds = {name: _seconds(counts, each) for name, each in fitting.items()}
    smallest = sorted(fitting, key=lambda name: fitting[name].ranks)
    return Diagnosis(
        machine=described.name,
        optimizer=optimizer,
        meshes=placed,
        left_out=impossible | untried,
        least=smallest[0],
        fastest=min(smallest, key=seconds.__getitem__),
        cheapest=min(smallest, key=lambda name: seconds[name] * fitting[name].ranks),
        latency=latency,
        within=next((name for name in smallest if latency is not None and seconds[name] <= latency), None),
        calls=counts,
        shapes=trials.shapes,
        searches=dict(trials.searches),
    )


def _seconds(calls: Mapping[str, float], costs: MeshCosts) -> float:
    return math.fsum(count * costs.seconds[name].total for name, count in calls.items())


def _ratio(one: float, other: float) -> float:
    return one / other if other else math.inf


def _read_devices(given: Sequence[str], described: Machine) -> list[Device]:
    """Return the devices of all ranks.

    Raises:
        MeshError: fewer than two, or one that holds more than one before it.
    """
    devices = [Device.read(each, described) for each in given]
    if len(devices) < 2:
        help = "give one for each rank: --devices 24GB,12GB,12GB"
        raise MeshError(f"{len(devices)} device shares nothing", help=help)
    for one, other in itertools.pairwise(devices):
        if other.limit > one.limit:
            raise MeshError(
                f"the device {other.given} may hold {format_bytes(other.limit)}, more than {one.given} before it",
                help="give the largest device first: rank 0 has the largest share",
            )
    return devices


def _share_meshes(devices: Sequence[Device]) -> Iterator[Mesh]:
    """Yield equal shares, and those of each property of the devices."""
    wanted = [[1.0] * len(devices), [float(own.limit) for own in devices]]
    wanted += [[own.machine.memory_bandwidth for own in devices], [own.machine.flops for own in devices]]
    meshes = (Mesh.of({AXIS: list(_shares(each))}) for each in wanted if each == sorted(each, reverse=True))
    yield from dict.fromkeys(meshes)


def _shares(wanted: Sequence[float]) -> tuple[int, ...]:
    """Return small whole shares that are close to these amounts."""
    exact = [each / sum(wanted) for each in wanted]
    integers = tuple(max(1, round(each * 1e6)) for each in exact)

    def far(shares: Sequence[int]) -> float:
        return max(abs(share / sum(shares) - part) for share, part in zip(shares, exact, strict=True))

    tried = [shares for parts in range(len(wanted), FINEST + 1) if min(shares := apportion(parts, integers))]
    found = next((shares for shares in tried if far(shares) <= CLOSE), None)
    return found or min(tried, key=far, default=(1,) * len(wanted))


def _too_large(trials: MeshTrials, placed: Mapping[str, MeshCosts]) -> ShardingError:
    """Return the error of meshes none of which fits, with the numbers of the one that comes nearest."""
    over = [
        (held - own.limit, name, rank)
        for name, each in placed.items()
        for rank, own in enumerate(each.costs)
        for held in [own.total if rank else each.least]
    ]
    excess, name, rank = min((max(own for own in over if own[1] == name) for name in placed), key=lambda own: own[0])
    limit, least = trials.devices[rank].limit, trials.least[name]
    held = format_bytes(limit + excess) if rank else least.text
    further = (2 * MOST << power for power in itertools.count())
    if len(trials.devices) > 1:
        help = "use more or larger devices: tpcompiler plan without --devices compares numbers of ranks"
    else:
        tp = next((n for n in further if n > FURTHEST or trials.place(trials.degree(n)).fits), FURTHEST)
        ranks = f"{trials.degree(tp).world_size} ranks, or " if tp <= FURTHEST else ""
        help = f"use {ranks}a limit of at least {least.total} bytes"
    return ShardingError(
        f"no mesh that was tried fits: on {name}, rank {rank} would hold {held}; that is {format_bytes(excess)} more "
        f"than the limit of {format_bytes(limit)}",
        help=help,
    )
