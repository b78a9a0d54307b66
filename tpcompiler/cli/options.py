"""What the commands share: the app, its exit codes, and options that several have."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
import traceback
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tpcompiler.cli.interrupt import INTERRUPTED, was_interrupted
from tpcompiler.cost.amounts import read_bytes
from tpcompiler.cost.machine_file import DEFAULT, VARIABLE, shipped_machines
from tpcompiler.errors import MeshError, TpCompilerError, naming_options, printable
from tpcompiler.terminal.printed import print_nowhere, printed_streams

if TYPE_CHECKING:
    from tpcompiler.ir.mesh import Mesh

NOT_EQUAL, BAD_INPUT, DEFECT = 1, 2, 3
_UsageError: Any = typer.BadParameter.__base__  # typer has its own since 0.20, and took click's before


class _Commands(TyperGroup):
    """Prints errors of this package and of the command line as their text: what, where, the numbers, one action.

    Whatever a command prints goes through one filter.
    """

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
                report(f"{error.format_message()}\n  help: {' '.join(words)} --help shows what it takes")
            else:
                raise
            raise typer.Exit(BAD_INPUT) from error


def report(text: str, *, follows: bool = False) -> None:
    """Print an error; under torchrun hand it over: torchrun prints the first one of all ranks at the end of its text.

    Args:
        follows: whether it is of another rank, which has failed before.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # What torch's `record` writes, with the text in the place of the traceback.
        more = {"py_callstack": printable(text), "timestamp": str(int(time.time()) + follows)}
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


Tp = Annotated[int | None, typer.Option("--tp", metavar="N", help="The number of ranks.")]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="AXIS=N,..", help="The same with named axes: dp=2,tp=4.")
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import this first: what registers classes, ops or rules."),
]
Trust = Annotated[bool, typer.Option("--trust", help="Read files too that can run code: only from who you trust.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Machine = Annotated[
    str | None,
    typer.Option(
        "--machine",
        metavar="NAME",
        autocompletion=shipped_machines,
        help=f"What the devices can do: {', '.join(shipped_machines())}, or a YAML file. "
        f"By default ${VARIABLE}, or {DEFAULT}; of an artifact, the one that it was converted for.",
    ),
]


def read_calls(text: str) -> dict[str, float]:
    """Read `prefill=1,decode=256`.

    Raises:
        BadParameter: it is something else.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): float(count) for name, _, count in pairs}
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} does not give programs numbers, as prefill=1,decode=256 does", param_hint="--calls"
        ) from None


Calls = Annotated[
    Any,
    typer.Option(
        "--calls",
        metavar="NAME=N,..",
        parser=read_calls,
        help="How often each of several programs is called: prefill=1,decode=256. By default all as often.",
    ),
]


class Goals(str, Enum):
    """As `Goal`."""

    latency = "latency"
    memory = "memory"


Optimize = Annotated[
    Goals,
    typer.Option("--optimize", help="latency: the fastest call that fits; memory: the fewest bytes held by a rank."),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory", metavar="BYTES", parser=read_bytes, help="The most that a rank may hold: 24GB, 22.5GiB, or bytes."
    ),
]
Limits = Annotated[
    list[str] | None,
    typer.Option("--budget", metavar="LIMIT", help='The most that it may send: "2 all_reduce/layer", "0 fallbacks".'),
]
MaxWireBytes = Annotated[
    int | None, typer.Option("--max-wire-bytes", metavar="N", help="The most bytes that a rank may send in a call.")
]
MaxMemory = Annotated[
    int | None,
    typer.Option(
        "--max-memory",
        metavar="BYTES",
        parser=read_bytes,
        help="The most that a rank's parameters, buffers and constants may take, such as 24GB. Fails where it is more.",
    ),
]
Artifact = Annotated[Path, typer.Argument(metavar="OUT", help="A directory that tpcompiler convert wrote.")]


def refuse_two_meshes(tp: int | None, text: str | None) -> None:
    """Raises BadParameter unless one of --tp and --mesh is given."""
    if (tp is None) == (text is None):
        raise typer.BadParameter("give exactly one of --tp and --mesh", param_hint="--tp / --mesh")


def read_mesh(tp: int | None, text: str | None) -> Mesh:
    """What --tp or --mesh says."""
    refuse_two_meshes(tp, text)
    from tpcompiler.ir.mesh import Mesh

    if text is None:
        return Mesh.of(tp if tp is not None else 0)
    axes = []
    for part in text.split(","):
        axis, _, degree = part.partition("=")
        if not re.fullmatch(r"\s*\d{1,9}\s*", degree, re.ASCII):
            raise MeshError(f"--mesh {text!r} is not a mesh", help="write axis=degree, such as --mesh tp=4")
        axes.append((axis.strip(), int(degree)))
    return Mesh.of(Mesh(tuple(axes)))
