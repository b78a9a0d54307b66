"""The app, its exit codes, and the options that several commands share."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import typer
from typer.core import TyperGroup

from tpcompiler.cli import INTERRUPTED, was_interrupted
from tpcompiler.cli.bars import ShowStep
from tpcompiler.cost.amounts import read_memory
from tpcompiler.cost.machine_file import DEFAULT, VARIABLE, shipped_machines
from tpcompiler.errors import MeshError, PlanError, TpCompilerError, naming_options, printable
from tpcompiler.plan.file import CONFIG, SEARCHES, read_plan_file
from tpcompiler.runtime.hub import refuse_missing_artifact, refuse_missing_checkpoint, refuse_missing_model
from tpcompiler.terminal.printed import print_nowhere, printed_streams

if TYPE_CHECKING:
    from tpcompiler.ir.mesh import Mesh

T = TypeVar("T", int, float)
LATER = 10  # seconds by which the error of a rank that failed for another seems later: that one may take some to exit
WORDS = "tpcompiler.words"  # in the context: the command's name and what follows it
NOT_EQUAL, BAD_INPUT, DEFECT = 1, 2, 3
WORKFLOW = (
    *("export", "inspect", "plan", "calibrate", "convert", "cut", "verify", "check"),
    *("explain", "diff", "reshard", "package", "handover", "run"),
)
_UsageError: Any = typer.BadParameter.__base__  # from click before typer 0.20, from typer since


class _Commands(TyperGroup):
    """A group that prints errors as text and filters all output."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=WORKFLOW.index)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[WORDS] = args
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with printed_streams(sys.stdout, sys.stderr), naming_options():
                return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            print_nowhere(sys.stdout)
            typer.echo(f"cannot write standard output: {error.strerror}", err=True)
            sys.exit(BAD_INPUT)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or was_interrupted():
                typer.echo("interrupted", err=True)
                raise typer.Exit(INTERRUPTED) from error
            if isinstance(error, TpCompilerError):
                report(traceback.format_exc() if ctx.params.get("debug") else str(error), follows=error.follows)
            elif isinstance(error, _UsageError):
                words = ["tpcompiler", *(error.ctx or ctx).command_path.split()[1:]]
                report(f"{error.format_message()}\n  help: {' '.join(words)} --help lists the options")
            else:
                raise
            raise typer.Exit(BAD_INPUT) from error


def command_with(ctx: Any, leave_out: Collection[str], *more: str) -> str:
    """Return the command line without some options, which take a value unless they are flags, and with other words."""
    options = {name: each for each in ctx.command.params for name in each.opts}
    words, kept = iter(ctx.meta[WORDS]), ["tpcompiler"]
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in leave_out:
            kept.append(word)
        elif not options[name].is_flag and not equals:
            next(words)
    return shlex.join([*kept, *more])


