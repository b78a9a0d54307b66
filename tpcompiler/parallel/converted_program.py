"""Programs that `parallelize` has converted together, in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from os.path import basename
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch.export import ExportedProgram

from tpcompiler._torch import all_tensors, sym_hint, with_state
from tpcompiler.artifact.program import ArtifactProgram, Stored
from tpcompiler.artifact.summary import SearchedPlan
from tpcompiler.checkpoint.fill import fill_weights, refuse_needless
from tpcompiler.checkpoint.ranks import open_source
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective
from tpcompiler.cost.timeline import Times, duration, predict_times
from tpcompiler.errors import ShardingError
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import reshard_of
from tpcompiler.ir.program import Note, PlacedProgram, PlannedProgram, reshard
from tpcompiler.ir.shared_memory import refuse_cut_shared
from tpcompiler.parallel.advice import Adviser, find_searched_plan
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.partition import Partition
from tpcompiler.parallel.pipeline import find_placements, objective_of, partition_program, place_programs, plan_programs
from tpcompiler.parallel.writing import ProgramWriter, manifest_of
from tpcompiler.plan.plan import Plan
from tpcompiler.runtime.artifact import SINGLE, Manifest
from tpcompiler.runtime.rank_file import Weights, put_state
from tpcompiler.runtime.records import Layout
from tpcompiler.runtime.weightless import weightless_names
from tpcompiler.solver.report import Remarks, count_searches
from tpcompiler.solver.solution import Solution
from tpcompiler.terminal.printed import format_bytes


@dataclass(frozen=True)
class Family:
    """Programs that were converted together, and the search for them."""

    conversions: Sequence[Conversion]
    found: Solution
    advisers: Sequence[Adviser]
    programs: dict[str, ConvertedProgram] = field(default_factory=dict)

    @cached_property
    def remarks(self) -> Remarks:
        return Remarks(self.found, objective_of(self.conversions))

    @cached_property
    def searched_plan(self) -> SearchedPlan | None:
        """The plan of the search, if the given one leaves much whole; found once."""
        return find_searched_plan(self.conversions, self.found)


def convert_programs(conversions: Mapping[str, Conversion]) -> tuple[Solution, dict[str, ConvertedProgram]]:
    """Convert programs, with every leaf that several have placed alike.

    Raises:
        ShardingError: no placement suits all programs.
    """
    each = [*conversions.values()]
    objective = Objective.of(each[0].machine)
    advisers = [Adviser(own.plan, partial(_plan_with, each, at), at, objective) for at, own in enumerate(each)]
    try:
        found = find_placements(each)
        placed = place_programs(each, found)
        for program in placed:
            refuse_cut_shared(program)
    except ShardingError as error:
        advised = () if each[0].plan.searches else (adviser.advise_error(error) for adviser in advisers)
        raise next((other for other in advised if other is not error), error) from None
    family = Family(each, found, advisers)
    for at, name in enumerate(conversions):
        partition = partition_program(each[at], placed[at], found)
        family.programs[name] = ConvertedProgram(name, at, family, partition, placed[at])
    return found, family.programs


def _plan_with(conversions: Sequence[Conversion], at: int, plan: Plan) -> Sequence[PlannedProgram]:
    """Plan programs, one of them by another plan."""
    return plan_programs(conversions, [plan if at == other else own.plan for other, own in enumerate(conversions)])


class ConvertedProgram(ArtifactProgram):
    """The programs of all ranks, made on demand from one program in which every change of sharding is a node.

    Attributes:
        plan: with the styles that the search found.
        asked: the caller's other arguments.
        stage: which part of the program `whole` it is; None if it was not cut into stages.
    """

    title = "the program"

    def __init__(self, name: str, at: int, family: Family, partition: Partition, placed: PlacedProgram) -> None:
        """`placed`: as the search placed it, before changes of sharding were joined."""
        own = family.conversions[at]
        self.name, self.partition = name, partition
        self.plan = own.with_styles(*family.found.forms).completed(family.found)
        self.asked = own.asked_of(self.plan)
        self.stage, self.whole = own.stage, own.whole
        self._at, self._family, self._placed, self._original = at, family, placed, own.exported

    @property
    def searches(self) -> str:
        """The number of searches in words; empty if a plan names all layers."""
        return count_searches(self._family.found.searches) if self.plan.searches else ""

    @property
    def resharded(self) -> PlacedProgram:
        """The one program for all ranks, in which every change of sharding is a node."""
        return self.partition.program

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """The requests that the compiler declined or could not use, and its deviations from the default."""
        notes = (*self.resharded.notes, *self.partition.local_program(0).notes)
        if self.plan.searches:
            step = self.predict(self._family.conversions[self._at].machine).total
            notes = (*self._family.remarks.notes(self._at, step), *notes)
        if self.stage is not None and self.stage.index:
            notes = (*notes, self._received())
        if self.partition.fitted == "nccl":
            return notes
        return (*notes, Note("collectives", self.partition.fitted_text()))

    def _received(self) -> Note:
        """Report what a stage receives from the stages before it."""
        assert self.stage is not None
        values = [edit.fake(node) for node in self.resharded.user_inputs() if node.name in self.stage.receives]
        sizes = [sym_hint(value.numel()) * value.element_size() for value in values]
        seconds = sum(map(self.partition.machine.transfer_seconds, sizes))
        what = f"{len(sizes)} value{'s' * (len(sizes) != 1)} of earlier stages, {format_bytes(sum(sizes))}"
        took = f"{duration(seconds)} on {basename(self.partition.machine.name)}"
        return Note("stages", f"stage {self.stage.index} of {self.stage.count}, from 0: receives {what}, {took}")

    @cached_property
    def manifest(self) -> Manifest:
        manifest = manifest_of(self.partition, self.plan, self.asked)
        first = {fqn: each.name for each in reversed(self.together()) for _, fqn in each.resharded.leaves()}
        stored = {fqn: name for fqn, name in first.items() if name != self.name}
        tensors = [structs.replace(row, stored_in=stored.get(row.name)) for row in manifest.tensors]
        family = None if self.name == SINGLE else self.together()[0].name
        return structs.replace(manifest, tensors=tensors, family=family, stage=self.stage)

    def describe(self) -> Manifest:
        return structs.replace(self.manifest, notes=list(self.notes))

    def predict(self, machine: Machine, rank: int = 0) -> Times:
        """Predict the time of a call on a rank with its machine, for the example's sizes; the first rank does most."""
        mesh = self.resharded.mesh
        sent = {
            each.node: machine.collective_seconds(each.kind, mesh.read(each.axis), each.wire_bytes, mesh)
            for each in self.partition.collectives()
        }
        return predict_times(self.partition.local_program(rank).graph, sent, machine, mesh)

    def advice(self) -> dict[str, str]:
        """Search for the change of the plan that avoids each fallback; return it by the name of its reshard."""
        adviser = self._family.advisers[self._at]
        return {
            reshard_of(node).name: ""
            if self.plan.searches
            else adviser.advise_gather(edit.operands(node)[0].name, self._placed)
            for node in edit.calls(self.resharded.graph)
            if node.target is reshard and reshard_of(node).why == "fallback"
        }

    def searched_plan(self) -> SearchedPlan | None:
        """Search for a plan for all programs if theirs leaves much whole without naming it, or return None."""
        return self._family.searched_plan

    def together(self) -> Sequence[ConvertedProgram]:
        return list(self._family.programs.values())

    def beside(self) -> dict[str, Manifest]:
        return {name: each.manifest for name, each in self._family.programs.items() if name != self.name}

    def original(self) -> ExportedProgram:
        return self._original

    def whole_program(self) -> ExportedProgram | None:
        return self.whole

    def fill(self, original: ExportedProgram, checkpoint: str | os.PathLike[str] | None = None) -> ExportedProgram:
        lacking = weightless_names(original)
        refuse_needless(lacking, checkpoint)
        own = all_tensors(self._original)
        state, constants = (
            {name: own.get(name, value) if name in lacking else value for name, value in held.items()}
            for held in (original.state_dict, original.constants)
        )
        filled = with_state(original, state, constants, original.module_call_graph, original.example_inputs)
        if checkpoint is not None:
            fill_weights(filled, open_source(checkpoint), partial=True)
        return filled

    def graph(self, rank: int) -> ExportedProgram:
        return self.partition.rank_program(rank)

    def rank_program(self, rank: int, weights: Weights | None = None) -> ExportedProgram:
        program = self.partition.rank_program(rank)
        lacking = weightless_names(self._original)
        if weights is not None and lacking:
            values = {name: value for name, value in all_tensors(self._original).items() if name not in lacking}
            alone = structs.replace(
                self.manifest, tensors=[structs.replace(row, stored_in=None) for row in self.manifest.tensors]
            )
            put_state(program, weights(alone, values, rank, program))
        return program

    def ranks(self) -> Iterator[tuple[ExportedProgram, Mapping[str, Any]]]:
        first: dict[tuple[int, ...], ExportedProgram] = {}
        for rank in range(self.world_size):
            own = next(ranks for ranks in self.partition.classes if rank in ranks)
            program = self.rank_program(rank)
            yield first.setdefault(own, program), all_tensors(program)

    def classes(self) -> Sequence[Sequence[int]]:
        return self.partition.classes

    def share(self, name: str, rank: int) -> torch.Tensor:
        if self._shares[0] != rank:
            self._shares = rank, self.partition.share(rank).local_state
        return self._shares[1][name].detach()

    _shares: tuple[int, Mapping[str, torch.Tensor]] = -1, {}  # those of the rank that was asked for last

    def read(self, name: str) -> torch.Tensor:
        return self.resharded.state(name).detach()

    def writer(
        self, *, keep_output_types: bool = False, layout: Layout | None = None, elsewhere: Stored
    ) -> Callable[[Path], None]:
        return ProgramWriter(
            self._original,
            self.partition,
            self.describe(),
            keep_output_types=keep_output_types,
            elsewhere=elsewhere,
            layout=layout,
            whole=self.whole if self.stage is not None and self.stage.index == 0 else None,
        ).write
