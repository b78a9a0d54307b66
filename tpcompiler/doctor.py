"""How many ranks a model may run on, what each number costs, and what stands in the way: found by the search."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal
from torch.export import ExportedProgram

from tpcompiler.api import conversions_of, read_plan
from tpcompiler.cost.machine import DEFAULT, Machine
from tpcompiler.cost.objective import local_bytes
from tpcompiler.errors import ShardingError
from tpcompiler.ir.collector import collector_rests
from tpcompiler.ir.program import tied
from tpcompiler.pipeline import solved_together
from tpcompiler.progress import counted
from tpcompiler.solver.memory import Memory, measure_memory
from tpcompiler.solver.place import Aim, TooLarge
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.step_time import StepTime, measure_step_time
from tpcompiler.tables import Part, Shown, Table

MOST = 16  # ranks, of the degrees that are tried
UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
FURTHEST = 1024  # ranks, where a limit on memory is not met by fewer


@dataclass(frozen=True)
class Degree:
    """What the search makes of a number of ranks, over one axis or, where ranks share heads, over the two of `mesh`.

    Attributes:
        memory: bytes of the rank that holds most.
        least: the same where a rank is to hold as little as the search can do with.
        collectives, wire_bytes: of one call; what a rank sends.
        fits: within the limit, maybe with more sent than without one.
        remarks: what uneven cuts, shared shares and layers that stay whole cost.
    """

    ranks: int
    mesh: dict[str, int]
    memory: Memory
    least: Memory
    collectives: int
    wire_bytes: int
    seconds: StepTime
    fits: bool
    remarks: tuple[str, ...]

    def row(self) -> tuple[str, ...]:
        """What is shown of it."""
        held = (self.memory.weights, self.memory.caches, self.memory.activations, self.memory.total)
        step = _duration(self.seconds.total)
        sent = str(self.collectives), decimal(self.wire_bytes)
        return (str(self.ranks), *map(decimal, held), *sent, step, "yes" if self.fits else "no")

    def to_data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ranks": self.ranks,
            "mesh": self.mesh,
            "bytes": {
                "weights": self.memory.weights,
                "caches": self.memory.caches,
                "activations": self.memory.activations,
                "total": self.memory.total,
            },
            "collectives": self.collectives,
            "wire_bytes": self.wire_bytes,
            "seconds": {**self.seconds._asdict(), "total": self.seconds.total},
            "fits": self.fits,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True)
class Diagnosis(Shown):
    """What each degree gives on a machine.

    Attributes:
        stopped: degrees that no placement suits, and why.
        limit: bytes that a rank may hold.
        least: the smallest degree that fits.
    """

    machine: str
    degrees: tuple[Degree, ...]
    stopped: dict[int, str]
    limit: int
    least: int

    def parts(self) -> Iterator[Part]:
        """A line for each degree; then what stops degrees, or costs."""
        yield f"on {self.machine} a rank may hold {decimal(self.limit)}"
        headers = ("ranks", "weights", "caches", "at peak", "in all", "count", "sent", "step", "fits")
        rows = [each.row() for each in self.degrees]
        yield Table("of each rank, in one call", headers, rows, right=headers[:-1])
        lines = [f"{each.ranks}: {remark}" for each in self.degrees for remark in each.remarks]
        lines += [f"{ranks}: not possible: {reason}" for ranks, reason in self.stopped.items()]
        yield from (*lines, "") if lines else ()
        yield f"the smallest that fits: --tp {self.least}"

    def to_data(self) -> dict[str, Any]:
        """As JSON."""
        stopped = [{"ranks": ranks, "reason": reason} for ranks, reason in self.stopped.items()]
        degrees = [each.to_data() for each in self.degrees]
        return {
            "machine": self.machine,
            "limit": self.limit,
            "least": self.least,
            "degrees": degrees,
            "stopped": stopped,
        }


@collector_rests()
def diagnose(
    exported_program: ExportedProgram,
    *,
    machine: str | os.PathLike[str] = DEFAULT,
    memory: int | None = None,
) -> Diagnosis:
    """Place a model on every degree that is a power of two, or divides all that two ranks cut, up to 16.

    Args:
        machine: whose step times are predicted: the YAML file that describes one device and its links, or "h100".
        memory: the most bytes that a rank may hold; by default what the machine has.

    Raises:
        ShardingError: no degree fits; by how much, and the least one that does.
        MachineError, ProgramError, UnsupportedError: as `parallelize`.
    """
    described = Machine.read(machine)
    limit = int(described.memory) if memory is None else memory
    degrees, stopped = dict[int, Degree](), dict[int, str]()
    first = _examine(exported_program, 1, described, limit, None)
    degrees[1], pair = first[0], None
    candidates = [2]
    for ranks in counted(candidates, "trying degrees", "degrees"):  # more by what two ranks cut
        try:
            degrees[ranks], found = _examine(exported_program, ranks, described, limit, pair)
        except ShardingError as error:
            stopped[ranks], found = error.message, None
        if ranks == 2:
            pair = found
            common = 0 if found is None else math.gcd(*_cut_sizes(found))
            candidates += [n for n in range(3, MOST + 1) if n & (n - 1) == 0 or (common and common % n == 0)]
    fitting = [ranks for ranks, each in degrees.items() if each.fits]
    if not fitting:
        raise _too_large(exported_program, described, limit, degrees)
    return Diagnosis(described.name, tuple(degrees.values()), stopped, limit, min(fitting))


def _examine(
    program: ExportedProgram, ranks: int, machine: Machine, limit: int, pair: Solution | None
) -> tuple[Degree, Solution]:
    """A degree without a limit, and where that is too much, within it if that can be. `pair`: of two ranks."""
    conversions = conversions_of(program, ranks, read_plan("auto"))
    found, made = solved_together(conversions, Aim(machine))
    least = measure_memory(found)
    if least.total > limit:
        try:
            found, made = solved_together(conversions, Aim(machine, limit))
            least = measure_memory(found)
        except TooLarge as error:
            least = error.least
    sent = [(each.kind, each.group_size, each.wire_bytes) for each in made[""].collectives()]
    seconds = measure_step_time(found, sent, machine, fused=True)
    uneven = (note.text for note in made[""].notes if note.kind == "cut" and "largest share" in note.text)
    remarks = (*uneven, *_shared(found), *_whole(found, pair))
    mesh, memory, total = dict(found.mesh.axes), measure_memory(found), sum(count for _, _, count in sent)
    return Degree(ranks, mesh, memory, least, len(sent), total, seconds, least.total <= limit, remarks), found


def _duration(seconds: float) -> str:
    unit, name = next((pair for pair in UNITS_OF_TIME if seconds >= pair[0]), UNITS_OF_TIME[-1])
    return f"{seconds / unit:.3g} {name}"


def _cut_sizes(found: Solution) -> Iterator[int]:
    for program in found.programs:
        for node, _ in program.leaves():
            for size, cut in zip(node.meta["val"].shape, found.leaves[node].dims, strict=True):
                if cut.axes and node.meta["val"].ndim > 1:
                    yield size


def _shared(found: Solution) -> Iterator[str]:
    """Weights that one half of the axis alone cuts, and how much more a rank holds for it."""
    world, more = found.mesh.world_size, Counter[tuple[str, int]]()
    for program in found.programs:
        first_of = tied(program)
        for node, fqn in program.leaves():
            shares = found.mesh.size(found.leaves[node].cut_axes)
            if 1 < shares < world and first_of[node.name] == node.name and node.meta["val"].ndim > 1:
                held = local_bytes(node.meta["val"], found.leaves[node], found.mesh)
                more[_repeated(fqn), shares] += held - held * shares // world
    for (name, shares), count in more.items():
        yield f"{name}: {shares} shares, each on {world // shares} ranks, {count:,} bytes more of each rank"


def _whole(found: Solution, pair: Solution | None) -> Iterator[str]:
    """Layers that two ranks cut and these do not."""
    cut = {own.name for own in pair.layers.values() if own.dim is not None} if pair is not None else set()
    for name in dict.fromkeys(_repeated(o.name) for o in found.layers.values() if o.dim is None and o.name in cut):
        yield f"{name}: whole on every rank, as to cut it would cost more, or its dims are too small"


def _repeated(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _too_large(program: ExportedProgram, machine: Machine, limit: int, degrees: dict[int, Degree]) -> ShardingError:
    best = min(degrees.values(), key=lambda each: each.least.total)
    ranks = 2 * MOST
    while ranks <= FURTHEST and not _examine(program, ranks, machine, limit, None)[0].fits:
        ranks *= 2
    return ShardingError(
        f"no degree up to {MOST} fits: one of {best.ranks} ranks would hold {best.least.text}; that is "
        f"{best.least.total - limit:,} more than the limit of {limit:,}",
        help=(f"use {ranks} ranks, or " if ranks <= FURTHEST else "use ")
        + f"a limit of at least {best.least.total:,} bytes",
    )