def report(text: str, *, follows: bool = False) -> None:
    """Print an error; under torchrun write it to torchrun's error file.

    torchrun prints the first error of all ranks at the end of its text.

    Args:
        follows: True if another rank failed first.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The record that torch's `record` writes, with the text instead of a traceback.
        more = {"py_callstack": printable(text), "timestamp": str(int(time.time()) + LATER * follows)}
        with contextlib.suppress(OSError):
            content = json.dumps({"message": {"message": printable(text), "extraInfo": more}})
            Path(file).write_text(content, encoding="utf-8")
            return
    typer.echo(text, err=True)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the examples keep their lines
    context_settings={"help_option_names": ["-h", "--help"]},
)


Tp = Annotated[str | None, typer.Option("--tp", metavar="N", help="Number of ranks, or their unequal shares: 2:1:1.")]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", metavar="AXIS=N,..", help="Mesh axes, instead of --tp: dp=2,tp=4, or stages: pp=2,tp=4."),
]


def _import_modules(names: list[str] | None) -> list[str] | None:
    if names:
        from tpcompiler.runtime.model_file import import_modules

        import_modules(names)
    return names


Imports = Annotated[  # the modules are imported when the option is read
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import_modules,
        help="Import this module first, to register classes, ops or rules.",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Also read files that can run code. Only for files from people you trust.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files of an earlier run.")]
Machine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        autocompletion=shipped_machines,
        help=f"Predict times for {', '.join(shipped_machines())}, or for a YAML file's machine. "
        f"Default: ${VARIABLE}, or {DEFAULT}; for an artifact, the machine of its conversion.",
    ),
]


def existing(refuse: Callable[[str], None]) -> Callable[[str], Path]:
    """Return a parser of a path that is refused at once, before a command imports torch, if nothing is there."""

    def read(text: str) -> Path:
        refuse(text)
        return Path(text)

    return read


def _readable_plan(text: str) -> Path:
    """Refuse a plan that is no file, or no YAML, at once."""
    if text not in SEARCHES and not os.path.isfile(os.path.join(text, CONFIG)):
        read_plan_file(text)
    return Path(text)


_CHECKPOINT = typer.Option(
    "--checkpoint",
    metavar="DIR",
    parser=existing(refuse_missing_checkpoint),
    help="Read weights from a directory of *.safetensors files.",
)
Checkpoint = Annotated[Path | None, _CHECKPOINT]
RequiredCheckpoint = Annotated[Path, _CHECKPOINT]
Models = Annotated[
    list[Path],
    typer.Argument(
        metavar="MODEL.pt2",
        parser=existing(refuse_missing_model),
        help="Files written by torch.export.save. Several, such as prefill and decode, share weights and caches.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="PLAN.yaml",
        parser=_readable_plan,
        help="Styles of layers; a Hugging Face config.json, for its own plan; or auto (default): search for a plan.",
        show_default=False,
    ),
]


def numbers_by_name(option: str, kind: type[T], error: str) -> Callable[[str], dict[str, T]]:
    """Return a parser of `prefill=1,decode=256`, which refuses a text of another form with an error."""

    def read(text: str) -> dict[str, T]:
        pairs = [part.partition("=") for part in text.split(",")]
        try:
            found = {name.strip(): kind(number) for name, _, number in pairs}
        except ValueError:  # an integer may be too long, too
            found = {}
        if not found or "" in found:
            raise typer.BadParameter(f"{text!r} {error}", param_hint=option)
        return found

    return read


Calls = Annotated[
    Any,
    typer.Option(
        "--calls",
        metavar="NAME=N,..",
        parser=numbers_by_name("--calls", float, "does not give programs numbers, as prefill=1,decode=256 does"),
        help="Calls of each program, for the search: prefill=1,decode=256. Default: equally many.",
    ),
]


Degrees = Annotated[
    Any,
    typer.Option(
        "--degree",
        metavar="NAME=N,..",
        parser=numbers_by_name("--degree", int, "does not give programs ranks, as draft=1 does"),
        help="Programs that run over fewer ranks, in copies: draft=1 is whole on every rank.",
    ),
]


Optimize = Annotated[
    Literal["latency", "memory"],
    typer.Option("--optimize", help="latency: the fastest call that fits; memory: the fewest bytes per rank."),
]
Optimizer = Annotated[
    Literal["adamw", "sgd", "none"],
    typer.Option(
        "--optimizer", help="Of a program with gradients: the optimizer whose state takes memory next to parameters."
    ),
]


def _amount_of_memory(text: str) -> str:
    """Refuse an amount at once, before a model is read; only the text has the unit."""
    read_memory(text)
    return text


Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        parser=_amount_of_memory,
        help="Memory of a rank, which limits the search: 24GB, 22.5GiB, or bytes.",
    ),
]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        metavar="LIMIT|FILE",
        help='Fail above a limit: "2 all_reduce/layer", "0 fallbacks", "1MB sent" (per rank and call), "24GB held" (by '
        "a rank, without activations); or above one of a YAML list of limits.",
    ),
]
_EXISTING_ARTIFACT = existing(refuse_missing_artifact)
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=PLACEMENT|auto",
        help="Sharding of an input: x=S(0), or by axis x=dp:S(0); with several models prefill.x=S(0). "
        "auto: the batch is cut over each axis where that pays.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("--output", metavar="NAME=PLACEMENT", help="Sharding of an output (same syntax as --input)."),
]
Artifact = Annotated[
    Path, typer.Argument(metavar="OUT", parser=_EXISTING_ARTIFACT, help="A directory written by tpcompiler convert.")
]
OtherArtifact = Annotated[
    Path, typer.Argument(metavar="OUT2", parser=_EXISTING_ARTIFACT, help="Another artifact of the same model.")
]


def refuse_two_meshes(tp: str | None, text: str | None) -> None:
    """Raise BadParameter unless one of --tp and --mesh is given."""
    if (tp is None) == (text is None):
        raise typer.BadParameter("give exactly one of --tp and --mesh", param_hint="--tp / --mesh")


def read_mesh(tp: str | None, text: str | None, option: str = "--mesh") -> Mesh:
    """Return the mesh of --tp or of an option such as --mesh dp=2,tp=4; of unequal shares, tp=2:1:1."""
    refuse_two_meshes(tp, text)
    from tpcompiler.ir.mesh import Mesh

    what, remedy = f"{option} {text!r} is not a mesh", "write axis=degree, such as dp=2"
    if text is None:
        text, what, remedy = (
            f"tp={tp}",
            f"--tp {tp!r} is not a number of ranks",
            "write --tp 4, or unequal shares: --tp 2:1:1",
        )
    axes = list[tuple[str, int | list[int]]]()
    for part in text.split(","):
        axis, _, degree = part.partition("=")
        if not re.fullmatch(r"\s*-?\d{1,9}(:\d{1,9})*\s*", degree, re.ASCII):
            raise MeshError(what, help=remedy)
        shares = [int(each) for each in degree.split(":")]
        axes.append((axis.strip(), shares if shares[1:] else shares[0]))
    Mesh(tuple((axis, 1) for axis, _ in axes))  # refuses axes of one name
    return Mesh.of(dict(axes))


class GivenPrograms(NamedTuple):
    """One exported program, or several by name."""

    programs: Any
    names: list[str]

    @property
    def first(self) -> Any:
        return self.programs[self.names[0]] if self.names else self.programs

    def placements(self, texts: list[str] | None, option: str) -> dict[str, Any] | Literal["auto"] | None:
        """Read placements for `parallelize`; with several programs `prefill.x` is the x of prefill.

        Raises:
            PlanError: a text that has another form, or names no program.
        """
        if texts == ["auto"] and option == "--input":
            return "auto"
        placements = _read_placements(texts, option)
        if placements is None or not self.names:
            return placements
        by_program: dict[str, Any] = {}
        for path, placement in placements.items():
            program, _, name = path.partition(".")
            if program not in self.names or not name:
                help = f"write {self.names[0]}.{path.rpartition('.')[2]}=S(0)"
                raise PlanError(f"{path!r} names no program", help=help)
            by_program.setdefault(program, {})[name] = placement
        return by_program


def read_programs(models: Sequence[Path], trust: bool, show_step: ShowStep) -> GivenPrograms:
    """Read model files; the name of a program is its file's, without the suffix.

    Raises:
        PlanError: two files with one name.
    """
    from tpcompiler.runtime.model_file import read_model

    programs = {}
    for model in models:
        show_step(f"reading {model}")
        programs[model.stem] = read_model(model, trust=trust)
    if len(programs) < len(models):
        raise PlanError(
            f"two models are called {models[-1].stem}", help="a model is called as its file, without the suffix"
        )
    return GivenPrograms(programs, list(programs)) if len(models) > 1 else GivenPrograms(programs[models[0].stem], [])


def _read_placements(texts: list[str] | None, option: str) -> dict[str, Any] | None:
    """Read `x=S(0)`, or by axis `x=dp:S(0),tp:R`."""
    placements: dict[str, Any] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        pairs = [part.partition(":") for part in re.split(r",(?![^(]*\))", value)]  # not in S(0, unit 4)
        repeated = len({axis.strip() for axis, _, _ in pairs}) < len(pairs)
        if not name or not value or repeated or (len(pairs) > 1 and not all(placement for _, _, placement in pairs)):
            raise PlanError(f"{option} {text} names no placement", help=f"write {option} x=S(0), or x=dp:S(0),tp:R")
        by_axis = {axis.strip(): placement.strip() for axis, _, placement in pairs}
        placements[name.strip()] = by_axis if pairs[0][2] else value.strip()
    return placements or None
