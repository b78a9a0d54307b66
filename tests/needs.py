"""Programs that some tests need, and the Debian packages that have them: `make test` names the packages that are missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = {
    "dot": "graphviz",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "c++": "g++",
    "cmake": "cmake",
    "gloo/algorithm.h": "libgloo-dev",
    "nlohmann/json.hpp": "nlohmann-json3-dev",
}
COMMAND = "apt-get install"


def find_missing() -> Iterator[str]:
    for name in PACKAGES:
        if not (Path("/usr/include", name).exists() if "/" in name else shutil.which(name)):
            yield name


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test on a machine that lacks one of these programs or headers."""
    packages = " ".join(PACKAGES[name] for name in find_missing() if name in names)
    return pytest.mark.skipif(bool(packages), reason=f"{COMMAND} {packages}")


class Missing:
    """Print one line about the tests that were skipped because a program is missing."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple) and COMMAND in report.longrepr[2]:
            self.reasons.append(report.longrepr[2].partition(COMMAND)[2])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.reasons:
            packages = sorted(set(" ".join(self.reasons).split()))
            left_out = f"{len(self.reasons)} tests were left out, as programs are missing"
            terminalreporter.write_line(f"{left_out}: {COMMAND} {' '.join(packages)}", yellow=True)
