"""What the user holds after `parallelize`: the program of every rank, its costs, its proof."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from passes._alike import ranks_alike
from passes.build_rank_program import Built, build_rank_program
from passes.fit_collectives import Fit, fit_collectives
from passes.localize_shapes import localize_shapes
from passes.lower_reshards import lower_reshards
from passes.move_device import move_device
from passes.shard_state import Hollow, shard_state
from tpcompiler._torch import guards_of
from tpcompiler.errors import InternalError
from tpcompiler.explain.report import Collective, collectives_of, report_text
from tpcompiler.ir import edit
from tpcompiler.ir.calling import calling_of
from tpcompiler.ir.collector import collector_rests
from tpcompiler.ir.devices import device_types
from tpcompiler.ir.index_range import index_ranges
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import RESHARD, LocalProgram, Note, ReshardedProgram, ShardedProgram, mark_of, reshard, tied
from tpcompiler.ir.rank_numbers import name_rank_numbers, numbers_of_rank
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join, read_sharding
from tpcompiler.ir.symm_mem import Collectives, buffers_of, expand_collectives, fitted_text
from tpcompiler.ir.text import DTYPES
from tpcompiler.plan import Plan
from tpcompiler.runtime.artifact import VERSION, Manifest, Writer, write_artifact
from tpcompiler.runtime.place import place_state
from tpcompiler.soundness.check import check_artifact
from tpcompiler.verify.compare import Call, Subject, VerifyReport, compare_calls, read_call
from tpcompiler.verify.judge import Layout
from tpcompiler.verify.reference import runnable
from tpcompiler.writing import Files, writer_of


class ParallelProgram:
    """The tensor-parallel programs of one exported program, made by `tpcompiler.parallelize`."""

    def __init__(
        self,
        original: ExportedProgram,
        program: ReshardedProgram,
        plan: Plan,
        device_type: str,
        advice: Callable[[str], str] = lambda value: "",
        asked: Mapping[str, Any] | None = None,
        collectives: Collectives = "nccl",
    ) -> None:
        """`advice` names the change of the plan that leaves out the gathers of a value, or nothing.

        `asked`: the mesh and the placements at the boundary that the caller gave, as `Manifest.asked`.
        """
        self.original = original
        self.resharded = program
        self.plan = plan
        self.device_type = device_type
        self._advice = advice
        self._asked = dict(asked or {"mesh": dict(program.mesh.axes), "inputs": None, "outputs": None})
        if collectives != "nccl":
            self._asked["collectives"] = collectives
        self.fitted = collectives
        self._traces: dict[Any, Any] = {}
        self._results: dict[Any, Any] = {}
        self._built: Built = {}
        self._hollow: Hollow = {}
        self._local: dict[tuple[int, ...], LocalProgram] = {}

    @property
    def mesh(self) -> Mesh:
        return self.resharded.mesh

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @cached_property
    def classes(self) -> list[tuple[int, ...]]:
        """The ranks that run one graph, which are those of equal local shapes: all of them, where all cuts are even."""
        return ranks_alike(self.resharded)

    @collector_rests()
    def local_program(self, rank: int) -> LocalProgram:
        """The program of a rank and all that are like it, its weights not cut yet."""
        self.mesh.coordinate(rank)
        ranks = next(ranks for ranks in self.classes if rank in ranks)
        if ranks not in self._local:
            with no_new_guards(self.resharded.graph):
                lowered = lower_reshards(self.resharded, ranks, self._traces)
                self._local[ranks] = localize_shapes(lowered, self._results)
        return self._local[ranks]

    @cached_property
    def _rank_numbers(self) -> dict[str, list[list[int]]]:
        """What every rank reads of itself: rows of one length, which has the class that reads most."""
        own = [numbers_of_rank(self.local_program(rank), rank) for rank in range(self.world_size)]
        width = max(map(len, own))
        return {name_rank_numbers(self.resharded): [row + [0] * (width - len(row)) for row in own]} if width else {}

    @collector_rests()
    def rank_program(self, rank: int) -> ExportedProgram:
        """The ordinary exported program of one rank, with that rank's share of the weights.

        The program runs on `device_type`; the weights are where the original's are (`save` writes them from the CPU,
        `tpcompiler.load` puts them on the rank's own device).

        Raises:
            MeshError: `rank` is outside the world.
        """
        return build_rank_program(self.share(rank), self._built, self._finished)

    def _finished(self, built: ExportedProgram) -> ExportedProgram:
        if self.fitted != "nccl":
            built = fit_collectives(built, Fit.of(self.fitted, self._group_sizes()))
        return move_device(built, self.device_type)

    def share(self, rank: int) -> ShardedProgram:
        """The program of a rank with its share of the weights, before it is built."""
        numbers = {name: rows[rank] for name, rows in self._rank_numbers.items()}
        return shard_state(self.local_program(rank), rank, numbers, self._hollow)

    def collectives(self) -> list[Collective]:
        """Every collective that a rank's program calls, in order, read off the program of rank 0."""
        return collectives_of(self.local_program(0))

    def parameter_bytes(self) -> tuple[int, list[int]]:
        """(bytes of all leaves on one device, bytes of the leaves of each rank); a tied tensor counts once."""
        first_of = tied(self.resharded)
        whole, per_rank = 0, [0] * self.world_size
        for node, fqn in self.resharded.leaves():
            if first_of[node.name] == node.name:
                value = self.resharded.state(fqn)
                whole += value.numel() * value.element_size()
                for rank in range(self.world_size):
                    shape = mark_of(node).shardings[0].local_shape(value.shape, self.mesh, self.mesh.coordinate(rank))
                    per_rank[rank] += torch.Size(shape).numel() * value.element_size()
        return whole, per_rank

    def report(self) -> str:
        """Parameters and bytes per rank, collectives, fallbacks with their bytes, what no rule touches: as text."""
        advice = {
            node.meta[RESHARD].name: self._advice(edit.operands(node)[0].name)
            for node in edit.calls(self.resharded.graph)
            if node.target is reshard and node.meta[RESHARD].why == "fallback"
        }
        return report_text(self.mesh, *self.parameter_bytes(), self.collectives(), self.notes, advice)

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """What the compiler declined, could not use, or did otherwise than by default."""
        if self.fitted == "nccl":
            return self.resharded.notes
        return (*self.resharded.notes, Note("collectives", fitted_text(self.rank_program(0).graph)))

    def manifest(self) -> Manifest:
        """The plain-data description that `save` writes (without the files' hashes)."""
        program = self.resharded
        first_of = tied(program)
        names = {node.name: fqn for node, fqn in program.leaves()}
        kinds = {spec.target: spec.kind.name.lower() for _, spec in program.inputs()}
        transient = {spec.target for _, spec in program.inputs() if spec.persistent is False}
        tensors = []
        for node, fqn in program.leaves():
            row = {"name": fqn, "kind": kinds[fqn], **self._described(program.state(fqn), mark_of(node).shardings[0])}
            if fqn in transient:
                row["persistent"] = False
            if first_of[node.name] != node.name:
                row["tied_to"] = names[first_of[node.name]]
            tensors.append(row)
        inputs = [
            {"name": node.name, **self._described(node.meta["val"], mark_of(node).shardings[0])}
            for node in program.user_inputs()
        ]
        ranges = index_ranges(program)
        for row in inputs:
            if row["name"] in ranges:
                row["values"] = list(ranges[row["name"]])
        outputs = [
            {"name": name, **self._described(value.meta["val"], mark_of(value).shardings[0])}
            for name, value in zip(program.output_names(), self._user_outputs(), strict=True)
            if edit.is_tensor(value)
        ]
        first = self.rank_program(0)
        return Manifest(
            mesh=dict(self.mesh.axes),
            groups=self._groups(),
            device_type=self.device_type,
            plan=self.plan.to_data(),
            tensors=tensors,
            inputs=inputs,
            outputs=outputs,
            collectives=[asdict(c) for c in self.collectives()],
            notes=[asdict(note) for note in self.notes],
            output_type=None,
            versions=versions(),
            calling=calling_of(first, guards_of(first)),
            rank_numbers=self._rank_numbers,
            asked=self._asked,
            symm_mem=buffers_of(first.graph),
        )

    def _group_sizes(self) -> dict[str, int]:
        return {name: len(groups[0]) for name, groups in self._groups().items()}

    def _groups(self) -> dict[str, list[list[int]]]:
        """Those over single axes, and those that collectives over several axes use."""
        used = [(axis,) for axis in self.mesh.names] + [tuple(c.axis.split(".")) for c in self.collectives()]
        return {self.mesh.group_name(axes): [list(ranks) for ranks in self.mesh.groups(axes)] for axes in used}

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        keep_output_types: bool = False,
        layout: Files | None = None,
    ) -> None:
        """Write an artifact, all or nothing: `manifest.json` and one `rank_N.pt2` per rank, which torch alone can load.

        With `layout="shared"` the program is written once, for all ranks that run the same graph, and the weights of
        every rank as `rank_N.safetensors`, which `tpcompiler.load` maps into memory. So is a model that was exported
        without weights, whose weights are cut from a checkpoint afterwards (`tpcompiler.cut_checkpoint`).

        An output class that is not plain Python (HF's ModelOutput) is written as a dict and named in the manifest, so
        that the files need torch alone; `keep_output_types` keeps it.

        Raises:
            ArtifactError: the directory exists (without `force`), or cannot be written.
            UnsupportedError: an output is text, or a dict's key a tuple, which torch's file format does not keep; or a
                weight is of a dtype that safetensors lacks.
            ProgramError: the program was exported without weights.
            InternalError: the written programs, read back and checked, are not sound.
        """
        writer = self.writer(keep_output_types=keep_output_types, layout=layout)
        write_artifact(directory, *writer, force=force, inspect=self.inspect)

    def inspect(self, directory: Path) -> None:
        """Check what was written, as files (`tpcompiler.check`).

        Raises:
            InternalError: it is not sound.
        """
        report = check_artifact(directory, original=self.original, prepare=on_cpu, trust=True)
        if not report.ok:
            raise InternalError(
                f"the written programs are not sound: {report.findings[0]}", help="report this with the model and plan"
            )

    def writer(
        self,
        *,
        keep_output_types: bool = False,
        elsewhere: Mapping[str, str] | None = None,
        layout: Files | None = None,
    ) -> Writer:
        """The manifest, and what writes the files (`writer_of`)."""
        return writer_of(self, keep_output_types=keep_output_types, elsewhere=elsewhere or {}, layout=layout)

    def verify(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        then: Sequence[Call] = (),
    ) -> VerifyReport:
        """Run all ranks in lock step in this process and compare them with the single-device program.

        They run where the original's tensors are. Programs for another kind of device are renamed back for it
        (`passes/move_device.py`), which the report says.

        Args:
            args: global inputs, as the original program takes them.
            kwargs: those by name.
            then: args, or (args, kwargs), of further calls, each on the buffers (a cache, statistics) that those before
                wrote.

        Raises:
            InputsError: arguments that the program does not take.
        """
        return compared_calls({"": self.subject()}, [("", args, kwargs or {}), *(("", *read_call(c)) for c in then)])

    def subject(self) -> Subject:
        """The programs of all ranks beside the single device's, to be compared."""
        return Subject(
            self._reference,
            [self.rank_program(rank) for rank in range(self.world_size)],
            self.layout(),
            [node.name for node in self.resharded.user_inputs()],
            self.resharded.output_names(),
            self.resharded.source,
        )

    def leaf_names(self) -> set[str]:
        """The FQNs of parameters, buffers and constants."""
        return {fqn for _, fqn in self.resharded.leaves()}

    @cached_property
    def _reference(self) -> ExportedProgram:
        return runnable(self.original)

    def layout(self) -> Layout:
        """How tensors at the boundary, by name, and values with a claim (`=text`) are cut and joined."""
        return layout_of(self.manifest_shardings(), self.mesh)

    def manifest_shardings(self) -> dict[str, Sharding]:
        """Sharding by name, of inputs, outputs and leaves."""
        program = self.resharded
        out = {fqn: mark_of(node).shardings[0] for node, fqn in program.leaves()}
        out.update({node.name: mark_of(node).shardings[0] for node in program.user_inputs()})
        for name, value in zip(program.output_names(), self._user_outputs(), strict=True):
            if edit.is_tensor(value):
                out[f"output {name}"] = mark_of(value).shardings[0]
        return out

    def _user_outputs(self) -> list[Any]:
        values = list(self.resharded.output.args[0])  # type: ignore[arg-type]
        return values[len(values) - len(self.resharded.output_names()) :]

    def _described(self, value: torch.Tensor, sharding: Sharding) -> dict[str, Any]:
        shape = [s if isinstance(s, int) else str(s) for s in value.shape]
        return {
            "shape": shape,
            "dtype": DTYPES.get(value.dtype, str(value.dtype)),
            "sharding": sharding.text(self.mesh),
        }


