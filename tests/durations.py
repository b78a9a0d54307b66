"""Compare the seconds that each file of tests takes with durations.json, and print the files that have become slower.

Machines and their loads differ. So files are compared with one another: a file counts as slower if it has grown by more
than the median file. A file without a record counts as one of `NEW` seconds. `make test` only prints it: a machine that
stops for 20 seconds proves nothing about the file that it ran. `make trust`, where nothing else runs, fails.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

RECORD = Path(__file__).parent / "durations.json"
VARIABLE = "TPCOMPILER_DURATIONS"  # "check", "fail" or "record"
FACTOR, SECONDS = 2.5, 20  # by both of which a file has to have grown
NEW = 5
SHORT = 1.0  # files of fewer seconds say nothing about the machine


def read_record() -> dict[str, float]:
    """Seconds by file."""
    record: dict[str, float] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return record


def grown(spent: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """What to say of each file of which the time has grown."""
    ratios = [spent[file] / recorded[file] for file in spent if recorded.get(file, 0) > SHORT]
    if not ratios:
        return []  # nothing is recorded yet
    pace = statistics.median(ratios)
    found = []
    for file, seconds in sorted(spent.items()):
        before = recorded.get(file, NEW) * pace
        if seconds > before * FACTOR and seconds > before + SECONDS * pace:
            found.append(
                f"{file} takes {seconds:.0f} s, and took {before:.0f} s (on a machine like this one): "
                f"make it faster, or record it: {VARIABLE}=record make test"
            )
    return found


class Durations:
    """A plugin of the process that gathers the reports of all workers."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.spent: Counter[str] = Counter()
        self.said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]  # Counter counts

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus:
            return
        if self.mode == "record":
            record = {file: round(seconds, 1) for file, seconds in sorted(self.spent.items())}
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            return
        self.said = grown(self.spent, read_record())
        if self.said and self.mode == "fail":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.spent.values())
        terminalreporter.write_line(f"{total:.0f} s in {len(self.spent)} files of tests, by all workers together")
        for line in self.said:
            terminalreporter.write_line(line, red=True)
