"""Commands that prepare a conversion: `plan` searches for plans and numbers of ranks, `calibrate` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import (
    Calls,
    Imports,
    Inputs,
    Json,
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
    read_mesh,
    read_programs,
    refuse_two_meshes,
)
from tpcompiler.cost.amounts import read_seconds


@app.command()
def plan(
    models: Models,
    tp: Tp = None,
    mesh: MeshOption = None,
    other_axes: Annotated[
        str | None,
        typer.Option(
            "--other-axes",
            metavar="AXIS=N,..",
            help="Without --tp: mesh axes next to tp, such as dp=2.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="BYTES|NAME,..",
            help="Without --tp: find the shares of unequal devices, the largest first: 24GB,12GB,12GB, or machines.",
            show_default=False,
        ),
    ] = None,
    plan: PlanFile = None,
    inputs: Inputs = None,
    outputs: Outputs = None,
    machine: Machine = None,
    memory: Memory = None,
    optimize: Optimize = "latency",
    optimizer: Optimizer = "adamw",
    calls: Calls = None,
    latency: Annotated[
        float | None,
        typer.Option(
            "--latency",
            metavar="TIME",
            parser=read_seconds,
            help="Without --tp: name the smallest number of ranks whose call (of decode) takes at most so long: 6ms.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="PLAN.yaml", help="Write the plan here, not to the terminal.")
    ] = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Search for a plan, or for the number of ranks.

    With --tp or --mesh: print the plan that the search finds, which `convert --plan auto` uses too. With --plan, the
    search keeps the given entries and adds the others. Without --tp and --mesh: compare numbers of ranks by memory and
    predicted time, or, with --devices, the shares of unequal devices.

    \b
    Example:
      tpcompiler plan model.pt2 --machine h100 --memory 24GB
      tpcompiler plan prefill.pt2 decode.pt2 --latency 6ms
      tpcompiler plan prefill.pt2 decode.pt2 --other-axes dp=2 --input "decode.x=dp:S(0)"
      tpcompiler plan model.pt2 --devices 24GB,12GB,12GB
      tpcompiler plan model.pt2 --tp 4 -o plan.yaml
      tpcompiler plan model.pt2 --tp 4 --plan mine.yaml
    """
    compares = tp is None and mesh is None
    if compares:
        for option, is_given in (("--plan", plan), ("--optimize", optimize != "latency"), ("-o", out)):
            if is_given:
                raise typer.BadParameter("give the number of ranks too, with --tp or --mesh", param_hint=option)
    else:
        refuse_two_meshes(tp, mesh)
        for option, value in (("--devices", devices), ("--other-axes", other_axes), ("--latency", latency)):
            if value is not None:
                raise typer.BadParameter("leave it out with --tp and --mesh", param_hint=option)
    with progress("reading", quiet=json) as show_step:
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import FoundPlan

        axes = read_mesh(None, other_axes, "--other-axes").axes if other_axes is not None else ()
        over = None if compares else read_mesh(tp, mesh)
        given = read_programs(models, trust, show_step)
        options: dict[str, Any] = {
            "inputs": given.placements(inputs, "--input"),
            "outputs": given.placements(outputs, "--output"),
            "machine": machine,
            "optimizer": optimizer,
            "weights": calls,
        }
        if over is None:
            from tpcompiler.api.diagnose import diagnose

            show_step("placing the model on one mesh after another")
            asked = devices.split(",") if devices is not None else None
            meant: dict[str, Any] = {"devices": asked, "other_axes": dict(axes), "memory": memory, "latency": latency}
            compared = diagnose(given.programs, **meant, **options)
        else:
            from tpcompiler.api import find_plan
            from tpcompiler.cli.describe import plan_text
            from tpcompiler.frontend.plain_weights import with_plain_weights

            show_step("searching")
            found = find_plan(given.programs, over, str(plan or "auto"), optimize=optimize, memory=memory, **options)
            text = plan_text(with_plain_weights(given.first), found)
    if over is None:
        printing.print_answer(json, compared, compared.parts(), " ".join(map(str, models)))
        return
    if out is not None:
        printing.write_content(out, text)
    if json:
        printing.print_json(FoundPlan(out=str(out) if out else None, mesh=over.written, plan=found.to_data()))
    elif out is None:
        print(text, end="")
    else:
        typer.echo(f"wrote {out}", err=True)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="machine.yaml", help="The file to write.")],
    processes: Annotated[int, typer.Option("--processes", metavar="N", help="Number of processes to start.")] = 2,
    json: Json = False,
) -> None:
    """Measure this machine, and write a file for --machine.

    Starts processes that time kernels and collectives: over NCCL if each process can have a GPU, otherwise over gloo
    with one thread each. Run nothing else at the same time.

    \b
    Example:
      tpcompiler calibrate --processes 2 -o here.yaml
      tpcompiler plan model.pt2 --machine here.yaml
    """
    if processes < 2:
        raise typer.BadParameter("a link needs at least 2 processes", param_hint="--processes")
    with progress("measuring", quiet=json):
        from tpcompiler.api.calibrate import measure_machine
        from tpcompiler.cli import printing
        from tpcompiler.cli.answers import WrittenFile

        with printing.writing(out) as file:  # fails before the minute of measuring if the file cannot be written
            text = measure_machine(processes)
            file.write_text(text, encoding="utf-8")
    if json:
        printing.print_json(WrittenFile(out=str(out)))
    else:
        typer.echo(f"wrote {out}", err=True)
