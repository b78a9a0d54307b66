"""Commands that show and convert: parse, call the library, print. A command imports torch once its words are parsed."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from msgspec.structs import asdict, replace

import tpcompiler.cli.ask
import tpcompiler.cli.judge
import tpcompiler.cli.reasons
import tpcompiler.cli.run
import tpcompiler.cli.weights  # noqa: F401  (registers its commands, as do those above)
from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import (
    DEFECT,
    Calls,
    Checkpoint,
    Degrees,
    Force,
    Imports,
    Inputs,
    Json,
    Limits,
    Machine,
    Memory,
    MeshOption,
    Models,
    Optimize,
    Optimizer,
    Outputs,
    PlanFile,
    Tp,
    Trust,
    app,
    command_with,
    existing,
    read_mesh,
    read_programs,
    refuse_two_meshes,
    report,
)
from tpcompiler.cli.weights import IgnoreUnused, return_freed_tensors
from tpcompiler.errors import TpCompilerWarning, one_line, printable
from tpcompiler.runtime.hub import refuse_missing_model
from tpcompiler.runtime.records import Collectives, DeviceType, Layout
from tpcompiler.terminal.printed import mute_logs

Format = Literal["html", "svg", "png", "dot", "text"]


def _print_version(is_asked: bool) -> None:
    if is_asked:
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

    Exit codes: 0 success, 1 not equal (verify, diff, package) or not sound (check), 2 bad input or over a budget,
    3 a defect of tpcompiler, 130 interrupted.

    \b
    Example:
      tpcompiler inspect model.pt2
      tpcompiler convert model.pt2 --tp 2 --plan plan.yaml -o out
      tpcompiler verify out --against model.pt2
      torchrun --nproc-per-node 2 -m tpcompiler.cli run out --inputs in.safetensors
    """


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.pt2|OUT", parser=existing(refuse_missing_model), help="A model, or a converted directory."
        ),
    ],
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Show the program of this rank.")] = None,
    tensor: Annotated[
        str | None,
        typer.Option("--tensor", metavar="NAME", help="Show which ranks hold which slices of a tensor (text or svg)."),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Draw the program. Default: the format of FILE's suffix, or text.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the drawing here, not to the terminal.")
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show what a model or an artifact holds.

    Of a model: layers, weights, inputs and outputs, and a starter plan that lists every layer with a weight. Of an
    artifact: the report of its conversion, weights, inputs and outputs. With --rank, --format or -o: a rank's ops,
    shardings and collectives.

    \b
    Example:
      tpcompiler inspect model.pt2
      tpcompiler inspect model.pt2 --json | jq -r .plan > plan.yaml
      tpcompiler inspect out
      tpcompiler inspect out --rank 0
      tpcompiler inspect out -o out.html
      tpcompiler inspect out --tensor layers.0.up.weight
    """
    if all(value is None for value in (rank, tensor, format, out, machine)):
        with progress(f"reading {path}", quiet=json):
            is_artifact = os.path.isdir(path)  # pathlib's version may raise
            from tpcompiler.cli import printing

            if is_artifact:  # imports neither torch.export nor the search
                from tpcompiler.artifact.summary import summarize
                from tpcompiler.runtime.artifact import read_manifest

                data: Any = summarize(read_manifest(path))
            else:
                from tpcompiler.cli.describe import model_data
                from tpcompiler.runtime.model_file import read_model

                data = model_data(read_model(path, trust=trust))
        parts = (printing.artifact_parts if is_artifact else printing.model_parts)(data)
        printing.print_answer(json, data, parts, str(path))
        return
    if json and (format, out, tensor) != (None, None, None):
        raise typer.BadParameter("leave --format, -o and --tensor out", param_hint="--json")
    by_suffix: dict[str, Format] = {f".{kind}": kind for kind in get_args(Format)} | {".gv": "dot"}
    kind = format or by_suffix.get(out.suffix if out else "", "text")
    if tensor is not None and kind not in ("text", "svg"):
        raise typer.BadParameter("a tensor is drawn as text or svg", param_hint="--format")
    if kind == "png" and out is None:
        raise typer.BadParameter("a png needs a file: give one with -o", param_hint="--format")
    if machine is not None and (json or kind != "html"):
        raise typer.BadParameter("only the page predicts times: --format html", param_hint="--machine")
    with progress(f"reading {path}", quiet=json):
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing
        from tpcompiler.report.table import artifact_rows

        artifact = open(path, trust)
        if json:
            printing.print_json(artifact_rows(artifact.only, rank or 0))
            return
        content, file, note = printing.picture(artifact, kind, out, rank or 0, tensor, machine)
    if note:
        typer.echo(note, err=True)
    if file is None:
        typer.echo(content, nl=not str(content).endswith("\n"))
    else:
        printing.write_content(file, content)
        typer.echo(f"wrote {file}", err=True)


@app.command()
def convert(
    ctx: typer.Context,
    models: Models,
    plan: PlanFile = None,
    tp: Tp = None,
    mesh: MeshOption = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="The directory to write.")] = None,
    skip_unsupported: Annotated[
        bool, typer.Option("--skip-unsupported", help="Replicate layers whose style is not supported yet.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the report and write nothing.")] = False,
    force: Force = False,
    layout: Annotated[
        Layout | None,
        typer.Option(
            "--layout",
            help="ranks: weights and program in a file per rank, for torch alone. shared: weights in safetensors.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    ignore_unused: IgnoreUnused = False,
    imports: Imports = None,
    trust: Trust = False,
    keep_output_types: Annotated[
        bool, typer.Option("--keep-output-types", help="Return the model's own output classes, not plain dicts.")
    ] = False,
    device: Annotated[
        DeviceType | None,
        typer.Option("--device", help="Device type of the ranks; this machine need not have it. Default: as exported."),
    ] = None,
    collectives: Annotated[
        Collectives,
        typer.Option(
            "--collectives",
            help="Collective backend on GPUs: nccl; symm_mem wherever supported; auto where expected to be faster.",
        ),
    ] = "nccl",
    no_check_indices: Annotated[
        bool,
        typer.Option("--no-check-indices", help="Leave out the assertions on computed indices into a sharded dim."),
    ] = False,
    keep_repeats: Annotated[
        bool,
        typer.Option("--keep-repeats", help="Repeat heads of keys and values for their queries where the model does."),
    ] = False,
    machine: Machine = None,
    memory: Memory = None,
    optimize: Optimize = "latency",
    optimizer: Optimizer = "adamw",
    calls: Calls = None,
    degree: Degrees = None,
    budget: Limits = None,
    json: Json = False,
) -> None:
    """Write one program per rank.

    Weights are sharded as the plan specifies; the programs contain the collectives. The report prints, next to each
    fallback, the change of the plan that avoids it.

    \b
    Example:
      tpcompiler convert model.pt2 --tp 2 --plan plan.yaml -o out
      tpcompiler convert model.pt2 --mesh dp=2,tp=4 --plan plan.yaml --input "x=dp:S(0)" --dry-run
      tpcompiler convert model.pt2 --tp 8 --plan plan.yaml --device cuda -o out
      tpcompiler convert model.pt2 --tp 8 --plan plan.yaml -o out --budget "2 all_reduce/layer" --budget "0 fallbacks"
      tpcompiler convert weightless.pt2 --tp 2 --plan DIR/config.json --checkpoint DIR -o out
      tpcompiler convert prefill.pt2 decode.pt2 --tp 2 --plan DIR/config.json -o out
      tpcompiler convert target.pt2 draft.pt2 --tp 4 --degree draft=1 -o out
    """
    refuse_two_meshes(tp, mesh)
    if out is None and not dry_run:
        raise typer.BadParameter("give the directory to write with -o, or --dry-run", param_hint="-o")
    if plan is None:
        typer.echo("no --plan is given: the search finds one, as with --plan auto", err=True)
    with progress("reading the plan", quiet=json) as show_step:
        from tpcompiler.api import parallelize
        from tpcompiler.api.parallel_program import open
        from tpcompiler.artifact.budget import check_budget, read_budget
        from tpcompiler.artifact.summary import ConvertedArtifact, ConvertedPrograms, summarize, summary_parts
        from tpcompiler.checkpoint.cut import refuse_other_checkpoint
        from tpcompiler.cli import printing
        from tpcompiler.plan.file import SEARCHES
        from tpcompiler.plan.plan import Plan
        from tpcompiler.report.again import find_searched_plan
        from tpcompiler.runtime.artifact import SINGLE, is_single
        from tpcompiler.runtime.target import free_target

        over, limits = read_mesh(tp, mesh), read_budget(budget or ())
        source: Any = str(plan or "auto")
        chosen = source if source in SEARCHES else Plan.of(source, skip_unsupported=skip_unsupported)
        if out is not None and not dry_run:
            free_target(out, force=force)  # before the minutes that follow
        given = read_programs(models, trust, show_step)
        show_step("placing and sharding")
        made = parallelize(
            given.programs,
            over,
            chosen,
            inputs=given.placements(inputs, "--input"),
            outputs=given.placements(outputs, "--output"),
            device_type=device,
            collectives=collectives,
            check_indices=not no_check_indices,
            keep_repeats=keep_repeats,
            machine=machine,
            memory=memory,
            optimize=optimize,
            optimizer=optimizer,
            weights=calls,
            degrees=degree,
        )
        alone = is_single(made)
        for name, program in made.items() if limits else ():
            check_budget(limits, program.manifest(), str(models[0]) if alone else name)
        if out is not None and not dry_run:
            show_step(f"writing {over.world_size} ranks' programs to {out}")
            if checkpoint is not None:
                described = [(one.manifest(), one.only.original()) for one in made.values()]
                refuse_other_checkpoint(described, checkpoint, ignore_unused)
            made.save(out, force=force, keep_output_types=keep_output_types, layout=layout)
            written = open(out)
            if checkpoint is not None:
                return_freed_tensors()
                written.cut(checkpoint, partial=ignore_unused)
        else:
            written = made
        summaries = {name: summarize(program.manifest()) for name, program in written.items()}
        if not json:
            show_step("looking for changes of the plan that avoid fallbacks")
            advice = {name: program.advice() for name, program in made.items()}
        show_step("looking for a plan that holds less")
        searched = find_searched_plan({name: program.only for name, program in made.items()})
        if searched is not None:
            more = ("--plan", "auto", *(("--optimize", "memory") if searched.optimize == "memory" else ()))
            if out is not None:
                more = (*more, "-o", f"{out}_auto")  # next to what was just written
            replaced = ("--plan", "--optimize", "--skip-unsupported", "--force", "-o", "--out")
            searched = replace(searched, command=command_with(ctx, replaced, *more))
    where = None if dry_run else str(out)
    if json:
        if alone:
            own = asdict(summaries[SINGLE])
            printing.print_json(ConvertedArtifact(**own, out=where, searched_plan=searched))
        else:
            printing.print_json(ConvertedPrograms(programs=summaries, out=where, searched_plan=searched))
        return
    for name, summary in summaries.items():
        title = "nothing written (--dry-run)" if dry_run else str(out if alone else (out or Path()) / name)
        printing.print_answer(False, summary, summary_parts(summary, advice[name]), title)
    if searched is not None:
        printing.print_parts([searched.text])


def main() -> None:
    """Run the command line. A defect prints its traceback, and has another exit code than 'not equal'."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # torch warns about its own deprecations
        warnings.simplefilter("once", TpCompilerWarning)
    if not {"TORCH_LOGS", "TRANSFORMERS_VERBOSITY"} & os.environ.keys():  # a user wants logs
        mute_logs()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(str(message))}\n"
    try:
        app(prog_name="tpcompiler")
    except Exception:
        about = "this is a defect of tpcompiler: please report it with the traceback above"
        report(printable(traceback.format_exc()) + about)
        sys.exit(DEFECT)
