"""Commands that ask the search before anything is converted: the plan that it finds, and what each degree costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec import convert

from tpcompiler.cli.bars import progress
from tpcompiler.cli.given import Inputs, Outputs, read_programs
from tpcompiler.cli.options import (
    Calls,
    Goals,
    Imports,
    Json,
    Machine,
    Memory,
    MeshOption,
    Optimize,
    Tp,
    Trust,
    app,
    read_mesh,
    refuse_two_meshes,
)

Model = Annotated[Path, typer.Argument(metavar="MODEL.pt2", help="What torch.export.save wrote.")]


@app.command()
def plan(
    model: Model,
    tp: Tp = None,
    mesh: MeshOption = None,
    memory: Memory = None,
    machine: Machine = None,
    optimize: Optimize = Goals.latency,
    partial: Annotated[
        Path | None,
        typer.Option("--partial", metavar="PLAN.yaml", help="A plan for some layers; the search decides the rest."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="PLAN.yaml", help="Write here, not to the terminal.")
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Write the plan that the search finds.

    `convert` makes of it what it makes of `--plan auto`, with the same options. Edit it: what no line names, the
    search decides anew.

    \b
    Example:
      tpcompiler plan model.pt2 --tp 4 -o plan.yaml
      tpcompiler plan model.pt2 --tp 4 --partial mine.yaml --memory 24GB
      tpcompiler convert model.pt2 --tp 4 --plan plan.yaml -o out
    """
    refuse_two_meshes(tp, mesh)
    with progress(f"reading {model}", quiet=json) as status:
        from tpcompiler.api import find_plan
        from tpcompiler.ask.plan_text import plan_text
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import FoundPlan
        from tpcompiler.frontend.plain_weights import with_plain_weights
        from tpcompiler.plan import Plan
        from tpcompiler.runtime.model_file import read_model

        over, given = read_mesh(tp, mesh), Plan() if partial is None else Plan.of(partial)
        program = read_model(model, imports or (), trust=trust)
        status.update("searching")
        found = find_plan(program, over, given, machine=machine, memory=memory, optimize=optimize.value)
        text = plan_text(with_plain_weights(program), found)
    if out is not None:
        printing.write_content(out, text)
    if json:
        printing.print_json(FoundPlan(out=str(out) if out else None, mesh=dict(over.axes), plan=found.to_data()))
    elif out is None:
        print(text, end="")
    else:
        typer.echo(f"wrote {out}", err=True)


@app.command()
def doctor(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL.pt2", help="What torch.export.save wrote; several share their weights and caches."
        ),
    ],
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXIS=N,..", help="Axes beside tp, whose degrees are tried, such as dp=2."),
    ] = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    machine: Machine = None,
    memory: Memory = None,
    calls: Calls = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Say on how many ranks a model fits, and what each number of them costs.

    The search places it on every degree, as `convert --plan auto` would. Step times are the machine's by its file.

    \b
    Example:
      tpcompiler doctor model.pt2
      tpcompiler doctor model.pt2 --machine mine.yaml --memory 24GB
      tpcompiler doctor model.pt2 --mesh dp=2 --input "x=dp:S(0)"
      tpcompiler doctor prefill.pt2 decode.pt2
    """
    with progress("reading", quiet=json) as status:
        from tpcompiler.api.doctor import diagnose
        from tpcompiler.cli import printing

        given = read_programs(models, imports, trust, status)
        status.update("placing it on every number of ranks")
        found = diagnose(
            given.programs,
            beside=None if mesh is None else dict(read_mesh(None, mesh).axes),
            inputs=given.of_programs(inputs, "--input"),
            outputs=given.of_programs(outputs, "--output"),
            machine=machine,
            memory=memory,
            weights=calls,
        )
    if json:
        printing.print_json(found)
    else:
        printing.print_titled(" ".join(map(str, models)), found.parts())


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="machine.yaml", help="The file to write.")],
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", help="How many processes are started.")] = 2,
    json: Json = False,
) -> None:
    """Measure this machine, for --machine.

    Starts processes of its own: with NCCL where each can have a GPU, otherwise with gloo, one thread each. Nothing else
    should run meanwhile.

    \b
    Example:
      tpcompiler calibrate --ranks 2 -o here.yaml
      tpcompiler doctor model.pt2 --machine here.yaml
    """
    if ranks < 2:
        raise typer.BadParameter("between fewer than 2 ranks there is no link to measure", param_hint="--ranks")
    with progress("measuring", quiet=json):
        from tpcompiler.api.calibrate import machine_data, measure_machine
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import Calibration

        with printing.writing(out) as file:  # what cannot be written is refused before the minute that follows
            text = measure_machine(ranks)
            file.write_text(text, encoding="utf-8")
    if json:
        printing.print_json(convert({"out": str(out), **machine_data(text)}, Calibration, strict=False))
    else:
        typer.echo(f"wrote {out}", err=True)
