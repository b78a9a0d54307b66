"""Lists of known findings: lines "OP: finding" under comments with the reason, "? " before those that may be found."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.rules.sample import Sample
from tests.rules.samples import SAMPLES

OPS = sorted({str(sample.target) for sample in SAMPLES})


def samples_of(op: str) -> list[Sample]:
    return [sample for sample in SAMPLES if str(sample.target) == op]


def read_list(path: Path) -> tuple[set[str], set[str]]:
    """Return the lines that must be found, and those that may be."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("# ")]
    assert len(lines) == len(set(lines)), "a line is repeated"
    assert {_op_of(line.removeprefix("? ")) for line in lines} <= set(OPS), "a line has an op without a sample"
    return {line for line in lines if line[0] != "?"}, {line[2:] for line in lines if line[0] == "?"}


def changes(path: Path, op: str, found: Collection[str]) -> str:
    """Return the lines to add to the list and those to remove from it, for it to agree with the findings for an op."""
    must, may = (_lines_of(op, lines) for lines in read_list(path))
    added, removed = sorted({*found} - must - may), sorted(must - {*found})
    return "\n".join([*(f"+ {line}" for line in added), *(f"- {line}" for line in removed)])


def _lines_of(op: str, lines: Iterable[str]) -> set[str]:
    return {line for line in lines if _op_of(line) == op}


def _op_of(line: str) -> str:
    return re.split("[: ]", line)[0]
