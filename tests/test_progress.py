"""What long steps tell, and how a terminal shows it."""

from __future__ import annotations

import io
import sys
import time
from functools import partial

import pytest
from rich.console import Console
from rich.progress import Progress

from tpcompiler.cli import bars
from tpcompiler.terminal.progress import reporting


def test_a_bar_has_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns."""
    now = 0.0
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(bars, "Console", lambda **_: console)
    monkeypatch.setattr(bars, "Progress", partial(Progress, auto_refresh=False, get_time=lambda: now))
    ops, weights = reporting("running the ranks", "ops"), reporting("cutting the weights", "bytes")
    with bars.progress("waiting") as steps:
        now = 10.0
        steps("reading [/b]")
        for done in range(4):
            now = 10.0 + done
            ops(250 * done, 25_000)
            weights(2_000_000 * done, 20_000_000)
        reporting("drawing all again", "files")(0, 2)
        *_, reading, running, cutting, _ = console.export_text().splitlines()
    assert "reading [/b]" in reading
    assert reading.endswith("0:00:03")  # since it was said
    assert running.split()[-6:] == ["750", "of", "25,000", "ops", "250.0/s", "0:01:37"]
    assert cutting.split()[-7:] == ["MB", "of", "20", "MB", "2", "MB/s", "0:00:07"]


def test_a_step_that_lasts_has_a_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name once, also of steps that begin again and again, and then how far it is; of short ones none."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", shown)

    def wait_for(text: str) -> None:
        end = time.monotonic() + 10
        while text not in shown.getvalue():
            assert time.monotonic() < end, shown.getvalue()
            time.sleep(0.01)

    monkeypatch.setattr(bars, "PATIENCE", 100.0)
    with bars.progress("short"):
        reporting("ops of it", "ops")(0, 2)
    assert shown.getvalue() == ""
    monkeypatch.setattr(bars, "PATIENCE", 0.05)
    monkeypatch.setattr(bars, "AGAIN", 0.1)
    ops, weights = reporting("trying choices", "ops"), reporting("cutting the weights", "bytes")
    with bars.progress("reading \x1b[/b]") as steps:
        wait_for("reading \\x1b[/b]\n")
        steps("searching")
        for _ in range(3):
            ops(0, 25_000)
            ops(1_000, 25_000)
            wait_for("trying choices: 25,000 ops\n")
            wait_for("  1,000 of 25,000 ops\n")
            ops(25_000, 25_000)
        weights(2_000_000, 20_000_000)
        wait_for("cutting the weights: 20 MB\n")
        wait_for("  2 MB of 20 MB\n")
        wait_for("searching\n")
    lines = shown.getvalue().splitlines()
    named = [line for line in lines if not line.startswith("  ")]
    assert sorted(named) == [
        "cutting the weights: 20 MB",
        "reading \\x1b[/b]",
        "searching",
        "trying choices: 25,000 ops",
    ]
    assert set(lines) - set(named) <= {"  1,000 of 25,000 ops", "  2 MB of 20 MB"}
    with bars.progress("silent", quiet=True) as nothing:
        nothing("as well")
        time.sleep(0.2)
    assert len(shown.getvalue().splitlines()) == len(lines)
