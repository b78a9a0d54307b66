"""Find the shares of unequal devices, from the memory and the speed of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler.api import Given, Programs, conversions_of, read_calls, read_plan
from tpcompiler.api.doctor import AXIS, HeldBytes
from tpcompiler.api.placed import Placed, place_within
from tpcompiler.cost.amounts import read_bytes, read_memory
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.errors import BudgetError, MeshError, ShardingError
from tpcompiler.ir.dim_sharding import apportion
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.optimizer import read_optimizer
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.runtime.records import Optimizer, Record, mesh_text
from tpcompiler.solver.estimate import measure_memory
from tpcompiler.solver.report import count_searches
from tpcompiler.solver.task import Aim
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import counted
from tpcompiler.terminal.tables import Part, Shown, Table

FINEST = 16  # parts into which small shares divide a model
MOST_TRIALS = 4  # of placements in the same shares
CLOSE = 0.03  # of the whole: shares in fewer parts are taken if none is further from what was asked


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as the user gave it, its machine, and the bytes that a rank may hold there."""

    given: str
    machine: Machine
    limit: int

    @classmethod
    def read(cls, given: str, machine: Machine) -> Device:
        """Return the device of an amount of memory, on this machine otherwise, or of another machine's name or file."""
        try:
            read_bytes(given)
        except BudgetError:  # no amount
            own = read_machine(given)
            return cls(given, own, own.usable_memory)
        return cls(given, machine, read_memory(given))


class DeviceRank(Record, frozen=True):
    """A rank, and its device."""

    device: str  # as it was given
    limit: int  # bytes that it may hold
    bytes: HeldBytes  # those that it holds
    seconds: dict[str, StepTime]  # of a call of each program, if no other rank were slower


class Split(Record, frozen=True):
    """Shares that were tried."""

    mesh: dict[str, int | list[int]]  # axis -> the shares, or the degree if they are equal
    ranks: list[DeviceRank]  # in order
    seconds: dict[str, float]  # of a call of each program: of its slowest rank
    step: float  # seconds of all calls, as often as they are asked for
    fits: bool  # true if each rank is within its limit
    least: int  # bytes of rank 0 where it holds as little as the search can do with

    @property
    def name(self) -> str:
        return mesh_text(self.mesh).removeprefix(f"{AXIS}=")


class DeviceDiagnosis(Record, Shown, frozen=True, kw_only=True):
    """The shares in which devices run a model fastest."""

    best: Split  # the fastest that fits
    splits: list[Split]  # all that were tried, the equal one first
    searches: dict[str, int]  # how many there were, by their kind

    def parts(self) -> Iterator[Part]:
        """Yield the ranks of all shares that were tried, and the fastest that fit."""
        for split in self.splits:
            named = (
                "rank",
                "device",
                "may hold",
                "weights",
                "at peak",
                "in all",
                *(f"step{_of(name)}" for name in split.seconds),
            )
            rows = [
                (
                    str(rank),
                    own.device,
                    *map(format_bytes, (own.limit, own.bytes.weights, own.bytes.activations, own.bytes.total)),
                    *(duration(time.total) for time in own.seconds.values()),
                )
                for rank, own in enumerate(split.ranks)
            ]
            yield Table(
                f"--tp {split.name}{'' if split.fits else ', which does not fit'}",
                named,
                rows,
                right=(*named[:1], *named[2:]),
            )
        yield from (count_searches(Counter(self.searches)), "")
        yield f"the fastest that fits: --tp {self.best.name}"
        equal = self.splits[0]
        if equal is self.best:
            return
        if equal.fits:
            times = f"{equal.step / self.best.step:.2f} times as long"
            yield f"equal shares, --tp {equal.name}, take {times}: the slowest rank counts"
        else:
            yield (
                f"equal shares, --tp {equal.name}, do not fit: a rank holds at least {format_bytes(equal.least)}, and "
                f"{equal.ranks[-1].device} may hold {format_bytes(equal.ranks[-1].limit)}"
            )


