"""Exported programs and the placements of their inputs and outputs, as commands take them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from tpcompiler.cli.bars import Status
from tpcompiler.errors import PlanError

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=PLACEMENT|auto",
        help="Sharding of an input: x=S(0), or by axis x=dp:S(0); with several models prefill.x=S(0). "
        "auto: the batch is cut over each axis where that pays.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option("--output", metavar="NAME=PLACEMENT", help="Sharding of an output (same syntax as --input)."),
]


class GivenPrograms(NamedTuple):
    """One exported program, or several by name."""

    programs: Any
    names: list[str]

    @property
    def first(self) -> Any:
        return self.programs[self.names[0]] if self.names else self.programs

    def placements(self, texts: list[str] | None, option: str) -> dict[str, Any] | Literal["auto"] | None:
        """Read placements for `parallelize`; with several programs `prefill.x` is the x of prefill.

        Raises:
            PlanError: a text that has another form, or names no program.
        """
        if texts == ["auto"] and option == "--input":
            return "auto"
        placements = _read_placements(texts, option)
        if placements is None or not self.names:
            return placements
        by_program: dict[str, Any] = {}
        for path, placement in placements.items():
            program, _, name = path.partition(".")
            if program not in self.names or not name:
                help = f"write {self.names[0]}.{path.rpartition('.')[2]}=S(0)"
                raise PlanError(f"{path!r} names no program", help=help)
            by_program.setdefault(program, {})[name] = placement
        return by_program


def read_programs(models: Sequence[Path], imports: list[str] | None, trust: bool, status: Status) -> GivenPrograms:
    """Read model files; the name of a program is its file's, without the suffix.

    Raises:
        PlanError: two files with one name.
    """
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


def _read_placements(texts: list[str] | None, option: str) -> dict[str, Any] | None:
    """Read `x=S(0)`, or by axis `x=dp:S(0),tp:R`."""
    placements: dict[str, Any] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        pairs = [part.partition(":") for part in re.split(r",(?![^(]*\))", value)]  # not in S(0, unit 4)
        repeated = len({axis.strip() for axis, _, _ in pairs}) < len(pairs)
        if not name or not value or repeated or (len(pairs) > 1 and not all(placement for _, _, placement in pairs)):
            raise PlanError(f"{option} {text} names no placement", help=f"write {option} x=S(0), or x=dp:S(0),tp:R")
        by_axis = {axis.strip(): placement.strip() for axis, _, placement in pairs}
        placements[name.strip()] = by_axis if pairs[0][2] else value.strip()
    return placements or None
