"""The commands that judge what was written: `verify` by running it, `check` without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import (
    NOT_EQUAL,
    Artifact,
    Imports,
    Json,
    Limits,
    MaxMemory,
    MaxWireBytes,
    Trust,
    app,
)
from tpcompiler.errors import InputsError


@app.command()
def verify(
    directory: Artifact,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="MODEL.pt2",
            help="The model that was converted. By default as the artifact holds it, with the ranks' own weights.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="DIR", help="Its weights, where it was exported without: safetensors."),
    ] = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--inputs",
            metavar="FILE",
            help="Inputs as safetensors; several times for several calls on the same caches. By default the example "
            "inputs in the model.",
        ),
    ] = None,
    bisect: Annotated[
        Path | None,
        typer.Option(
            "--bisect",
            metavar="DIR",
            help="Where they differ, convert anew, and write the smallest wrong piece there, with a script.",
        ),
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Compare all ranks with the model.

    They run in lock step in this process. Exits with 1 when they differ.

    \b
    Example:
      tpcompiler verify out --against model.pt2
      tpcompiler verify out --against model.pt2 --inputs in.safetensors
      tpcompiler verify out --checkpoint checkpoint
    """
    with progress(f"reading {against or directory}", quiet=json) as status:
        from tpcompiler.api.verify_files import verify_artifact
        from tpcompiler.checkpoint.fill import read_original, with_weights
        from tpcompiler.cli import printing
        from tpcompiler.runtime.artifact import read_manifest
        from tpcompiler.runtime.inputs import read_inputs
        from tpcompiler.runtime.model_file import import_modules, read_model

        manifest = read_manifest(directory)  # its errors come before the model is read
        import_modules(imports or ())
        original = read_model(against, trust=trust) if against else read_original(directory, manifest, trust=trust)
        if inputs:
            calls = [read_inputs(file, original) for file in inputs]
        elif original.example_inputs is not None:
            calls = [original.example_inputs]
        else:
            raise InputsError(
                f"{against or directory} was saved without example inputs", help="give inputs with --inputs FILE"
            )
        if said := printing.cost_of_verifying(manifest):
            typer.echo(said, err=True)
        status.update("running the model and all ranks")
        report = verify_artifact(directory, original, *calls[0], then=calls[1:], checkpoint=checkpoint, trust=trust)
    if json:
        printing.print_json(report)
    else:
        typer.echo(str(report))
    if bisect is not None and not report.ok:
        with progress("converting anew, and looking for the smallest wrong piece", quiet=json):
            from tpcompiler.api.bisect import bisect_artifact

            original = with_weights(original, directory, checkpoint, trust=trust)
            said = bisect_artifact(directory, original, *calls[0], target=bisect)
        typer.echo(said, err=True)
    if not report.ok:
        raise typer.Exit(NOT_EQUAL)


@app.command()
def check(
    directory: Artifact,
    original: Annotated[
        Path | None, typer.Option("--original", metavar="MODEL.pt2", help="Compare the weights with this model's too.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="DIR", help="The same with the weights in these safetensors."),
    ] = None,
    budget: Limits = None,
    max_wire_bytes: MaxWireBytes = None,
    max_memory: MaxMemory = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Check the written programs against what they claim.

    Nothing of the model is run: every op's share follows from its rule, what ranks do together is run on small
    tensors, all ranks issue the same collectives, and the tensors are what the manifest says. Exits with 1 where
    something does not hold. The weights are compared with the model's only where --original gives it.

    \b
    Example:
      tpcompiler check out
      tpcompiler check out --original model.pt2
    """
    with progress(f"reading {directory}", quiet=json) as status:
        from tpcompiler import api
        from tpcompiler.cli import printing
        from tpcompiler.runtime.artifact import programs_in, read_manifest
        from tpcompiler.runtime.model_file import import_modules, read_model

        if not programs_in(directory):
            read_manifest(directory)  # its errors come before the model is read
        api.check_budget(directory, budget or (), max_wire_bytes=max_wire_bytes, max_memory=max_memory)
        import_modules(imports or ())
        model = read_model(original, trust=trust) if original else None
        status.update("checking all ranks")
        report = api.check(directory, model, checkpoint=checkpoint, trust=trust)
    if json:
        printing.print_json(report)
    else:
        typer.echo(str(report))
        if not report.weights_compared:
            typer.echo("the weights were not compared with the model's: pass --original MODEL.pt2, or --checkpoint DIR")
    if not report.ok:
        raise typer.Exit(NOT_EQUAL)
