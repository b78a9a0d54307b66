"""`python -m tests.trust.mutants [--places N] [MODEL ...]`: damage models in every way known, and see what notices."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from tests.trust.damage import Artifact, damaged
from tests.trust.kinds import KINDS
from tests.trust.subjects import SUBJECTS, Subject, subject

JUDGES = ("check", "check with original", "verify")


@dataclass(frozen=True)
class Mutant:
    """What noticed a damage: `by` names the judges; `found` is what the check said first."""

    kind: str
    model: str
    by: frozenset[str]
    found: str

    @property
    def survived(self) -> bool:
        return not self.by


def judged(of: Subject, artifact: Artifact) -> tuple[frozenset[str], str]:
    """The judges that refuse the artifact. A judge that fails with an error of its own refuses too, and the check may
    not: it has to say what is wrong."""
    reports = {name: of.check(artifact, with_original=name != "check") for name in JUDGES[:2]}
    by = {name for name, report in reports.items() if not report.ok}
    try:
        if not of.verified(artifact):
            by.add("verify")
    except Exception:  # ranks that disagree, shapes that do not fit, ids out of range, a name that is not there
        by.add("verify")
    return frozenset(by), (reports[JUDGES[1]].findings or [""])[0]


def mutants(model: str, places: int = 1) -> Iterator[Mutant]:
    of = subject(model)
    for name in KINDS:
        for nth in range(places):
            made = damaged(name, of.sound, nth)
            if made is not None:
                yield Mutant(name, model, *judged(of, made))


def main(words: Sequence[str]) -> int:
    """Print the table; 1 if a damage is noticed by nothing, or a sound artifact is refused."""
    parser = argparse.ArgumentParser(description="What notices a damage.")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--places", type=int, default=1, help="of each kind in each model: the first, the last, ...")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows: dict[str, list[Mutant]] = defaultdict(list)
    bad = []
    for model in given.models or SUBJECTS:
        by, found = judged(subject(model), subject(model).sound)
        if by:
            bad.append(f"FALSE ALARM: {model}: {', '.join(by)}: {found}")
        for mutant in mutants(model, given.places):
            rows[mutant.kind].append(mutant)
            if mutant.survived:
                bad.append(f"SURVIVED: {mutant.kind} in {model}")
        print(model, sum(map(len, rows.values())), *bad, sep="\n  ", file=sys.stderr, flush=True)
    table = Table("damage", "mutants", *(f"by {judge}" for judge in JUDGES), "survived", title="what notices a damage")
    for name in KINDS:
        table.add_row(name, *_cells(rows[name]))
    table.add_section()
    table.add_row("all", *_cells([mutant for found in rows.values() for mutant in found]))
    console = Console(width=120)
    console.print(table)
    console.print("\n".join(bad) or "No damage is left unnoticed, and no sound artifact is refused.")
    return bool(bad)


def _cells(found: Sequence[Mutant]) -> list[str]:
    counts = [sum(judge in mutant.by for mutant in found) for judge in JUDGES]
    return [str(n) for n in (len(found), *counts, sum(mutant.survived for mutant in found))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
