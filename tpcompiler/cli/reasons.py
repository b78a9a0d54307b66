"""The commands that say why a program communicates, what differs, and what it costs: `explain`, `diff`, `cost`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import NOT_EQUAL, Artifact, Imports, Json, Machine, Trust, app
from tpcompiler.errors import InputsError


@app.command()
def explain(
    directory: Artifact,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A node of the single-device program, a parameter or a collective.")
    ],
    machine: Machine = None,
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
    with progress(f"reading {directory}", quiet=json) as status:
        from tpcompiler.ask.explanation import explain_artifact
        from tpcompiler.cli import printing
        from tpcompiler.runtime.model_file import import_modules

        import_modules(imports or ())
        status.update("searching again")
        said = explain_artifact(directory, name, machine=machine, trust=trust)
    if json:
        printing.print_json(said)
    else:
        printing.print_parts(said.parts())


@app.command()
def diff(
    first: Artifact,
    second: Annotated[Path, typer.Argument(metavar="OUT2", help="Another one, of the same model.")],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the page of OUT2 too, where what differs is marked."),
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show what differs between two artifacts of one model.

    Placements, collectives and their bytes, what ranks hold, and the time that the collectives take. Exits with 1
    where something differs. Weights are not compared.

    \b
    Example:
      tpcompiler diff out other
      tpcompiler diff out other --html difference.html
    """
    with progress(f"reading {first}", quiet=json):
        from tpcompiler.ask.difference import diff_artifacts
        from tpcompiler.cli import printing
        from tpcompiler.runtime.model_file import import_modules

        import_modules(imports or ())
        found = diff_artifacts(first, second, machine=machine, trust=trust)
        if html is not None:
            from tpcompiler.ask.difference_page import difference_html

            page = difference_html(found, first, second, machine=machine, trust=trust)
            printing.write_content(html, page)
            typer.echo(f"wrote {html}", err=True)
    if json:
        printing.print_json(found)
    else:
        printing.print_parts(found.parts())
    if not found.equal:
        raise typer.Exit(NOT_EQUAL)


@app.command()
def cost(
    directory: Artifact,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="NAME=N,..", help="Dynamic sizes that numbers are for: batch=8,sequence=4096."),
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show what the collectives cost.

    By layer and kind: how many, wire bytes as a formula in the dynamic sizes and at the values given, and the seconds
    that they take.

    \b
    Example:
      tpcompiler cost out
      tpcompiler cost out --at batch=8,sequence=4096 --machine my.yaml
    """
    sizes = _read_sizes(at)
    with progress(f"reading {directory}", quiet=json):
        from tpcompiler.ask.costs import cost_artifact
        from tpcompiler.cli import printing
        from tpcompiler.runtime.model_file import import_modules

        import_modules(imports or ())
        table = cost_artifact(directory, sizes, machine=machine, trust=trust)
    if json:
        printing.print_json(table)
    else:
        printing.print_parts(table.parts())


def _read_sizes(text: str | None) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    for name, _, value in pairs:
        if not name.strip() or not re.fullmatch(r"\s*\d{1,18}\s*", value, re.ASCII):
            raise InputsError(
                f"--at {text!r} gives no sizes", help="write name=size, such as --at batch=8,sequence=4096"
            )
    return {name.strip(): int(value) for name, _, value in pairs}
