"""The programs of an artifact, and the questions about them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.export import ExportedProgram

from tpcompiler.artifact.budget import Budget
from tpcompiler.artifact.collective_records import counted_kinds
from tpcompiler.artifact.program import ArtifactProgram, stages_by_whole
from tpcompiler.artifact.stored import StoredProgram
from tpcompiler.artifact.summary import summarize, summary_parts
from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.errors import ArtifactError, option
from tpcompiler.ir.mesh import Mesh
from tpcompiler.parallel.converted_program import ConvertedProgram
from tpcompiler.parallel.stages_subject import whole_of
from tpcompiler.report.again import advise, find_searched_plan
from tpcompiler.report.costs import CostTable, count_costs
from tpcompiler.report.difference import ArtifactDifference, find_differences
from tpcompiler.report.dot import artifact_dot
from tpcompiler.report.explanation import Explanation, explain
from tpcompiler.report.handover import HandoverTable, price_handover
from tpcompiler.report.html import artifact_html
from tpcompiler.report.table import artifact_text
from tpcompiler.report.tensor import draw_sharding
from tpcompiler.runtime.artifact import Manifest, families, is_single, world_of
from tpcompiler.runtime.records import Collective
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import Part, Report, Shown, text_of

Format = Literal["text", "svg", "html", "dot"]
T = TypeVar("T")


class Programs(Shown, Mapping[str, T]):
    """One or more programs by name, in memory or on disk, and what can be asked about them.

    A program that was given without a name is called `model`. If it is the only one, the artifact's directory itself
    has its files; if not, each program has a folder with its name. `program["decode"]` is the artifact reduced to one
    of its programs: methods that answer about one program need it if there are several.
    """

    def __init__(self, programs: Mapping[str, ArtifactProgram], directory: Path | None = None) -> None:
        """`directory`: where the files are, if there are any."""
        self._programs = dict(programs)
        self._directory = directory

    def __getitem__(self, name: str) -> T:
        program = self._programs[name]
        folder = program.files.folder if isinstance(program, StoredProgram) else None
        one: Any = self if len(self) == 1 else type(self)({name: program}, folder)
        return one  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        own = [_described(program.manifest) for program in self._programs.values()]
        named = own if is_single(self) else [f"{name}: {text}" for name, text in zip(self, own, strict=True)]
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
        manifest = self.only.manifest
        return summarize(manifest).bytes, held_per_rank(manifest)

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
        budget = Budget.read(limits)
        for name, program in self._programs.items():
            budget.check(program.manifest, "the program" if is_single(self) else name)

    def advice(self) -> dict[str, str]:
        """Search for the change of the plan that avoids each fallback; return it by the name of its reshard."""
        return advise(self.only)

    def report(self) -> Report:
        """Return the text that `tpcompiler convert` prints: bytes, collectives, fallbacks with advice, notes."""
        return Report(text_of(self.parts()).rstrip())

    def parts(self) -> Iterator[Part]:
        """Return the same as lines and tables, which a notebook shows."""
        for at, (name, program) in enumerate(self._programs.items()):
            if not is_single(self):
                yield from ([""] if at else [])
                yield name
            yield from summary_parts(summarize(program.describe()), advise(program))
            if isinstance(program, ConvertedProgram) and program.searches:
                yield program.searches
        first, *others = self.families()  # a plan for one of several models says nothing of the others
        searched = None if others else find_searched_plan(next(iter(first.values())))
        yield from [searched.text] if searched is not None else []

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
        return count_costs(self.only, at, machine)

    def diff(self, other: Programs[T], *, machine: str | os.PathLike[str] | None = None) -> ArtifactDifference:
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
        self, target: Programs[Any], *, machine: str | os.PathLike[str] | None = None, weights: bool = False
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


def _described(manifest: Manifest) -> str:
    whole, per_rank, sent = summarize(manifest).bytes, held_per_rank(manifest), manifest.collectives
    return (
        f"mesh {Mesh.of(manifest.mesh, manifest.factors)} on {manifest.device_type}: {format_bytes(max(per_rank))} of "
        f"{format_bytes(whole)} of weights on a rank; {counted_kinds(each.kind for each in sent)}, "
        f"{format_bytes(sum(each.wire_bytes for each in sent))} sent per rank and call"
    )
