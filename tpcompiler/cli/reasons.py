"""Commands that explain an artifact: `explain` gives reasons and costs, `diff` compares two artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpcompiler.cli.bars import progress
from tpcompiler.cli.options import (
    NOT_EQUAL,
    Artifact,
    Imports,
    Json,
    Machine,
    OtherArtifact,
    Trust,
    app,
    numbers_by_name,
)

if TYPE_CHECKING:
    from tpcompiler.report.costs import CostTable
    from tpcompiler.report.explanation import Explanation


@app.command()
def explain(
    directory: Artifact,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A node of the single-device program, a parameter or a collective."),
    ] = None,
    at: Annotated[
        Any,
        typer.Option(
            "--at",
            metavar="NAME=N,..",
            parser=numbers_by_name("--at", int, "gives no sizes, as batch=8,sequence=4096 does"),
            help="Without NAME: values of dynamic sizes: batch=8,sequence=4096.",
        ),
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Explain what collectives cost, or one placement.

    Without NAME: collectives by layer and kind, with wire bytes as a formula in the dynamic sizes, and seconds. With
    NAME: the parts that ranks hold, the plan entry, rule or search that placed the value, its operands' shardings and
    its collectives; then every other choice, with its extra cost for the whole program.

    \b
    Example:
      tpcompiler explain out
      tpcompiler explain out --at batch=8,sequence=4096 --machine my.yaml
      tpcompiler explain out layers.0.down.weight
      tpcompiler explain out all_reduce --json
    """
    if name is not None and at is not None:
        raise typer.BadParameter(
            "leave it out with NAME: choices are compared at the example's sizes", param_hint="--at"
        )
    with progress(f"reading {directory}", quiet=json) as show_step:
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing

        artifact = open(directory, trust)
        answer: CostTable | Explanation
        if name is None:
            answer = artifact.cost(at, machine=machine)
        else:
            show_step("searching again")
            answer = artifact.explain(name, machine=machine)
    printing.print_answer(json, answer, answer.parts())


@app.command()
def diff(
    first: Artifact,
    second: OtherArtifact,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the page of OUT2, with the differences marked."),
    ] = None,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Compare two artifacts of one model.

    Prints differences of placements, collectives, bytes per rank and predicted time. Exits with 1 if there are any.
    Weights are not compared.

    \b
    Example:
      tpcompiler diff out other
      tpcompiler diff out other --html difference.html
    """
    with progress(f"reading {first}", quiet=json):
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing

        both = open(first, trust), open(second, trust)
        found = both[0].diff(both[1], machine=machine)
        if html is not None:
            from tpcompiler.report.html import difference_html

            printing.write_content(html, difference_html(found, both[0].only, both[1].only, machine))
            typer.echo(f"wrote {html}", err=True)
    printing.print_answer(json, found, found.parts())
    if not found.equal:
        raise typer.Exit(NOT_EQUAL)


@app.command()
def handover(
    source: Artifact,
    target: OtherArtifact,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE.json", help="Write which rank sends which part.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Hand over OUT2's parameters instead, in its dtype.")
    ] = False,
    machine: Machine = None,
    imports: Imports = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Hand caches, or weights, from one artifact's ranks to another's.

    Lists the parts of all buffers that OUT writes (caches of a prefill, states) by the rank that sends them and the
    rank of OUT2 that receives them, with their bytes and seconds. `tpcompiler.join_handover` sends them.

    \b
    Example:
      tpcompiler handover prefill decode -o handover.json
      tpcompiler handover chat8/prefill chat4/decode --machine h100-2x8
      tpcompiler handover trainer chat/prefill --weights -o weights.json
    """
    with progress(f"reading {source}", quiet=json):
        from tpcompiler.api.parallel_program import open
        from tpcompiler.cli import printing

        answer = open(source, trust).handover(open(target, trust), machine=machine, weights=weights)
    if out is not None:
        answer.save(out)
        typer.echo(f"wrote {out}", err=True)
    printing.print_answer(json, answer, answer.parts())
