"""The commands that take an artifact to a service: `package` compiles it, `run` runs a rank."""

from __future__ import annotations

import contextlib
import os
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import NOT_EQUAL, Artifact, Imports, Json, Trust, app, report
from tpcompiler.errors import ArtifactError


class _Backend(str, Enum):
    nccl = "nccl"
    gloo = "gloo"


@app.command("package")
def package_artifact(
    directory: Artifact,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Of a rank's process on the CPU; torchrun sets one.", min=1)
    ] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="DIR", help="Check it with these weights, where none are cut yet."),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not run it: of a model whose weights are elsewhere.")
    ] = False,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Compile an artifact's programs with AOTInductor.

    Once for all ranks, into OUT/compiled.pt2; no weights are read to do so. Then all ranks run it in processes of their
    own, and must answer as the model does. Exits with 1 when they do not.

    \b
    Example:
      tpcompiler package out
      torchrun --nproc-per-node 2 --no-python tpcompiler run out --compiled --inputs in.safetensors
    """
    with progress(f"reading {directory}", quiet=json) as status:
        from tpcompiler.api.packaging import package
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import WrittenPackage
        from tpcompiler.runtime.model_file import import_modules

        import_modules(imports or ())
        status.update("compiling and checking")
        made, report = package(directory, threads=threads, check=not no_check, checkpoint=checkpoint, trust=trust)
    is_right = report is None or report.ok
    if json:
        file = str(directory / "compiled.pt2") if is_right else None
        printing.print_json(WrittenPackage(**asdict(made), out=file, report=report))
    elif is_right:
        models, on = sum(map(len, made.models.values())), made.device_type
        typer.echo(
            f"wrote {directory / 'compiled.pt2'}: {models} model{'s' * (models != 1)}, torch {made.torch}, {on}, "
            + (f"{threads} thread{'s' * (threads != 1)} a rank" if on == "cpu" else made.capability[0])
        )
        typer.echo(str(report) if report else "its numbers were not compared with the model's (--no-check)")
    else:
        typer.echo(str(report))
    if not is_right:
        typer.echo("the package is not right, and was deleted", err=True)
        raise typer.Exit(NOT_EQUAL)


@app.command()
def run(
    directory: Artifact,
    inputs: Annotated[Path, typer.Option("--inputs", metavar="FILE", help="Inputs as safetensors, by name.")],
    outputs: Annotated[
        Path | None, typer.Option("--outputs", metavar="FILE", help="Write the outputs as safetensors, by name.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--not-compiled",
            help="Run the package, which is machine code. By default with --trust.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        _Backend | None,
        typer.Option("--backend", help="Of the collectives. By default NCCL on GPUs.", show_default=False),
    ] = None,
    count: Annotated[
        bool,
        typer.Option(
            "--count", help="Count the collectives that are called, beside those that the files say. No package."
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write what every rank did when, for Perfetto or Chrome. No package."
        ),
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run the programs under torchrun.

    One process per rank; each takes its share of inputs that are cut, and rank 0 prints the whole outputs, and writes
    them where asked. With --count it exits with 1 when it
    called other collectives than its files say. A trace has a process for each rank, with the modules, and the
    collectives by module, with their bytes; open it at https://ui.perfetto.dev or in chrome://tracing.

    \b
    Example:
      torchrun --nproc-per-node 2 -m tpcompiler.cli run out --inputs in.safetensors
      torchrun --nproc-per-node 2 --no-python tpcompiler run out --inputs in.safetensors --outputs out.safetensors
      torchrun --nproc-per-node 2 --no-python tpcompiler run out --inputs in.safetensors --trace trace.json
    """
    looking = "--count" if count else "--trace" if trace else None
    if looking and compiled:
        raise typer.BadParameter("a package is machine code, whose calls are not seen", param_hint=looking)
    others = os.environ.get("RANK", "0") != "0"  # one of the ranks shows how far they are
    with progress(f"reading {directory}", quiet=json or others) as status:
        import torch.distributed as dist

        from tpcompiler.cli import printing
        from tpcompiler.cli.boundary import cut_inputs, join_outputs
        from tpcompiler.runtime.artifact import read_manifest
        from tpcompiler.runtime.inputs import read_tensors, write_tensors
        from tpcompiler.runtime.load import load
        from tpcompiler.runtime.model_file import import_modules
        from tpcompiler.runtime.run import run_file, summarize

        manifest = read_manifest(directory)
        for file in (outputs, trace):
            if file is not None and not os.path.isdir(file.parent):
                raise ArtifactError(f"cannot write {file}: {file.parent} is no directory", help="make it first")
        import_modules(imports or ())
        compiled = False if looking else compiled
        given = read_tensors(inputs)  # before the minutes that follow
        status.update(f"loading {directory}")
        module = load(directory, trust=trust, compiled=compiled, backend=backend.value if backend else None)
        status.update("running")
        with contextlib.ExitStack() as stack:
            if count:
                from tpcompiler.ask.measured import compare_counts, counts_table, watched_collectives

                calls = stack.enter_context(watched_collectives())
            if trace is not None:
                from tpcompiler.ask.trace import gather_traces, traced

                own = stack.enter_context(traced(module, manifest))
            shares = cut_inputs(given, manifest, dist.get_rank(), str(inputs))
            named = run_file(module, manifest, inputs, shares)
        named = join_outputs(named, manifest)
        whole = gather_traces(own) if trace is not None else None
    agrees = True
    if dist.get_rank() == 0:
        found = summarize(named)
        rows = compare_counts(directory, calls, given, trust=trust) if count else None
        agrees = all(row.agrees for row in rows or ())
        if outputs is not None:
            write_tensors(outputs, named)
        if trace is not None:
            printing.write_content(trace, dumps(whole))
            typer.echo(f"wrote {trace}", err=True)
        if json:
            from tpcompiler.cli.answers import Returned

            written = [None if file is None else str(file) for file in (outputs, trace)]
            printing.print_json(Returned(outputs=found, out=written[0], trace=written[1], counts=rows))
        else:
            printing.print_parts([printing.outputs_table(found), *([] if rows is None else [counts_table(rows)])])
    dist.destroy_process_group()  # as NCCL asks for
    if not agrees:
        report("the ranks called other collectives than the files say")
        raise typer.Exit(NOT_EQUAL)
