"""The steps of `make trust`. One that fails, with an error even, hides none of those that follow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.long import LONG
from tests.trust.exits import exits
from tests.trust.long_runs import Figure, faults, kills, large
from tests.trust.packages import run_packages

ROOT = Path(__file__).parents[2]
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
Step = Callable[[], Figure]


def measured(step: Step) -> tuple[Figure, float]:
    """What a step measured, and how many seconds it took."""
    began = time.monotonic()
    try:
        figure = step()
    except Exception as error:
        traceback.print_exc()
        line = (str(error).strip() or "no text").splitlines()[0]
        figure = Figure(getattr(step, "__name__", "a step"), f"{type(error).__name__}: {line}", False)
    return figure, time.monotonic() - began


def command(what: str, words: Sequence[str], line: str, **environment: str) -> Step:
    """A step that is a module of Python: what it prints goes on to the terminal, and its figure is the last line of it
    that matches `line`."""

    def run() -> Figure:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        found = ""
        for printed in process.stdout:
            print(printed, end="", flush=True)
            if match := re.search(line, printed):
                found = match[0].strip()
        code = process.wait()
        return Figure(what, found or f"no figure, exit code {code}", bool(found) and code == 0)

    run.__name__ = what
    return run


def long_tests() -> Figure:
    """Those that are run in part by `make test`."""
    names = sorted(
        str(path)
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"tests\.long import|mark\.sweep", path.read_text())
    )
    words = ["pytest", "-q", *WORKERS, *names]
    return command("long tests", words, r"\d+ (passed|failed).* in .*", **{LONG: "1"})()


STEPS: dict[str, Step] = {
    "large": lambda: large(32, 8),
    "kills": lambda: kills(200),
    "faults": lambda: faults(50),
    "exits": lambda: exits(100),
    "packages": lambda: run_packages(100),
    "mutants": command("mutants", ["tests.trust.mutants"], r"No damage is left.*|(SURVIVED|FALSE ALARM).*"),
    "zoo": command("check of the zoo", ["tests.zoo"], r"check: \d+ conversions.*"),
    "elastic": command("there and back", ["tests.zoo.elastic"], r"\d+ models, \d+ of them not.*"),
    "plans": command("plans of the search", ["tests.zoo.found"], r"\d+ models on .*"),
    "threads": command(
        "the judge with two threads", ["pytest", "-q", "tests/soundness"], r"\d+ (passed|failed).* in .*",
        OMP_NUM_THREADS="2",
    ),
    "long": long_tests,
    "random": command(
        "random programs", ["tests.property", "10000", "--workers", "2"], r"^(counted|whole|refused|discarded|failed) \d.*"
    ),
}  # fmt: skip
