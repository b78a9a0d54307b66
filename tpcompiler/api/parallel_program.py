"""The artifact: the programs of all ranks, in memory or on disk, and the methods that users call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from tpcompiler.api import elastic
from tpcompiler.api.packaging import package_programs
from tpcompiler.api.programs import Programs
from tpcompiler.api.verify import verify_programs
from tpcompiler.artifact.dtensors import as_dtensors, write_dtensors
from tpcompiler.artifact.program import ArtifactProgram, stages_by_whole
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.checkpoint.cut import TELL, Progress, cut_programs
from tpcompiler.checkpoint.ranks import Source
from tpcompiler.errors import ArtifactError, InternalError, UnsupportedError
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir.mesh import Mesh, MeshLike
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.sound.check import CheckReport, check_artifact
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.parallel.program_subject import on_cpu
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import is_single, write_artifact
from tpcompiler.runtime.package import read_package, refuse_other_package
from tpcompiler.runtime.program_files import ProgramFiles, copy_files, open_programs
from tpcompiler.runtime.records import Layout, Package


class ParallelProgram(Programs["ParallelProgram"]):
    """The tensor-parallel programs of one model: one or more, by name, with one set of weights.

    `tpcompiler.parallelize` makes it in memory, and `tpcompiler.open` reads it back from the files that `save` writes;
    all methods work with both, except those that change files.
    """

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
        """Check files that were just written of programs in memory (`check`).

        Raises:
            InternalError: they are not sound.
        """
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
        return self._check(dict.fromkeys(self, original) if original is not None else {})

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
        files = {each.name: StoredProgram(each.reopened()) for each in self._files()}
        self._programs = dict(files)


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
