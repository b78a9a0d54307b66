"""Place programs on one mesh after another, and record what each mesh costs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tpcompiler._torch import sym_hint
from tpcompiler.cost.amounts import read_bytes, read_memory
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import local_bytes
from tpcompiler.cost.timeline import StepTime
from tpcompiler.errors import BudgetError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers
from tpcompiler.ir.program import tied
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.converted_program import ConvertedProgram, convert_programs
from tpcompiler.runtime.records import Record, mesh_text
from tpcompiler.solver.estimate import Memory, measure_memory
from tpcompiler.solver.report import Obstacle, TooLarge, find_obstacles
from tpcompiler.solver.solution import Solution
from tpcompiler.terminal.printed import format_bytes

AXIS = "tp"  # the axis whose degrees or shares are tried
Made = Mapping[str, ConvertedProgram]
MOST_TRIALS = 4  # of placements in the same shares


class RankCosts(Record, frozen=True):
    """The bytes of a rank, and the seconds of its calls."""

    device: str  # as it was given, or the machine
    limit: int  # bytes that it may hold
    weights: int  # bytes of parameters, and of buffers that are not written
    caches: int  # of buffers that are written
    gradients: int  # of parameters
    optimizer: int  # its state for these
    activations: int  # at their peak, with inputs
    total: int  # bytes of all
    seconds: dict[str, StepTime]  # of a call of each program, if no other rank were slower; one is called `model`

    @property
    def held(self) -> tuple[int, ...]:
        """The bytes of each kind, and of all."""
        return self.weights, self.caches, self.gradients, self.optimizer, self.activations, self.total


class MeshCosts(Record, frozen=True):
    """A mesh that the model can be placed on."""

    mesh: dict[str, int | list[int]]  # axis -> degree, or shares
    ranks: int  # their number
    costs: list[RankCosts]  # of the rank that holds most; of unequal devices, of each rank in order
    fits: bool  # true within the limits, perhaps with more sent than without them
    least: int  # bytes of the first rank where it holds as little as the search can do with
    collectives: dict[str, int]  # their number in a call of each program
    wire_bytes: dict[str, int]  # that a rank sends in a call of each program
    # the sizes that the mesh does not divide, and the cost of uneven cuts, shared shares and layers that stay whole
    remarks: list[str]

    @property
    def name(self) -> str:
        return mesh_text(self.mesh).removeprefix(f"{AXIS}=")

    @property
    def option(self) -> str:
        """The mesh as an option of a command."""
        return f"--tp {self.name}" if [*self.mesh] == [AXIS] else f"--mesh {self.name}"

    @property
    def seconds(self) -> dict[str, StepTime]:
        """The time of a call of each program: of its slowest rank."""
        return {
            name: max((each.seconds[name] for each in self.costs), key=lambda s: s.total) for name in self.collectives
        }


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


class MeshTrials:
    """Programs placed on one mesh after another, for one device alone (all ranks have its like) or one for each rank.

    Attributes:
        least: the least memory of the first rank, by mesh.
        obstacles: the sizes that two ranks share.
        searches: how many there were, by their kind.
        shapes: the sizes of each program's first input that has any, as in its example.
    """

    def __init__(self, conversions: Mapping[str, Conversion], devices: Sequence[Device]) -> None:
        self.conversions, self.devices = conversions, devices
        self.least, self.searches, self.shapes = dict[str, Memory](), Counter[str](), dict[str, list[int]]()
        self.obstacles: Sequence[Obstacle] = ()
        self._pair: Solution | None = None  # of two ranks, to compare the other meshes with

    def degree(self, tp: int) -> Mesh:
        """Return the mesh of the conversions with another degree."""
        first = next(iter(self.conversions.values())).mesh
        axes = tuple((axis, tp if axis == AXIS else degree) for axis, degree in first.axes)
        return dataclasses.replace(first, axes=axes)

    def place(self, mesh: Mesh) -> MeshCosts:
        """Place the programs on a mesh, and again with less on the first rank while others hold too much.

        Of what is cut then, the first rank is rid of less than a rank with a smaller share.

        Raises:
            ShardingError, UnsupportedError: no placement suits the mesh.
        """
        limit, deals = self.devices[0].limit, mesh.deals(AXIS)
        counts = deals if isinstance(deals, tuple) else (1,) * deals
        found, made, least = self._place_within(mesh, limit)
        for _ in range(MOST_TRIALS - 1):
            held = [measure_memory(found, rank).total for rank in range(len(self.devices))]
            over = [own - device.limit for own, device in zip(held, self.devices, strict=True)]
            if max(over) <= 0 or least.total > limit:
                break
            freed = [(sum(counts) - counts[0]) / (sum(counts) - count) for count in counts]
            limit = held[0] - math.ceil(max(own * part for own, part in zip(over, freed, strict=True)))
            lighter, remade, least = self._place_within(mesh, limit)
            if least.total <= limit:
                found, made = lighter, remade
        self.least[mesh_text(mesh.written)] = least
        return self._costs(mesh, found, made, least.total)

    def _place_within(self, mesh: Mesh, limit: int) -> tuple[Solution, Made, Memory]:
        """Place within a limit; if nothing fits the first rank, without one. Return its least memory too."""
        over = {name: dataclasses.replace(each, mesh=mesh) for name, each in self.conversions.items()}
        try:
            found, made = convert_programs({name: each.with_asked(memory=limit) for name, each in over.items()})
            least = measure_memory(found)
        except TooLarge as error:
            self.searches.update(error.searches)
            found, made = convert_programs(over)
            least = error.least
        self.searches.update(found.searches)
        return found, made, least

    def _costs(self, mesh: Mesh, found: Solution, made: Made, least: int) -> MeshCosts:
        for name, program in zip(made, found.programs, strict=True):
            sizes = next((shape for node in program.user_inputs() if (shape := edit.shape(node))), (1,))
            self.shapes[name] = [sym_hint(size) for size in sizes]
        if mesh.pieces(AXIS) == 2:
            self._pair, self.obstacles = found, find_obstacles(found)
        notes = dict.fromkeys(note.text for own in made.values() for note in own.resharded.notes if note.kind == "cut")
        uneven = (text for text in notes if "largest share" in text)
        undivided = filter(None, [undivided_by(self.obstacles, mesh.pieces(AXIS))])
        costs = []
        for rank, device in enumerate(self.devices):
            seconds = {name: own.predict(device.machine, rank).total for name, own in made.items()}
            held = measure_memory(found, rank)
            parts = held.weights, held.caches, held.gradients, held.state, held.activations, held.total
            costs.append(RankCosts(device.given, device.limit, *parts, seconds))
        sent = {name: own.partition.collectives() for name, own in made.items()}
        calls = {name: len(each) for name, each in sent.items()}
        wire_bytes = {name: sum(one.wire_bytes for one in each) for name, each in sent.items()}
        fits = least <= self.devices[0].limit and all(each.total <= each.limit for each in costs)
        remarks = [*undivided, *uneven, *_shared(found), *_whole(found, self._pair)]
        return MeshCosts(mesh.written, mesh.world_size, costs, fits, least, calls, wire_bytes, remarks)


def undivided_by(obstacles: Sequence[Obstacle], pieces: int, foremost: bool = False) -> str:
    """Describe the dims that so many ranks cannot share evenly; `foremost`: those of the first kind only."""
    uneven = [each for each in obstacles if each.count % pieces]
    listed = [each for each in uneven if not foremost or each.kind == uneven[0].kind]
    return f"{', '.join(map(str, listed))} do not divide evenly" if listed else ""


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
    """Describe layers that two ranks cut and this mesh does not."""
    cut = {own.name for own in pair.layers.values() if own.dim is not None} if pair is not None else set()
    for name in dict.fromkeys(fold_layers(o.name) for o in found.layers.values() if o.dim is None and o.name in cut):
        yield f"{name}: whole on every rank: cutting it would cost more, or its dims are too small"