@collector_rests()
def diagnose_devices(
    exported_program: ExportedProgram | Programs,
    devices: Sequence[str],
    *,
    inputs: Given = None,
    outputs: Given = None,
    machine: str | os.PathLike[str] | None = None,
    optimizer: Optimizer = "adamw",
    weights: Mapping[str, float] | None = None,
) -> DeviceDiagnosis:
    """Place a model on unequal devices: in equal shares, and in those of their memory, bandwidth and FLOP/s.

    A step takes as long as its slowest rank, each on its own machine.

    Args:
        exported_program: one program, or several that share their weights, as in `parallelize`.
        devices: of each rank, the largest first: the bytes that it may hold ("24GB"), or a machine ("h100", a file).
        inputs: as in `parallelize`, like `outputs`.
        machine: that of devices of which only the memory is given.
        optimizer: whose state counts as memory, if the program returns gradients, as in `parallelize`.
        weights: the number of calls of each of several programs, as in `parallelize`.

    Raises:
        ShardingError: no shares fit, with the excess.
        MeshError: fewer than two devices, or a device that holds more than one before it.
        BudgetError, MachineError, PlanError, ProgramError, UnsupportedError: as `parallelize`.
    """
    own = [Device.read(given, read_machine(machine)) for given in devices]
    if len(own) < 2:
        raise MeshError(f"{len(own)} device shares nothing", help="give one for each rank: --devices 24GB,12GB,12GB")
    for one, other in itertools.pairwise(own):
        if other.limit > one.limit:
            raise MeshError(
                f"the device {other.given} may hold {format_bytes(other.limit)}, more than {one.given} before it",
                help="give the largest device first: rank 0 has the largest share",
            )
    conversions = conversions_of(exported_program, Mesh.of(len(own)), read_plan("auto"), inputs, outputs)
    calls = tuple(read_calls(weights, conversions).values())
    aim = Aim(own[0].machine, calls=calls, optimizer=read_optimizer(optimizer))
    splits, searches = list[Split](), Counter[str]()
    for mesh in counted(list(_meshes(own)), "trying shares", "shares"):
        splits.append(_place(conversions, mesh, aim, own, searches))
    fitting = [split for split in splits if split.fits]
    if not fitting:
        raise _too_large(splits)
    return DeviceDiagnosis(best=min(fitting, key=operator.attrgetter("step")), splits=splits, searches=dict(searches))


def _meshes(devices: Sequence[Device]) -> Iterator[Mesh]:
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


def _place(
    conversions: Mapping[str, Conversion], mesh: Mesh, aim: Aim, devices: Sequence[Device], searches: Counter[str]
) -> Split:
    """Place programs in these shares, and again with less on the first rank while others hold too much.

    Of what is cut then, the first rank is rid of less than a rank with a smaller share.
    """
    limit, deals = devices[0].limit, mesh.deals(AXIS)
    counts = deals if isinstance(deals, tuple) else (1,) * deals
    split: Split | None = None
    for _ in range(MOST_TRIALS):
        placed = place_within(conversions, mesh, aim, limit)
        searches.update(placed.searches)
        if split is None or placed.least.total <= limit:
            split = _split(placed, mesh, devices, aim.calls)
        freed = [(sum(counts) - counts[0]) / (sum(counts) - count) for count in counts]
        over = [(each.bytes.total - each.limit) * part for each, part in zip(split.ranks, freed, strict=True)]
        if max(over) <= 0 or placed.least.total > limit:
            break
        limit = split.ranks[0].bytes.total - math.ceil(max(over))
    assert split is not None
    return structs.replace(split, least=placed.least.total)


def _split(placed: Placed, mesh: Mesh, devices: Sequence[Device], calls: Sequence[float]) -> Split:
    ranks = []
    for rank, own in enumerate(devices):
        seconds = {name: made.predict(own.machine, rank).total for name, made in placed.made.items()}
        held = measure_memory(placed.found, rank)
        ranks.append(DeviceRank(own.given, own.limit, HeldBytes.of(held), seconds))
    slowest = {name: max(each.seconds[name].total for each in ranks) for name in placed.made}
    fits = placed.least.total <= devices[0].limit and all(each.bytes.total <= each.limit for each in ranks)
    step = math.fsum(map(operator.mul, calls or itertools.repeat(1.0), slowest.values()))
    return Split(mesh.written, ranks, slowest, step, fits, placed.least.total)


def _of(name: str) -> str:
    return f" of {name}" if name != "model" else ""


def _too_large(splits: Sequence[Split]) -> ShardingError:
    """Return the error of shares none of which fit, with the numbers of those that come nearest."""

    def excess(split: Split) -> tuple[int, int]:
        held = [split.least, *(each.bytes.total for each in split.ranks[1:])]
        return max((count - own.limit, rank) for rank, (count, own) in enumerate(zip(held, split.ranks, strict=True)))

    nearest = min(splits, key=excess)
    count, rank = excess(nearest)
    own = nearest.ranks[rank]
    return ShardingError(
        f"no shares of these devices fit: in {nearest.name}, rank {rank} would hold {format_bytes(own.limit + count)}, "
        f"{format_bytes(count)} more than it may",
        help="use more or larger devices: tpcompiler plan without --devices compares numbers of ranks",
    )
