"""The models that a command is given, and what is said of their boundary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tpcompiler.cli.bars import Status
from tpcompiler.errors import PlanError

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=PLACEMENT",
        help="How an input is cut: x=S(0), or by axis x=dp:S(0); of several models prefill.x=S(0).",
    ),
]
Outputs = Annotated[
    list[str] | None, typer.Option("--output", metavar="NAME=PLACEMENT", help="How an output is sharded.")
]


class GivenPrograms(NamedTuple):
    """One exported program, or several by their names."""

    programs: Any
    names: list[str]

    def of_programs(self, texts: list[str] | None, option: str) -> dict[str, Any] | None:
        """Placements as `parallelize` takes them. Raises PlanError where a text says none."""
        return _of_programs(_placements(texts, option), self.names)


def read_programs(models: Sequence[Path], imports: list[str] | None, trust: bool, status: Status) -> GivenPrograms:
    """Models, of which several are called as their files. Raises PlanError where two are called alike."""
    from tpcompiler.runtime.model_file import read_model

    programs = {}
    for model in models:
        status.update(f"reading {model}")
        programs[model.stem] = read_model(model, imports or (), trust=trust)
    if len(programs) < len(models):
        raise PlanError(
            f"two models are called {models[-1].stem}", help="a model is called as its file, without the suffix"
        )
    return GivenPrograms(programs, list(programs)) if len(models) > 1 else GivenPrograms(programs[models[0].stem], [])


def _placements(texts: list[str] | None, option: str) -> dict[str, Any] | None:
    """`x=S(0)`, or by axis `x=dp:S(0),tp:R`."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, _, said = text.partition("=")
        pairs = [part.partition(":") for part in re.split(r",(?![^(]*\))", said)]  # not in S(0, unit 4)
        repeated = len({axis.strip() for axis, _, _ in pairs}) < len(pairs)
        if not name or not said or repeated or (len(pairs) > 1 and not all(placement for _, _, placement in pairs)):
            raise PlanError(f"{option} {text} names no placement", help=f"write {option} x=S(0), or x=dp:S(0),tp:R")
        by_axis = {axis.strip(): placement.strip() for axis, _, placement in pairs}
        found[name.strip()] = by_axis if pairs[0][2] else said.strip()
    return found or None


def _of_programs(placements: dict[str, Any] | None, names: list[str]) -> dict[str, Any] | None:
    """Of several programs, `prefill.x` is the x of prefill."""
    if placements is None or not names:
        return placements
    found: dict[str, Any] = {}
    for said, placement in placements.items():
        program, _, name = said.partition(".")
        if program not in names or not name:
            raise PlanError(f"{said!r} names no program", help=f"write {names[0]}.{said.rpartition('.')[2]}=S(0)")
        found.setdefault(program, {})[name] = placement
    return found
