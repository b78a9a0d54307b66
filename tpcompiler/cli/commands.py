"""The command line: parse, call the library, print. torch is imported by a command, after its words were parsed."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

import tpcompiler.cli.ask
import tpcompiler.cli.generate
import tpcompiler.cli.judge
import tpcompiler.cli.reasons
import tpcompiler.cli.run
import tpcompiler.cli.weights  # noqa: F401  (registers its commands, as do those above)
from tpcompiler.cli.bars import progress
from tpcompiler.cli.given import Inputs, Outputs, read_programs
from tpcompiler.cli.memory import return_freed_tensors
from tpcompiler.cli.options import (
    DEFECT,
    Artifact,
    Calls,
    Goals,
    Imports,
    Json,
    Limits,
    Machine,
    MaxMemory,
    MaxWireBytes,
    Memory,
    MeshOption,
    Optimize,
    Tp,
    Trust,
    app,
    read_mesh,
    refuse_two_meshes,
    report,
)
from tpcompiler.cli.weights import Partial
from tpcompiler.errors import TpCompilerWarning, one_line, printable
from tpcompiler.terminal.printed import mute_logs


class _DeviceType(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class _Collectives(str, Enum):
    auto = "auto"
    nccl = "nccl"
    symm_mem = "symm_mem"


class _Layout(str, Enum):
    ranks = "ranks"
    shared = "shared"


class _Format(str, Enum):
    html = "html"
    svg = "svg"
    png = "png"
    dot = "dot"
    text = "text"


def _print_version(asked: bool) -> None:
    if asked:
        from tpcompiler import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="TPCOMPILER_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a single-device torch.export program into one ordinary exported program per rank.

    Exit codes: 0 right, 1 not equal (verify, diff) or not sound (check), 2 bad input or over a budget, 3 a defect of
    tpcompiler, 130 interrupted.

    \b
    Example:
      tpcompiler inspect model.pt2
      tpcompiler convert model.pt2 --tp 2 --plan plan.yaml -o out
      tpcompiler verify out --against model.pt2
      torchrun --nproc-per-node 2 -m tpcompiler.cli run out --inputs in.safetensors
    """


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="MODEL.pt2|OUT", help="A model, or a converted directory.")],
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show what is in a model or an artifact.

    For a model, also print a starter plan that lists every layer with a weight.

    \b
    Example:
      tpcompiler inspect model.pt2
      tpcompiler inspect model.pt2 --json | jq -r .plan > plan.yaml
      tpcompiler inspect out
    """
    with progress(f"reading {path}", quiet=json):
        is_artifact = os.path.isdir(path)  # where pathlib's may raise
        from tpcompiler.cli import printing

        if is_artifact:  # which needs neither torch.export nor the search
            from tpcompiler.artifact.summary import summarize
            from tpcompiler.runtime.artifact import read_manifest

            data: Any = summarize(read_manifest(path))
        else:
            from tpcompiler.cli.describe import model_data
            from tpcompiler.runtime.model_file import read_model

            data = model_data(read_model(path, imports or (), trust=trust))
    if json:
        printing.print_json(data)
    elif is_artifact:
        printing.print_titled(str(path), printing.artifact_parts(data))
    else:
        printing.print_titled(str(path), printing.model_parts(data))


@app.command()
def convert(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL.pt2",
            help="What torch.export.save wrote. Several, such as prefill and decode, share their weights and caches.",
        ),
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN.yaml",
            help="Which layers are cut, and how; a Hugging Face config.json, for its own plan; or auto, the default: "
            "find one.",
            show_default=False,
        ),
    ] = None,
    tp: Tp = None,
    mesh: MeshOption = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="The directory to write.")] = None,
    skip_unsupported: Annotated[
        bool, typer.Option("--skip-unsupported", help="Leave layers whole whose style is not supported yet.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report: write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier artifact at OUT.")] = False,
    layout: Annotated[
        _Layout | None,
        typer.Option(
            "--layout",
            help="ranks: a file for each, which torch alone reads. shared: one program, and weights beside it.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Of a model without weights: cut the ranks' out of these safetensors."
        ),
    ] = None,
    partial: Partial = False,
    imports: Imports = None,
    trust: Trust = False,
    keep_output_types: Annotated[
        bool, typer.Option("--keep-output-types", help="Return the model's own output classes, not plain dicts.")
    ] = False,
    device_type: Annotated[
        _DeviceType | None,
        typer.Option(
            "--device", "--device-type", help="Where the programs run: it need not be here. By default as exported."
        ),
    ] = None,
    collectives: Annotated[
        _Collectives,
        typer.Option(
            "--collectives", help="Collectives on GPUs: nccl; symm_mem wherever it fits; auto where it is faster."
        ),
    ] = _Collectives.nccl,
    no_check_indices: Annotated[
        bool, typer.Option("--no-check-indices", help="Assert nothing of computed indices where an indexed dim is cut.")
    ] = False,
    machine: Machine = None,
    memory: Memory = None,
    optimize: Optimize = Goals.latency,
    calls: Calls = None,
    budget: Limits = None,
    max_wire_bytes: MaxWireBytes = None,
    max_memory: MaxMemory = None,
    json: Json = False,
) -> None:
    """Write one program per rank.

    The weights are cut as the plan says, and the collectives that this needs stand in the programs.

    \b
    Example:
      tpcompiler convert model.pt2 --tp 2 --plan plan.yaml -o out
      tpcompiler convert model.pt2 --mesh dp=2,tp=4 --plan plan.yaml --input "x=dp:S(0)" --dry-run
      tpcompiler convert model.pt2 --tp 8 --plan plan.yaml --device cuda -o out
      tpcompiler convert model.pt2 --tp 8 --plan plan.yaml -o out --budget "2 all_reduce/layer" --budget "0 fallbacks"
      tpcompiler convert weightless.pt2 --tp 2 --plan DIR/config.json --checkpoint DIR -o out
      tpcompiler convert prefill.pt2 decode.pt2 --tp 2 --plan DIR/config.json -o out
    """
    refuse_two_meshes(tp, mesh)
    if out is None and not dry_run:
        raise typer.BadParameter("give the directory to write with -o, or --dry-run", param_hint="-o")
    if plan is None:
        typer.echo("no --plan is given: the search finds one, as with --plan auto", err=True)
    with progress("reading the plan", quiet=json) as status:
        from tpcompiler.api import parallelize
        from tpcompiler.artifact.budget import Budget
        from tpcompiler.artifact.summary import (
            ConvertedArtifact,
            ConvertedPrograms,
            summarize,
            summary_parts,
        )
        from tpcompiler.artifact.writing import writer_of
        from tpcompiler.checkpoint.cut import cut_checkpoint, refuse_other_checkpoint
        from tpcompiler.cli import printing
        from tpcompiler.plan import SEARCHES, Plan
        from tpcompiler.runtime.artifact import read_manifest
        from tpcompiler.runtime.target import free_target

        over, allowed = read_mesh(tp, mesh), Budget.read(budget or (), max_wire_bytes, max_memory)
        asked: Any = str(plan or "auto")
        chosen = asked if asked in SEARCHES else Plan.of(asked, skip_unsupported=skip_unsupported)
        if out is not None and not dry_run:
            free_target(out, force=force)  # before the minutes that follow
        given = read_programs(models, imports, trust, status)
        names = given.names
        status.update("placing and cutting")
        made: Any = parallelize(
            given.programs,
            over,
            chosen,
            inputs=given.of_programs(inputs, "--input"),
            outputs=given.of_programs(outputs, "--output"),
            device_type=device_type.value if device_type else None,
            collectives=collectives.value,
            check_indices=not no_check_indices,
            machine=machine,
            memory=memory,
            optimize=optimize.value,
            weights=calls,
        )
        each: dict[str, Any] = dict(made) if names else {"": made}
        for name, one in each.items() if allowed != Budget() else ():
            allowed.check(one.manifest(), name or str(models[0]))
        if out is not None and not dry_run:
            status.update(f"writing {over.world_size} ranks' programs to {out}")
            if checkpoint is not None:
                described = [(writer_of(one, layout="shared").manifest, one.original) for one in each.values()]
                refuse_other_checkpoint(described, checkpoint, partial)
            files: Any = layout.value if layout else None
            made.save(out, force=force, keep_output_types=keep_output_types, layout=files)
            manifests = {name: read_manifest(out / name) for name in each}
            if checkpoint is not None:
                return_freed_tensors()
                cut_checkpoint(out, checkpoint, partial=partial)
        else:
            manifests = {name: one.manifest() for name, one in each.items()}
    data = {name: summarize(manifest) for name, manifest in manifests.items()}
    if json:
        where = None if dry_run else str(out)
        alone = data.get("")
        printing.print_json(
            ConvertedArtifact(**asdict(alone), out=where) if alone else ConvertedPrograms(programs=data, out=where)
        )
        return
    for name, shown in data.items():
        title = "nothing written (--dry-run)" if dry_run else str((out or Path()) / name)
        printing.print_titled(title, summary_parts(shown))


@app.command()
def show(
    directory: Artifact,
    format: Annotated[
        _Format | None,
        typer.Option("--format", help="By default what FILE's suffix says, or text.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write here, not to the terminal.")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="The rank whose program is shown.")] = 0,
    tensor: Annotated[
        str | None,
        typer.Option("--tensor", metavar="NAME", help="Which ranks hold which slices of it, as text or svg, instead."),
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show the program of a rank, or who holds what of a tensor.

    Its ops, shardings and collectives, and why each collective is there.

    \b
    Example:
      tpcompiler show out
      tpcompiler show out -o out.svg
      tpcompiler show out -o out.html
      tpcompiler show out --tensor layers.0.up.weight
    """
    if json and (format is not None or file is not None or tensor is not None):
        raise typer.BadParameter("it prints a rank's program: leave --format, -o and --tensor out", param_hint="--json")
    kind = _format(format, file)
    if tensor is not None and kind not in (_Format.text, _Format.svg):
        raise typer.BadParameter("a tensor is drawn as text or svg", param_hint="--format")
    if kind is _Format.png and file is None:
        raise typer.BadParameter("a png is no text: name its file with -o", param_hint="--format")
    if machine is not None and (json or kind is not _Format.html):
        raise typer.BadParameter("only the page predicts times: --format html", param_hint="--machine")
    with progress(f"reading {directory}", quiet=json):
        from tpcompiler.cli import printing
        from tpcompiler.runtime.model_file import import_modules
        from tpcompiler.views.table import artifact_rows

        import_modules(imports or ())
        if json:
            printing.print_json(artifact_rows(directory, rank, trust=trust))
            return
        picture = printing.picture(directory, kind.value, file, rank, tensor, machine=machine, trust=trust)
    if picture.note:
        typer.echo(picture.note, err=True)
    if picture.file is None:
        typer.echo(picture.content, nl=not str(picture.content).endswith("\n"))
    else:
        printing.write_content(picture.file, picture.content)
        typer.echo(f"wrote {picture.file}", err=True)


def _format(asked: _Format | None, file: Path | None) -> _Format:
    by_suffix = {f".{kind.value}": kind for kind in _Format} | {".gv": _Format.dot}
    return asked or by_suffix.get(file.suffix if file else "", _Format.text)


def main() -> None:
    """The entry point. A defect shows its traceback, and must not look like the answer 'not equal'."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # torch warns about its own deprecations
        warnings.simplefilter("once", TpCompilerWarning)
    if not {"TORCH_LOGS", "TRANSFORMERS_VERBOSITY"} & os.environ.keys():  # with which a user asks for logs
        mute_logs()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(str(message))}\n"
    try:
        app(prog_name="tpcompiler")
    except Exception:
        about = "this is a defect of tpcompiler: please report it with the traceback above"
        report(printable(traceback.format_exc()) + about)
        sys.exit(DEFECT)
