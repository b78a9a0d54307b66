"""Every kind of damage is noticed, in small models; `python -m tests.trust.mutants` has ten models of the zoo."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.long import some
from tests.trust.damage import damaged
from tests.trust.kinds import KINDS
from tests.trust.mutants import Mutant, judged
from tests.trust.subjects import subject

SMALL = ("rows", "attend", "images", "uneven", "rows, two axes", "in turns")
NOTICED = Path(__file__).parent / "noticed.txt"


def _first_of_each(kinds: Iterable[str]) -> Iterator[Mutant]:
    for kind in kinds:
        made = ((name, damaged(kind, subject(name).sound)) for name in SMALL)
        name, artifact = next((each for each in made if each[1] is not None), ("", None))
        assert artifact is not None, f"no small model has a place for {kind!r}"
        yield Mutant(kind, name, *judged(subject(name), artifact))


def _lasting(line: str) -> str:
    """Without lines of code, and the sizes and values that were drawn."""
    line = re.sub(r"they differ by \S+ of \S+$", "they differ", line)
    return re.sub(r", at \w+=\d+(, \w+=\d+)*$", "", re.sub(r", small\.py:\d+, in forward", "", line))


def _line(mutant: Mutant) -> str:
    judges = "".join(judge[0] if judge in mutant.by else "-" for judge in ("check", "verify"))
    with_original = "o" if "check with original" in mutant.by else "-"
    return f"{judges[0]}{with_original}{judges[1]}  {mutant.kind} ({mutant.model}): {mutant.found}"


@pytest.mark.slow
def test_every_kind_is_noticed() -> None:
    """By the check alone (c), by it with the original (o), by running (v): as `noticed.txt` has it, finding and all."""
    accept = bool(os.environ.get("EXPECTTEST_ACCEPT"))
    every = 1 if accept else 3
    lines = [_lasting(_line(mutant)) for mutant in _first_of_each(some(sorted(KINDS), every))]
    if accept:
        NOTICED.write_text("\n".join(lines) + "\n", encoding="utf-8")
    recorded = NOTICED.read_text(encoding="utf-8").splitlines()
    assert len(recorded) == len(KINDS)
    assert lines == some(recorded, every)
    assert not [line for line in lines if line.startswith("---")]
    assert len(lines) >= 24


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*SMALL, "rows, 4 ranks", "choose", "quantised", "cache by steps"])
def test_what_is_sound_is_accepted(name: str) -> None:
    assert judged(subject(name), subject(name).sound) == (frozenset(), "")
