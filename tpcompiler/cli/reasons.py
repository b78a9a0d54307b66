"""The commands that say why a program communicates: `explain` of one value."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from tpcompiler.cli.options import Artifact, Imports, Json, MachineOption, Trust, app, progress


@app.command()
def explain(
    directory: Artifact,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A node of the single-device program, a parameter or a collective.")
    ],
    machine: MachineOption = "h100",
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Say why a value is placed as it is.

    What it is and which rank holds which part of it; the plan line, rule or search that placed it; what its operands
    had to be; the collectives that it takes part in. Then every other choice with its price: what the cheapest program
    with it costs above the cheapest of all.

    \b
    Example:
      tpcompiler explain out layers.0.down.weight
      tpcompiler explain out all_reduce --json
    """
    with progress(f"reading {directory}") as status:
        from tpcompiler.cli import printing
        from tpcompiler.explain.explanation import explain_artifact
        from tpcompiler.runtime.model_file import import_modules

        import_modules(imports or ())
        status.update("searching again")
        said = explain_artifact(directory, name, machine=machine, trust=trust)
    if json:
        printing.print_json(dataclasses.asdict(said))
    else:
        printing.print_explanation(said, machine)
