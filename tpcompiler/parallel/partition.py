"""The program for all ranks, lowered and cut for a rank on demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from os.path import basename
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from tpcompiler.artifact.collective_records import collectives_of, is_exchange, transfer_of
from tpcompiler.cost.machine import Machine
from tpcompiler.ir import edit
from tpcompiler.ir.gc_pause import collector_rests
from tpcompiler.ir.local import key, no_new_guards
from tpcompiler.ir.node_placement import placement_of, reshard_of
from tpcompiler.ir.program import LocalProgram, PlacedProgram, ShardedProgram, reshard
from tpcompiler.ir.rank_numbers import name_rank_numbers, numbers_of_rank
from tpcompiler.ir.symm_mem import fitted_text
from tpcompiler.passes.bucket_sums import bucket_sums
from tpcompiler.passes.build_rank_program import Built, build_rank_program
from tpcompiler.passes.fit_collectives import fit_collectives
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lines_of, lower_reshards
from tpcompiler.passes.move_device import move_device
from tpcompiler.passes.schedule_collectives import schedule_collectives
from tpcompiler.passes.shard_state import Hollow, shard_state
from tpcompiler.runtime.records import Collective, Collectives
from tpcompiler.terminal.printed import format_bytes


@dataclass(eq=False)
class Partition:
    """The programs of all ranks; parts that are equal for several ranks are made once."""

    program: PlacedProgram
    device_type: str
    fitted: Collectives
    machine: Machine  # decides where symmetric memory is faster, if `fitted` is "auto"
    limit: int | None  # on the bytes of a rank's inputs and activations
    _traces: dict[Any, Any] = field(default_factory=dict)
    _results: dict[Any, Any] = field(default_factory=dict)
    _built: Built = field(default_factory=dict)
    _hollow: Hollow = field(default_factory=dict)
    _local: dict[tuple[int, ...], LocalProgram] = field(default_factory=dict)

    @cached_property
    def classes(self) -> list[tuple[int, ...]]:
        """The groups of ranks that run one graph: those with equal local shapes, or all ranks if all cuts are even."""
        return ranks_alike(self.program)

    @collector_rests()
    def local_program(self, rank: int) -> LocalProgram:
        """Return the program of a rank and of all ranks with the same graph, its weights not cut yet."""
        self.program.mesh.coordinate(rank)
        ranks = next(ranks for ranks in self.classes if rank in ranks)
        if ranks not in self._local:
            first = None if 0 in ranks else self.local_program(0)
            with no_new_guards(self.program.graph):
                lowered = localize_shapes(lower_reshards(self.program, ranks, self._traces), self._results)
                self._local[ranks] = schedule_collectives(bucket_sums(lowered, first), self.limit, first)
        return self._local[ranks]

    @cached_property
    def rank_numbers(self) -> dict[str, list[list[int]]]:
        """The rank-dependent numbers that every rank reads, in rows of one length, that of the longest."""
        own = [numbers_of_rank(self.local_program(rank), rank) for rank in range(self.program.mesh.world_size)]
        width = max(map(len, own))
        return {name_rank_numbers(self.program): [row + [0] * (width - len(row)) for row in own]} if width else {}

    def share(self, rank: int) -> ShardedProgram:
        """Return the program of a rank with its share of the weights, before it is built."""
        numbers = {name: rows[rank] for name, rows in self.rank_numbers.items()}
        return shard_state(self.local_program(rank), rank, numbers, self._hollow)

    @collector_rests()
    def rank_program(self, rank: int) -> ExportedProgram:
        """Return the ordinary exported program of one rank."""
        return build_rank_program(self.share(rank), self._built, self._finished)

    def _finished(self, built: ExportedProgram) -> ExportedProgram:
        if self.fitted != "nccl":
            sizes = {name: len(ranks[0]) for name, ranks in self.groups().items()}
            built = fit_collectives(built, sizes, self._is_wanted)
        return move_device(built, self.device_type)

    def _is_wanted(self, collective: fx.Node) -> bool:
        """Return True if a collective should use symmetric memory, if that supports it."""
        if self.fitted == "symm_mem":
            return True
        mesh, sent = self.program.mesh, transfer_of(collective, self.program.mesh)
        return self.machine.prefers_symm_mem(sent.kind, mesh.read(sent.axis), sent.payload_bytes, mesh)

    def fitted_text(self) -> str:
        """Return how many collectives use symmetric memory, and up to which size that is faster on the machine."""
        text = fitted_text(self.rank_program(0).graph)
        if self.fitted != "auto":
            return text
        sizes, mesh = [], self.program.mesh
        for kind, axis in dict.fromkeys((each.kind, each.axis) for each in self.collectives()):
            most = self.machine.most_by_symm_mem(kind, mesh.read(axis), mesh)
            sizes.append(f"{f'up to {format_bytes(most)}' if most else 'never'} for {kind} over {axis}")
        return f"{text}; faster so on {basename(self.machine.name)}: {', '.join(sizes) or 'nothing'}"

    def collectives(self) -> list[Collective]:
        """Return every collective that a rank's program calls, in order, from the program of rank 0.

        An exchange of edges counts as the rank that sends most.
        """
        first = self.local_program(0)
        has_edges = any(edit.is_collective(node) and is_exchange(node) for node in edit.calls(first.graph))
        return collectives_of([self.local_program(ranks[0]) for ranks in self.classes] if has_edges else [first])

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the ranks of every group by name: groups over single axes, and over several axes that are used."""
        mesh = self.program.mesh
        used = map(mesh.read, [*dict(mesh.axes), *(sent.axis for sent in self.collectives())])
        return {mesh.group_name(axes): [list(ranks) for ranks in mesh.groups(axes)] for axes in used}


def ranks_alike(program: PlacedProgram) -> list[tuple[int, ...]]:
    """Return classes of ranks that run one graph: those with equal local shapes of every value, also within reshards.

    Even shards make one class; 7 rows over 3 ranks (3, 3, 1) make two.
    """
    classes: dict[Any, list[int]] = {}
    uneven = list(_uneven(program))
    for rank in range(program.mesh.world_size):
        classes.setdefault(key([shapes_on(rank) for shapes_on in uneven]), []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def _uneven(program: PlacedProgram) -> Iterator[Any]:
    """Yield, for everything with possibly unequal shares, a function from a rank to its local shapes."""
    mesh, visited = program.mesh, set[Any]()
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        mark = placement_of(node)
        for value, sharding in zip(edit.outputs(node), mark.shardings, strict=True):
            if not sharding.is_even(value.shape, mesh) and (what := (sharding, key(value.shape))) not in visited:
                visited.add(what)
                yield lambda rank, s=sharding, v=value: s.local_shape(v.shape, mesh, mesh.coordinate(rank))
        count_cuts = [(by, size) for groups in mark.counts.values() for group in groups for size, by in group]
        for by, total in (*(mark.local.cuts if mark.local else ()), *count_cuts):
            if not by.is_even(total, mesh):
                yield lambda rank, by=by, total=total: by.local_size(total, mesh, mesh.coordinate(rank))
        if mark.local is not None:
            yield lambda rank, local=mark.local: local.range_of(mesh, mesh.coordinate(rank)).frames
        if node.target is reshard:
            change = reshard_of(node)
            (operand,) = edit.operands(node)
            value = edit.fake(operand)
            if not all(state.is_even(value.shape, mesh) for state in change.states):
                yield lambda rank, c=change, v=value: [line.facts() for line in lines_of(c, v, mesh, rank)]
