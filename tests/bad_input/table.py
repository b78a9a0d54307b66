"""Bad inputs, and the whole message for each. `python -m tests.bad_input.table` writes docs/bad-input.md."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.bad_input import (
    rows_artifacts,
    rows_calls,
    rows_checkpoints,
    rows_files,
    rows_launches,
    rows_machines,
    rows_manifests,
    rows_packages,
    rows_plans,
    rows_reasons,
    rows_searches,
    rows_sets,
    rows_training,
    rows_unequal,
    rows_weights,
)
from tests.bad_input.row import Row
from tpcompiler import __version__

PAGE = Path(__file__).parents[2] / "docs" / "bad-input.md"

TABLE: dict[str, list[Row]] = {
    "Files": rows_files.FILES,
    "Models": rows_files.MODELS,
    "Plans": rows_plans.PLANS,
    "Meshes": rows_plans.MESHES,
    "Machines": rows_machines.MACHINES,
    "Searches": rows_searches.SEARCHES,
    "Boundaries": rows_plans.BOUNDARIES,
    "Inputs": rows_files.INPUTS,
    "Artifacts": rows_artifacts.ARTIFACTS,
    "Manifests": rows_manifests.MANIFESTS,
    "Reasons": rows_reasons.REASONS,
    "Weights": rows_weights.WEIGHTS,
    "Checkpoints": rows_checkpoints.CHECKPOINTS,
    "Packages": rows_packages.PACKAGES,
    "Environments": rows_calls.ENVIRONMENTS,
    "Under torchrun": rows_launches.LAUNCHES,
    "Calls from Python": rows_calls.CALLS,
    "Training": rows_training.TRAINING,
    "Several models": rows_sets.SETS,
    "Unequal devices": rows_unequal.UNEQUAL,
}

TOP = """# Bad input

Written by `python -m tests.bad_input.table`; do not edit. Each row is a test (`tests/bad_input/test_table.py`): the command
prints the message and nothing else, shows no traceback, and writes or changes no file.

Exit codes: 0 a note, and the command continues; 1 not equal (`verify`) or not sound (`check`); 2 bad input or over a budget.
Under torchrun, the message of the first rank that failed is at the end of torchrun's own text. In Python the same messages are exceptions,
listed here by name. `<torch>` and `<tpcompiler>` are versions, `<hash>` is the beginning of a SHA-256,
`<reason>` is the message of the library that reads the file.
"""


def masked(text: str) -> str:
    """The text without what differs from machine to machine or is long."""
    for version, name in ((torch.__version__, "<torch>"), (__version__, "<tpcompiler>")):
        text = text.replace(version, name)
    text = re.sub(r"\b[0-9a-f]{12}\.\.", "<hash>..", text)
    text = re.sub(r"(is not a safetensors file: ).*", r"\1<reason>", text)
    return text.replace("a" * 300, "<300 letters>")


def page() -> str:
    parts = [TOP]
    for title, rows in TABLE.items():
        parts.append(f"\n## {title}\n\n| what is wrong | the message | exit code |\n|---|---|---|\n")
        parts += [_line(row) for row in rows]
    return "".join(parts)


def _line(row: Row) -> str:
    what = f"{row.what}:<br>{_code(masked(row.call))}" if isinstance(row.call, str) else row.what
    said = "<br>".join(_code(line.strip()) for line in masked(row.text).splitlines())
    code = row.code if isinstance(row.code, int) else f"`{row.code.__name__}`"
    return f"| {what} | {said} | {code} |\n"


def _code(text: str) -> str:
    fence = "`` {} ``" if "`" in text else "`{}`"
    return fence.format(text.replace("|", r"\|"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
