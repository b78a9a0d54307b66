"""Random programs, as many as are asked for; an interrupted run goes on where it was.

python -m tests.property N [--from FILE] [--workers W]   until N are counted; FILE (build/property.jsonl) is added to
python -m tests.property --shrink SEED                   the smallest program that fails like one of this seed
"""

from __future__ import annotations

import argparse
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.property.run import long_run, shrunk


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.property", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=200, help="programs to count")
    parser.add_argument("--from", dest="file", type=Path, default=Path("build/property.jsonl"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shrink", type=int, metavar="SEED")
    given = parser.parse_args(words)
    if given.shrink is not None:
        shrunk(given.shrink)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no workers behind
    given.file.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(given.workers, get_context("spawn"), max_tasks_per_child=8) as pool:  # torch's caches grow
        tally = long_run(given.number, given.file, pool, given.workers)
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
