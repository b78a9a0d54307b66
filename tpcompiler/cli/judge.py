"""Commands that judge an artifact: `verify` runs it, `check` does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import NOT_EQUAL, Artifact, Checkpoint, Imports, Json, Limits, Trust, app, existing
from tpcompiler.runtime.hub import refuse_missing_model

Against = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="MODEL.pt2",
        parser=existing(refuse_missing_model),
        help="The single-device model to compare with.",
    ),
]


@app.command()
def verify(
    directory: Artifact,
    against: Against = None,
    checkpoint: Checkpoint = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            "--inputs",
            metavar="FILE",
            help="Inputs as safetensors; repeat it for further calls on the same caches. Default: the model's example "
            "inputs.",
        ),
    ] = None,
    bisect: Annotated[
        Path | None,
        typer.Option(
            "--bisect",
            metavar="DIR",
            help="If they differ, convert again and write the smallest wrong part of the model there, with a script.",
        ),
    ] = None,
    same_bits: Annotated[
        bool, typer.Option("--same-bits", help="Run on fewer processes, too: all must give the same bits.")
    ] = False,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run all ranks, and compare them with the model.

    The ranks run in lock step in this process. Without --against, the model is the artifact's copy, with the ranks' own
    weights. Several programs are called once each. Exits with 1 if outputs differ.

    \b
    Example:
      tpcompiler verify out --against model.pt2
      tpcompiler verify out --against model.pt2 --inputs in.safetensors
      tpcompiler verify out --checkpoint checkpoint
    """
    with progress(f"reading {against or directory}", quiet=json) as show_step:
        from tpcompiler.api.parallel_program import open
        from tpcompiler.api.verify import examples_of
        from tpcompiler.cli import printing
        from tpcompiler.runtime.inputs import read_inputs
        from tpcompiler.runtime.model_file import read_model

        artifact = open(directory, trust)  # its errors come before the model is read
        is_set = len(artifact.wholes) > 1
        own_words = {"--against": against, "--inputs": inputs, "--bisect": bisect}
        if is_set and (words := [word for word, value in own_words.items() if value]):
            raise typer.BadParameter("it is for one program: give OUT/NAME", param_hint=words[0])
        original, calls = None, list[Any]([(None, {})])
        if not is_set:
            original = read_model(against, trust=trust) if against else artifact.original()
            calls = [read_inputs(file, original) for file in inputs or ()]
            calls = calls or [examples_of(original, str(against or directory), "give inputs with --inputs FILE")]
        for program in artifact.values():
            if cost := printing.cost_of_verifying(program.manifest()):
                typer.echo(cost, err=True)
        show_step(f"running the model{'s' * is_set} and all ranks")
        report = artifact.verify(
            *calls[0], then=calls[1:], original=original, checkpoint=checkpoint, same_bits=same_bits
        )
    printing.print_answer(json, report, str(report).splitlines())
    if bisect is not None and not report.ok:
        with progress("converting again, to find the smallest wrong part", quiet=json):
            from tpcompiler.api.bisect import bisect_artifact

            assert original is not None
            filled = artifact.only.fill(original, checkpoint)
            result = bisect_artifact(artifact.only, filled, *calls[0], target=bisect)
        typer.echo(result, err=True)
    if not report.ok:
        raise typer.Exit(NOT_EQUAL)


@app.command()
def check(
    directory: Artifact,
    against: Against = None,
    checkpoint: Checkpoint = None,
    budget: Limits = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Check programs and tensors without running the model.

    Each op's shares must follow from its rule, changes of sharding are run on small tensors, all ranks must issue the
    same collectives, and tensors must be those of the manifest. Exits with 1 otherwise. Weights are compared with the
    model's only with --against or --checkpoint.

    \b
    Example:
      tpcompiler check out
      tpcompiler check out --against model.pt2
      tpcompiler check out --budget budget.yaml
    """
    with progress(f"reading {directory}", quiet=json) as show_step:
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing
        from tpcompiler.runtime.model_file import read_model

        artifact = open(directory, trust)  # its errors come before the model is read
        artifact.check_budget(budget or ())
        model = read_model(against, trust=trust) if against else None
        show_step("checking all ranks")
        report = artifact.check(model, checkpoint=checkpoint)
    note = "weights were not compared with the model's: pass --against MODEL.pt2, or --checkpoint DIR"
    printing.print_answer(json, report, [*str(report).splitlines(), *([] if report.weights_compared else [note])])
    if not report.ok:
        raise typer.Exit(NOT_EQUAL)
