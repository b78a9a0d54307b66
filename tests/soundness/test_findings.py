"""Each thing that the check can find wrong, with the whole text of the finding; `tests/trust` has more ways to it."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

from tests.soundness import boundary_changes, changes
from tests.trust.damage import CHANGES
from tests.trust.subjects import subject
from tpcompiler.judge.sound.check import check_programs

assert boundary_changes  # they register their cases
assert changes
FOUND = Path(__file__).parent / "findings.txt"


@cache
def lines() -> list[str]:
    found = []
    for model, change in CHANGES:
        of = subject(model)
        artifact = of.sound.copied()
        change(artifact)
        report = check_programs(artifact.written(), artifact.manifest, of.original)
        found.append(f"{change.__name__.replace('_', ' ')} ({model})")
        found += [f"    {_lasting(each)}" for each in report.findings]
        assert report.ok == (not report.findings)
    return found


def _lasting(finding: str) -> str:
    """Without lines of code, the sizes that were drawn, and the names of bodies, which depend on torch's version."""
    finding = re.sub(r", at \w+=\d+(, \w+=\d+)*$", "", finding)
    return re.sub(r"body [0-9a-f]{12}", "body ...", re.sub(r", small[.]py:[0-9]+, in \w+", "", finding))


@pytest.mark.slow
def test_what_is_found() -> None:
    """As `findings.txt` has it."""
    if os.environ.get("EXPECTTEST_ACCEPT"):
        FOUND.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    assert lines() == FOUND.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_all_are_found() -> None:
    text = "\n".join(lines())
    missed = [
        change.__name__
        for model, change in CHANGES
        if not re.search(rf"{re.escape(change.__name__.replace('_', ' '))} .*\n    ", text)
    ]
    assert missed == []
