"""The artifact: the programs of all ranks, in memory or on disk, and the methods that users call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from tpcompiler.api import elastic
from tpcompiler.api.packaging import package_programs
from tpcompiler.api.verify import verify_programs
from tpcompiler.artifact.budget import check_budget, read_budget
from tpcompiler.artifact.dtensors import as_dtensors, write_dtensors
from tpcompiler.artifact.program import ArtifactProgram, stages_by_whole
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.artifact.summary import describe, summarize
from tpcompiler.checkpoint.cut import TELL, Progress, cut_programs
from tpcompiler.checkpoint.ranks import Source
from tpcompiler.errors import ArtifactError, InternalError, UnsupportedError, option
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir.mesh import Mesh, MeshLike
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.sound.check import CheckReport, check_artifact
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.parallel.program_subject import on_cpu
from tpcompiler.parallel.stages_subject import originals_of, whole_of
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.report.again import advise, report_parts
from tpcompiler.report.costs import CostTable, count_costs
from tpcompiler.report.difference import ArtifactDifference, find_differences
from tpcompiler.report.dot import artifact_dot
from tpcompiler.report.explanation import Explanation, explain
from tpcompiler.report.handover import HandoverTable, price_handover
from tpcompiler.report.html import artifact_html
from tpcompiler.report.table import artifact_text
from tpcompiler.report.tensor import draw_sharding
from tpcompiler.report.written import Written
from tpcompiler.runtime.artifact import Manifest, families, is_single, world_of, write_artifact
from tpcompiler.runtime.package import read_package, refuse_other_package
from tpcompiler.runtime.program_files import ProgramFiles, copy_files, open_programs
from tpcompiler.runtime.records import Collective, Layout, Package
from tpcompiler.terminal.tables import Part, Report, Shown, text_of

Format = Literal["text", "svg", "html", "dot"]


class ParallelProgram(Shown, Mapping[str, "ParallelProgram"]):
    """The tensor-parallel programs of one model: one or more, by name, with one set of weights.

    `tpcompiler.parallelize` makes it in memory, and `tpcompiler.open` reads it back from the files that `save` writes;
    all methods work with both, except those that change files.

    A program that was given without a name is called `model`. If it is the only one, the artifact's directory itself
    has its files; if not, each program has a folder with its name. `program["decode"]` is the artifact reduced to one
    of its programs: methods that answer about one program need it if there are several.
    """

    def __init__(self, programs: Mapping[str, ArtifactProgram], directory: Path | None = None) -> None:
        """`directory`: where the files are, if there are any."""
        self._programs, self._directory = dict(programs), directory

    def __getitem__(self, name: str) -> ParallelProgram:
        program = self._programs[name]
        folder = program.files.folder if isinstance(program, StoredProgram) else None
        return self if len(self) == 1 else ParallelProgram({name: program}, folder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        own = {name: describe(program.manifest) for name, program in self._programs.items()}
        named = own.values() if is_single(self) else (f"{name}: {text}" for name, text in own.items())
        return f"ParallelProgram({', '.join(named)})"

    @property
    def only(self) -> ArtifactProgram:
        """The one program.

        Raises:
            ArtifactError: there are several.
        """
        if len(self) > 1:
            first = next(iter(self))
            raise ArtifactError(
                f"{self._directory or 'the artifact'} holds the programs {', '.join(self)}",
                help=option(f"give one of them: {self._directory}/{first}", f"take one of them, as in [{first!r}]"),
            )
        return next(iter(self._programs.values()))

    @property
    def wholes(self) -> list[str]:
        """The programs as they are called: one that was cut into stages counts once."""
        stages = (each.manifest.stage for each in self._programs.values())
        return list(dict.fromkeys(stage.of if stage else name for name, stage in zip(self, stages, strict=True)))

    def original(self) -> ExportedProgram:
        """Return the only program that was converted, from files without its weights.

        Raises:
            ArtifactError: there are several, or the file is missing or damaged.
        """
        staged = stages_by_whole(self._programs)
        return whole_of(*staged.values()) if staged and len(self.wholes) == 1 else self.only.original()

    @property
    def converted(self) -> ConvertedProgram:
        """The one program with the compiler's own records of its conversion.

        Raises:
            TypeError: it was read from files, which have none.
        """
        if not isinstance(self.only, ConvertedProgram):
            raise TypeError(f"{self.only.title} was read from files")
        return self.only

    @property
    def mesh(self) -> Mesh:
        """The mesh of the programs that have the most ranks; ranks run a program of fewer in copies."""
        return max((program.mesh for program in self._programs.values()), key=lambda mesh: mesh.world_size)

    def families(self) -> list[dict[str, ArtifactProgram]]:
        """Return the programs of each family, which share tensors by name."""
        return families(self._programs, lambda program: program.manifest.family)

    @property
    def world_size(self) -> int:
        return max(world_of(program.manifest) for program in self._programs.values())

    @property
    def device_type(self) -> str:
        return next(iter(self._programs.values())).manifest.device_type

    def manifest(self) -> Manifest:
        """Return the description that `manifest.json` has; without the hashes of files if it is in memory."""
        return self.only.describe()

    def collectives(self) -> list[Collective]:
        """Return every collective that a rank's program calls, in order."""
        return self.only.manifest.collectives

    def parameter_bytes(self) -> tuple[int, list[int]]:
        """Return (bytes of all leaves on one device, bytes of the leaves of each rank); a tied tensor counts once."""
        summary = summarize(self.only.manifest)
        return summary.bytes, summary.bytes_per_rank

    def rank_program(self, rank: int) -> ExportedProgram:
        """Return the ordinary exported program of one rank, with that rank's share of the weights.

        The program runs on `device_type`. Its weights are on the device of the model that was converted; those that are
        read from files are on the CPU (`tpcompiler.load` puts them on the rank's own device).

        Raises:
            MeshError, ArtifactError: `rank` is outside the world; or the weights are not cut yet.
        """
        return self.only.rank_program(rank)

    def check_budget(self, limits: Sequence[str]) -> None:
        """Check every program against limits on communication and memory.

        Args:
            limits: limits such as "2 all_reduce/layer" (in each repeated module), "1 all_gather" (in all),
                "0 fallbacks", "1MB sent" (by a rank in one call), or "24GB held" (by a rank: parameters, buffers and
                constants; unlike `memory=` of `parallelize` without activations, which are estimated). Or names of
                YAML files with a list of such limits.

        Raises:
            BudgetError: a limit is exceeded, with the place and the amount; or a limit has an unknown form.
        """
        budget = read_budget(limits)
        for name, program in self._programs.items():
            check_budget(budget, program.manifest, "the program" if is_single(self) else name)

    def advice(self) -> dict[str, str]:
        """Search for the change of the plan that avoids each fallback; return it by the name of its reshard."""
        return advise(self.only)

    def report(self) -> Report:
        """Return the text that `tpcompiler convert` prints: bytes, collectives, fallbacks with advice, notes."""
        return Report(text_of(self.parts()).rstrip())

    def parts(self) -> Iterator[Part]:
        """Return the same as lines and tables, which a notebook shows."""
        return report_parts(self._programs)

    def explain(self, name: str, *, machine: str | os.PathLike[str] | None = None) -> Explanation:
        """Explain the placement of a value, a parameter or a collective, and price what else it could be.

        Facts are the program's. Prices come from the search, repeated with every choice of this op or parameter in
        turn, and everything else free to follow. Pins of a plan hold, except on the layer whose weights are asked about
        (directly or by their op). A price is the least total with that choice minus the least of all; the artifact's
        own is above 0 if a plan, another machine or a memory limit decided. Every axis of a mesh has its own choices,
        in the order of solving: axes before it keep their solution, axes after it follow.

        Args:
            name: of a node of the single-device program (`show()` names them), of a parameter, a buffer or an input, or
                of a module that has one weight; or of a collective: its node's, or its kind's (`all_gather`,
                `all_gather_1`).
            machine: the devices and links that prices are for, as of `parallelize`; by default those that it was
                converted for, if they come with the package.

        Raises:
            ArtifactError: a file is damaged or, without trust, could run code; or nothing has this name.
            MachineError: the description of the machine cannot be read.
        """
        return explain(self.only, name, machine)

    def cost(self, at: Mapping[str, int] | None = None, *, machine: str | os.PathLike[str] | None = None) -> CostTable:
        """Count what a rank sends, as formulas in the dynamic sizes and as numbers.

        A size is called by the input that has it: `batch` and `sequence` are dims 0 and 1 of the first input that is
        dynamic there; any other is `INPUT.DIM`, such as `image.2`. A file does not keep the names given at export.

        Args:
            at: the sizes that numbers are for, by name; those left out are as in the example inputs.
            machine: the links that seconds are for, as in `explain`.

        Raises:
            ArtifactError: a file is damaged or, without trust, could run code.
            InputsError: a name of no size, or a value that it cannot have.
            MachineError: the description of the machine cannot be read.
        """
        return count_costs(Written.of(self.only), at, machine)

    def diff(self, other: ParallelProgram, *, machine: str | os.PathLike[str] | None = None) -> ArtifactDifference:
        """Compare placements, collectives and bytes with another artifact of the same model. Weights are not compared.

        Args:
            other: the second artifact.
            machine: the links that seconds are for, as in `explain`.

        Raises:
            ArtifactError: a file is damaged or, without trust, could run code; or the artifacts are of two models.
            MachineError: the description of the machine cannot be read.
        """
        return find_differences(self.only, other.only, machine)

    def handover(
        self, target: ParallelProgram, *, machine: str | os.PathLike[str] | None = None, weights: bool = False
    ) -> HandoverTable:
        """Return the parts of caches and other written buffers that these ranks send to those of another artifact.

        Every element goes to each rank of the target that holds it, once, which is proved. `save` writes them as JSON;
        `tpcompiler.join_handover` sends them.

        Args:
            target: an artifact of the same model, for any number of ranks.
            machine: whose seconds are meant; by default that of this artifact's conversion.
            weights: hand over the target's parameters instead, in its dtype: from a trainer to a service. The names
                may differ by a module around all, such as that of the loss.

        Raises:
            ArtifactError: no buffer is written, or one side lacks a tensor or has it with another shape or dtype.
            MachineError: the machine is unknown or faulty.
        """
        return price_handover(self._programs, target._programs, machine, weights=weights)

    def show(
        self,
        name: str | None = None,
        *,
        rank: int = 0,
        format: Format = "text",
        machine: str | os.PathLike[str] | None = None,
    ) -> str:
        """Return the program of a rank as text, a page or a graph; or with a name, a drawing of a tensor's slices.

        In the drawing a cell names the ranks that hold its elements; `0+1` is a pending reduction, of which each has a
        share. For more than two dims, the last two are drawn for each slab. Slices of a dynamic size are shares
        (`0/2:1/2`).

        Args:
            name: a parameter, a buffer, an input, a module with one weight, or `output NAME`; "*": all, equal ones
                once.
            format: "text" (a drawing's has at most 80 columns), "html" or Graphviz's "dot"; of a drawing "text" or
                "svg".
            machine: whose times the page predicts, as in `explain`.

        Raises:
            ArtifactError: a file is damaged or, without trust, could run code; no tensor has that name; or there is no
                such format.
            MachineError: the description of the machine cannot be read.
        """
        program = self.only
        if format not in (("text", "svg") if name is not None else ("text", "html", "dot")):
            raise ArtifactError(f"{format!r} is no format of {'a tensor' if name else 'a program'}", help="use text")
        if name is not None:
            is_svg, every = format == "svg", name == "*"
            return draw_sharding(program.manifest, None if every else name, program.title, is_svg=is_svg)
        if format == "html":
            return artifact_html(program, rank, machine=machine, advice=advise(program, machine))
        return artifact_text(program, rank) if format == "text" else str(artifact_dot(program, rank).source)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        keep_output_types: bool = False,
        layout: Layout | None = None,
    ) -> None:
        """Write an artifact, all or nothing: `manifest.json`, a `program.pt2` for ranks with equal graphs, and weights.

        Each rank has a `rank_N.pt2` with the same program and its weights, which torch alone can load; with
        `layout="shared"`, a `rank_N.safetensors` with the weights. `tpcompiler.load` maps either into memory. A model
        that was exported without weights is always shared; cut its weights later with `cut`. Files that were opened
        are copied.

        Several programs have a folder each. Tensors in an earlier program's files are left out of later ones: a rank
        loads them once, for all.

        An output class that is not plain Python (HF's ModelOutput) is written as a dict and named in the manifest, so
        that the files need torch alone; `keep_output_types` keeps it.

        Raises:
            ArtifactError: the directory exists (without `force`), or cannot be written; or the files to copy are
                damaged, or have another layout.
            UnsupportedError: torch's file format cannot store an output (text, or a dict with a tuple as key); or a
                weight has a dtype that safetensors lacks.
            ProgramError: the program was exported without weights.
            InternalError: the written programs, read back and checked, are not sound.
        """
        writers = {}
        for family in self.families():
            first: dict[str, str] = {}
            for name, program in family.items():
                leaves = [row.name for row in program.manifest.tensors]
                elsewhere = {leaf: first[leaf] for leaf in leaves if leaf in first}
                first = {**dict.fromkeys(leaves, name), **first}
                writers[name] = program.writer(keep_output_types=keep_output_types, layout=layout, elsewhere=elsewhere)
        writers = {name: writers[name] for name in self}
        package = read_package(self._directory) if self._directory is not None and not is_single(self) else None

        def finish(folder: Path) -> None:
            if package is not None and self._directory is not None:
                copy_files(self._directory, package.files, folder)
            self.inspect(folder)

        write_artifact(directory, writers, force=force, inspect=finish, compiled=package)

    def inspect(self, directory: Path) -> None:
        """Check files that were just written of programs in memory; raise InternalError if they are not sound."""
        made = {name: each.original() for name, each in self._programs.items() if isinstance(each, ConvertedProgram)}
        if made and not (report := open(directory, trust=True)._check(made)).ok:
            raise InternalError(
                f"the written programs are not sound: {report.findings[0]}", help="report this with the model and plan"
            )

    def verify(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        then: Sequence[Any] = (),
        original: ExportedProgram | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        same_bits: bool = False,
    ) -> VerifyReport:
        """Run all ranks in lock step in this process and compare them with the single-device program.

        They run on the device of the original's tensors. Programs for another kind of device are renamed for it
        (`passes/move_device.py`), which the report notes. Mapped weights (the shared layout, a checkpoint) are read
        layer by layer, and not kept in memory.

        Args:
            args: global inputs, as for the original program; by default those that it was exported with. For several
                programs, calls: (name, args) or (name, args, kwargs), each on the buffers (a cache) that earlier calls
                have written, in any program. Instead of args, a function from the single device's outputs of earlier
                calls, by program and name, to args or (args, kwargs).
            kwargs: global keyword inputs.
            then: args, or (args, kwargs), of further calls, each on the buffers (a cache, statistics) that earlier
                calls have written.
            original: the program that was converted; by default the artifact's own. One that was exported without
                weights uses the checkpoint's or, without one, the ranks' own, which are then not verified.
            checkpoint: a directory of safetensors files; ranks whose weights are not cut yet read theirs from it, too.
            same_bits: as `load(same_bits=True)` runs them, and also on every smaller number of processes: outputs and
                buffers must then have the same bits on all (docs/same-bits.md).

        Raises:
            InputsError: the program rejects the arguments or has no example inputs, or no program has the name.
            UnsupportedError: `same_bits` of stages, or of a program that cannot be run so.
            ArtifactError: the files are damaged or were made from another program.
        """
        if original is not None and len(self.wholes) > 1:
            self.only  # noqa: B018  (raises for several)
        return verify_programs(self._programs, args, kwargs or {}, then, original, checkpoint, same_bits)

    def check(
        self, original: ExportedProgram | None = None, *, checkpoint: str | os.PathLike[str] | None = None
    ) -> CheckReport:
        """Check the programs against their claims, without running the model (`docs/trust.md`).

        Each rank's program must be a sound share of the same single-device program, all ranks must issue the same
        collectives, and the tensors must match the manifest. Use `verify` to check that the program is the user's.

        Args:
            original: the single-device program, whose weights are compared with the ranks' shares.
            checkpoint: a directory of safetensors files with the weights of a model that was exported without them; for
                the model in the artifact by default.

        Raises:
            ArtifactError: a file is missing, damaged or, without trust, could run code.
        """
        if checkpoint is not None:
            original = self.only.fill(original or self.only.original(), checkpoint)
        if self._directory is not None:
            refuse_other_package(self._directory)
        return self._check({} if original is None else originals_of(self._programs, original))

    def _check(self, originals: Mapping[str, ExportedProgram]) -> CheckReport:
        """Check the programs, and their weights where the single-device program is given by name."""
        plain = {name: with_plain_weights(original) for name, original in originals.items()}
        return check_artifact(self._programs, originals=plain, prepare=on_cpu, canonical=canonicalize)

    def reshard(
        self, mesh: MeshLike, directory: str | os.PathLike[str], *, force: bool = False, progress: Progress = TELL
    ) -> ParallelProgram:
        """Write an artifact for another mesh, with the same plan, and open it.

        The programs are converted again. The weights, joined from the ranks' shares, are cut one tensor at a time
        (docs/scale.md lists the memory needed), and are the same bits. The result has the shared layout.

        Args:
            mesh: the degree of a single axis `tp`, or `{axis: degree}`.
            directory: the directory to write.
            force: replace an earlier artifact there.
            progress: called with (bytes written, total).

        Raises:
            ArtifactError: there are no weights, or the directory cannot be written.
            MeshError, ShardingError, ...: as `parallelize`, if the plan does not suit the mesh.
        """
        elastic.reshard(self._programs, self._write, Mesh.of(mesh), directory, force=force, progress=progress)
        return open(directory)

    def _write(self, programs: Mapping[str, ArtifactProgram], directory: Path) -> None:
        is_stored = self._directory is not None  # an output class that is not kept is a dict in its files already
        ParallelProgram(programs).save(directory, layout="shared", keep_output_types=is_stored)

    def merge(self, path: str | os.PathLike[str], *, safetensors: bool = False) -> None:
        """Write the single-device program with its weights.

        Weights are joined one at a time, and are the same bits. From files, a class that the model returned is a plain
        dict, as in the artifact.

        Args:
            path: the .pt2 to write.
            safetensors: write a checkpoint instead: the parameters and persistent buffers by name, tied ones once.

        Raises:
            ArtifactError: there are no weights, or the file cannot be written.
        """
        elastic.merge(self.only, path, safetensors=safetensors)

    def state_dict(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return the parameters and persistent buffers as DTensors, in the process of each rank.

        Every rank's local tensor is its own share; from files it is mapped: writes to it stay in the process. A weight
        is whole on all ranks, with a warning, if torch's placements cannot express its sharding (parts, blocks, whole
        heads) or it is pending.

        Args:
            mesh: a mesh with the artifact's sizes and its ranks in order.

        Raises:
            ArtifactError: there are no weights, or a file is damaged.
            MeshError: the mesh has other sizes.
        """
        return as_dtensors(self.only, mesh)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write weights back into files of the shared layout, each rank its own; all ranks must call it.

        Args:
            state: DTensors with any placements, or whole tensors, by name, the same on all ranks; other weights
                stay unchanged. The files must be on a disk that all ranks see.

        Raises:
            ArtifactError: names, shapes or dtypes differ from the artifact's, the layout is not shared, placements or
                replicated values differ between ranks, tied names have different values, or a file cannot be
                written. All ranks raise, and the artifact stays unchanged. Or the program is not in files.
            MeshError: the world has another number of ranks than the artifact.
        """
        self.only  # noqa: B018  (raises for several)
        write_dtensors(self._files()[0], state)
        self._reopen()

    def cut(
        self,
        checkpoint: str | os.PathLike[str] | Source,
        ranks: Sequence[int] | None = None,
        *,
        partial: bool = False,
        force: bool = False,
        progress: Progress = TELL,
    ) -> None:
        """Write `rank_N.safetensors` next to programs that were converted without weights.

        Every tensor of the checkpoint is mapped, cut for all ranks and released before the next one; two small ones may
        be held at once. A repeated call continues an interrupted cut, after comparing its files with the checkpoint.

        Args:
            checkpoint: a directory of safetensors files, or one file; or an artifact with weights, of any degree.
            ranks: the ranks to write weights for; all by default.
            partial: ignore checkpoint tensors that the program does not use.
            force: overwrite weights, and replace an interrupted cut of another checkpoint.
            progress: called with (bytes written, total); reports to the progress listener by default.

        Raises:
            ArtifactError: the program is not in files, or has its weights; or the programs are of several models; the
                checkpoint does not fit it (all faults at once), an interrupted cut of another checkpoint exists, or a
                file cannot be written.
        """
        files = self._files()
        is_cut = all(program.manifest.stage is not None for program in self._programs.values())
        if len(models := self.families()) > 1 and not is_cut:
            name = next(iter(models[-1]))
            raise ArtifactError(
                f"{self._directory} holds programs of {len(models)} models: {'; '.join(map(', '.join, models))}",
                help=f"cut each from its own checkpoint: tpcompiler cut {self._directory}/{name} --checkpoint DIR",
            )
        cut_programs(files, checkpoint, ranks, partial=partial, force=force, progress=progress)
        self._reopen()

    def package(
        self,
        *,
        threads: int = 1,
        check: bool = True,
        checkpoint: str | os.PathLike[str] | None = None,
        processes: int = 0,
    ) -> tuple[Package, VerifyReport | None]:
        """Compile every program into one package `compiled.pt2` next to its files, once for all equal ranks.

        Compiling reads no weights. The package is for this version of torch and for CPUs or GPUs with the features of
        this one; `tpcompiler.load` runs it. It is then compared with the model on its example
        inputs, by all ranks in separate processes, and deleted if it is wrong.

        Args:
            threads: threads of a rank's process on the CPU; torchrun sets one.
            check: False skips the check.
            checkpoint: weights for the check, if none are cut yet.
            processes: how many run it with the same bits (docs/same-bits.md); 0: one for each rank.

        Returns:
            The package, and its comparison with the model.

        Raises:
            ArtifactError: the program is not in files, or the package cannot be written.
            UnsupportedError: no compiler fits torch, or AOTInductor rejects a program.
            InputsError: the model was saved without example inputs.
            LaunchError: a rank fails, or does not end in time.
            MeshError: so many processes cannot run as many whole ranks each.
        """
        files, directory = self._files(), self._directory
        assert directory is not None  # of a program with files
        if stages_by_whole(self._programs):
            raise UnsupportedError("a package runs no stages", help="run the programs uncompiled")
        try:
            return package_programs(
                files, directory, threads=threads, check=check, checkpoint=checkpoint, processes=processes
            )
        finally:
            self._reopen()

    def _files(self) -> list[ProgramFiles]:
        stored = [each.files for each in self._programs.values() if isinstance(each, StoredProgram)]
        if len(stored) < len(self):
            raise ArtifactError("the program is in memory, and has no files to change", help="save it, and open that")
        return stored

    def _reopen(self) -> None:
        """Read the manifests again, which this process has changed."""
        self._programs = {each.name: StoredProgram(each.reopened()) for each in self._files()}


def open(directory: str | os.PathLike[str], trust: bool = False) -> ParallelProgram:
    """Open the files of an artifact: manifests now, programs and weights when they are needed.

    Args:
        directory: an artifact of `ParallelProgram.save` or `tpcompiler convert`, or the folder of one of its programs.
        trust: also read files that need a pickle or could run code (docs/security.md).

    Raises:
        ArtifactError: there is no artifact, or its manifest is unreadable, damaged, or of another format version.
    """
    programs = {name: StoredProgram(files) for name, files in open_programs(directory, trust=trust).items()}
    return ParallelProgram(programs, Path(directory))
