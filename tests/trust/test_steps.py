"""`make trust` goes on past what fails, and its table says so."""

from __future__ import annotations

import pytest

from tests.trust import __main__ as trust
from tests.trust.long_runs import Figure
from tests.trust.steps import STEPS, command


def broken() -> Figure:
    raise KeyError("x")


def test_a_step_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        trust,
        "STEPS",
        {
            "first": broken,
            "second": command("second", ["no_such_module_at_all"], "figure .*"),
            "third": command("third", ["platform"], "Linux.*|Darwin.*|Windows.*"),
            "fourth": lambda: Figure("fourth", "3 of 3", True),
        },
    )
    assert trust.main(["second", "first", "third", "fourth"]) == 1
    rows = [line.split("│") for line in capfd.readouterr().out.splitlines()]
    assert [row[-2].strip() for row in rows if len(row) == 6] == ["FAILS", "FAILS", "ok", "ok"]
    assert trust.main(["fourth"]) == 0


def test_every_part_is_a_step() -> None:
    assert list(STEPS) == [
        "large",
        "kills",
        "faults",
        "exits",
        "packages",
        "mutants",
        "zoo",
        "elastic",
        "plans",
        "views",
        "threads",
        "long",
        "random",
    ]