def on_cpu(program: ExportedProgram) -> ExportedProgram:
    """The program as it would be for a CPU, where its ops can be evaluated on any machine."""
    return expand_collectives(move_device(program, "cpu"))


def layout_of(shardings: Mapping[str, Sharding], mesh: Mesh) -> Layout:
    """A `Layout` over named shardings."""

    def joined(name: str, parts: Sequence[torch.Tensor], shape: torch.Size) -> list[torch.Tensor]:
        if name.startswith("="):
            return join(parts, read_sharding(name[1:], mesh, len(shape)), mesh, shape)
        return join(parts, shardings[name], mesh, shape)

    return Layout(lambda name, value, rank: cut(value, shardings[name], mesh, rank), joined)


def compared_calls(
    subjects: Mapping[str, Subject], calls: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]]
) -> VerifyReport:
    """`compare_calls`, with the programs moved to where the originals' tensors are."""
    notes, moved = [], {}
    for name, subject in subjects.items():
        there = next((kind for kind in device_types(subject.reference.graph) if kind != "cpu"), "cpu")
        programs = [expand_collectives(move_device(program, there)) for program in subject.programs]
        for program in programs:
            place_state(program, there)
        moved[name] = replace(subject, programs=programs)
        made_for = {kind for program in subject.programs for kind in device_types(program.graph)} - {there}
        if made_for:
            notes.append(f"run on {there}: the same graphs as those for {made_for.pop()}, with the device renamed")
    report = compare_calls(moved, calls)
    return replace(report, note=notes[0]) if notes else report


def versions() -> dict[str, str]:
    return {"tpcompiler": VERSION, "torch": torch.__version__, "python": platform.python_version()}
