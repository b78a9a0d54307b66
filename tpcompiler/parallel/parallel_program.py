"""The result of `parallelize`: the program of every rank, its costs, its proof."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from tpcompiler.artifact.counts import counted_kinds
from tpcompiler.artifact.manifest import manifest_of, shardings_of
from tpcompiler.artifact.summary import summarize, summary_parts
from tpcompiler.artifact.writing import Files, writer_of
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import Times, predict_times
from tpcompiler.errors import InternalError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of, reshard_of
from tpcompiler.ir.program import Note, PlacedProgram, reshard, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.compare import Call, VerifyReport, read_call
from tpcompiler.judge.compare.judge import Layout
from tpcompiler.judge.compare.subject import Subject
from tpcompiler.judge.sound.check import check_artifact
from tpcompiler.parallel.compared import compared_calls, on_cpu
from tpcompiler.parallel.partition import Partition
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan import Plan
from tpcompiler.runtime.artifact import Manifest, write_artifact
from tpcompiler.runtime.records import Asked, Collective
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import Part, Report, Shown, text_of


class ParallelProgram(Shown):
    """The tensor-parallel programs of one exported program, made by `tpcompiler.parallelize`."""

    def __init__(
        self,
        original: ExportedProgram,
        partition: Partition,
        plan: Plan,
        asked: Asked,
        advice: Callable[[str], str],
        remarks: Callable[[ParallelProgram], Iterable[Note]],
        searches: str = "",
    ) -> None:
        """`asked`: the caller's arguments other than the plan, as in `Manifest.asked`.

        `advice` names the change of the plan that leaves out the gathers of a value, or nothing. `remarks` makes the
        notes that take a search or the finished program. `searches` reports their number, without a plan.
        """
        self.original = original
        self.partition = partition
        self.plan = plan
        self.asked = asked
        self._advice = advice
        self._remarks = remarks
        self._searches = searches

    def __repr__(self) -> str:
        whole, per_rank = self.parameter_bytes()
        sent = self.collectives()
        return (
            f"ParallelProgram(mesh {self.mesh} on {self.device_type}: {format_bytes(max(per_rank))} of "
            f"{format_bytes(whole)} of weights on a rank; {counted_kinds(each.kind for each in sent)}, "
            f"{format_bytes(sum(each.wire_bytes for each in sent))} sent per rank and call)"
        )

    @property
    def resharded(self) -> PlacedProgram:
        """The one program for all ranks, in which every change of sharding is a node."""
        return self.partition.program

    @property
    def device_type(self) -> str:
        return self.partition.device_type

    @property
    def mesh(self) -> Mesh:
        return self.resharded.mesh

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def rank_program(self, rank: int) -> ExportedProgram:
        """Return the ordinary exported program of one rank, with that rank's share of the weights.

        The program runs on `device_type`; its weights are on the original's device (`save` writes them from the CPU,
        `tpcompiler.load` puts them on the rank's own device).

        Raises:
            MeshError: `rank` is outside the world.
        """
        return self.partition.rank_program(rank)

    def collectives(self) -> list[Collective]:
        """Return every collective that a rank's program calls, in order, from the program of rank 0."""
        return self.partition.collectives()

    def parameter_bytes(self) -> tuple[int, list[int]]:
        """Return (bytes of all leaves on one device, bytes of the leaves of each rank); a tied tensor counts once."""
        first_of = tied(self.resharded)
        whole, per_rank = 0, [0] * self.world_size
        for node, fqn in self.resharded.leaves():
            if first_of[node.name] == node.name:
                value = self.resharded.state(fqn)
                whole += value.numel() * value.element_size()
                for rank in range(self.world_size):
                    sharding = placement_of(node).shardings[0]
                    per_rank[rank] += sharding.local_bytes(value.shape, value.element_size(), self.mesh, rank)
        return whole, per_rank

    def advice(self) -> dict[str, str]:
        """Search for the change of the plan that avoids each fallback; return it by the name of its reshard."""
        return {
            reshard_of(node).name: self._advice(edit.operands(node)[0].name)
            for node in edit.calls(self.resharded.graph)
            if node.target is reshard and reshard_of(node).why == "fallback"
        }

    def report(self) -> Report:
        """Return the text that `tpcompiler convert` prints: bytes, collectives, fallbacks with advice, notes."""
        return Report(text_of(self.parts()).rstrip())

    def parts(self) -> Iterator[Part]:
        """Return the same as lines and tables, which a notebook shows."""
        yield from summary_parts(summarize(self.manifest()), self.advice())
        if self._searches:
            yield self._searches

    @cached_property
    def notes(self) -> tuple[Note, ...]:
        """The requests that the compiler declined or could not use, and its deviations from the default."""
        notes = (*self._remarks(self), *self.resharded.notes)
        if self.partition.fitted == "nccl":
            return notes
        return (*notes, Note("collectives", self.partition.fitted_text()))

    def predict(self, machine: Machine) -> Times:
        """Predict the time of a call on rank 0, which does most, on a machine, with the sizes of the example."""
        sent = {
            each.node: machine.collective_seconds(each.kind, each.axis.split("."), each.wire_bytes, self.mesh)
            for each in self.collectives()
        }
        return predict_times(self.partition.local_program(0).graph, sent, machine, self.mesh)

    def manifest(self) -> Manifest:
        """Return the plain-data description that `save` writes (without the files' hashes)."""
        return manifest_of(self)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        keep_output_types: bool = False,
        layout: Files | None = None,
    ) -> None:
        """Write an artifact, all or nothing: `manifest.json` and one `rank_N.pt2` per rank, which torch alone can load.

        With `layout="shared"` the program is written once for all ranks with the same graph, and the weights of
        every rank as `rank_N.safetensors`, which `tpcompiler.load` maps into memory. A model that was exported
        without weights always has this layout; cut its weights later with `tpcompiler.cut_checkpoint`.

        An output class that is not plain Python (HF's ModelOutput) is written as a dict and named in the manifest, so
        that the files need torch alone; `keep_output_types` keeps it.

        Raises:
            ArtifactError: the directory exists (without `force`), or cannot be written.
            UnsupportedError: torch's file format cannot store an output (text, or a dict with a tuple as key); or a
                weight has a dtype that safetensors lacks.
            ProgramError: the program was exported without weights.
            InternalError: the written programs, read back and checked, are not sound.
        """
        writer = writer_of(self, keep_output_types=keep_output_types, layout=layout)
        write_artifact(directory, *writer, force=force, inspect=self.inspect)

    def inspect(self, directory: Path) -> None:
        """Check the written files (`tpcompiler.check`).

        Raises:
            InternalError: they are not sound.
        """
        report = check_artifact(directory, original=self.original, prepare=on_cpu, canonical=canonicalize, trust=True)
        if not report.ok:
            raise InternalError(
                f"the written programs are not sound: {report.findings[0]}", help="report this with the model and plan"
            )

    def verify(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        then: Sequence[Call] = (),
    ) -> VerifyReport:
        """Run all ranks in lock step in this process and compare them with the single-device program.

        They run on the device of the original's tensors. Programs for another kind of device are renamed for it
        (`passes/move_device.py`), which the report notes.

        Args:
            args: global inputs, as for the original program.
            kwargs: global keyword inputs.
            then: args, or (args, kwargs), of further calls, each on the buffers (a cache, statistics) that earlier
                calls have written.

        Raises:
            InputsError: the program rejects the arguments.
        """
        return compared_calls({"": self.subject()}, [("", args, kwargs or {}), *(("", *read_call(c)) for c in then)])

    def subject(self) -> Subject:
        """Return the programs of all ranks and the single device's, for a comparison."""
        return Subject(
            self.original,
            [self.rank_program(rank) for rank in range(self.world_size)],
            self.layout(),
            [node.name for node in self.resharded.user_inputs()],
            self.resharded.output_names(),
            self.resharded.source,
            indices=self.manifest().inputs,
        )

    def layout(self) -> Layout:
        """Return the layout of tensors at the boundary."""
        return Layout(self.mesh, self.manifest_shardings())

    def manifest_shardings(self) -> dict[str, Sharding]:
        """Return the shardings of inputs, outputs and leaves by name."""
        return shardings_of(self.resharded)
