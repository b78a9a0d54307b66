"""Measure the rules on torch's own op database: every op that torch tests, with torch's sample inputs.

    python -m tools.op_coverage rules      --cache FILE   every distinct call that has a rule, run on shards
    python -m tools.op_coverage shardable  --cache FILE   which dims can be cut at all, found by running shards
    python -m tools.op_coverage whole      --cache FILE   some samples per op: exported, cut, converted, run, compared
    python -m tools.op_coverage report     --cache FILE   figures; --write puts them into tests/op_db
    python -m tools.op_coverage page                      docs/ops.md, from the rules and the checked-in results

Every op runs in a process of its own, so a crash of torch or a call that does not end costs one call. What is done is
in FILE, and an interrupted run goes on. Rows of `rules` and `whole` count for the rules that they were made with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

from tests.op_db.database import calls, name_of, ops_named
from tests.op_db.judge import UNDEFINED, key, verdict
from tests.op_db.page import figures, fingerprint, write, write_page
from tests.op_db.shardable import cuts, declined, sound
from tests.op_db.whole import largest, outcomes
from tpcompiler._torch import OpOverload

Row = dict[str, Any]
Begin = Callable[[str], bool]  # notes that a piece of work begins; False: it was done before, or ended the process
WORKERS = 2


def rules(op: Any, begin: Begin, _: int) -> Iterator[Row]:
    """The verdict on every distinct call of the canonical form, and which cuts of every call the rules keep."""
    for call in calls(op):
        if begin(f"call {key(call.node)}"):
            found = [[cut.line, cut.operand, cut.dim, declined(call, cut)] for cut in cuts(call.node)]
            yield {"call": key(call.node), "op": str(call.node.target), "declined": found}
        for node in call.inside.nodes:
            if isinstance(node.target, OpOverload) and begin(key(node)):
                what, text = verdict(node)
                yield {"leaf": key(node), "op": str(node.target), "verdict": what, "text": text}


def shardable(op: Any, begin: Begin, _: int) -> Iterator[Row]:
    """The cuts of every distinct call that are right by execution. No rule is asked."""
    for call in calls(op):
        if begin(f"call {key(call.node)}"):
            found = sound(call.node)
            if found is not None:
                ways = [[cut.line, cut.operand, cut.dim] for cut in sorted(found)]
                yield {"call": key(call.node), "op": str(call.node.target), "sound": ways}


def whole(op: Any, begin: Begin, samples: int) -> Iterator[Row]:
    """A few samples through export, `parallelize` and `verify`, one cut input at a time."""
    if op.supports_dtype(torch.float32, "cpu") and op.name not in UNDEFINED:
        for at, sample in enumerate(largest(op.sample_inputs("cpu", torch.float32), samples)):
            if begin(f"sample {at} of {name_of(op)}"):
                for outcome in outcomes(op.op, sample):
                    yield {"sample": at, "what": outcome.what, "placed": outcome.placed, "text": outcome.text}


PARTS = {"rules": rules, "shardable": shardable, "whole": whole}


class Cache:
    """The rows of every op that is done, one line of JSON per op."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = fingerprint()
        self.done: dict[tuple[str, str], Row] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["part"] == "shardable" or entry["rules"] == self.mark:
                self.done[entry["part"], entry["op"]] = entry

    def add(self, entry: Row) -> None:
        self.done[entry["part"], entry["op"]] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def rows(self, part: str) -> Iterator[Row]:
        for (of, op), entry in self.done.items():
            if of == part:
                yield from ({"sample_of": op, **row} for row in entry["rows"])


class Job:
    """One op in a forked process, which sends rows; when it dies it is started again behind the call that killed it."""

    def __init__(self, part: str, op: Any, args: argparse.Namespace, seen: set[str]) -> None:
        self.part, self.op, self.args, self.seen = part, op, args, seen
        self.begun, self.rows, self.failed = set[str](), list[Row](), list[str]()
        self.ends = time.monotonic() + args.limit
        self._start()

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.link, there = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self._run, args=(there,))
        self.process.start()
        there.close()  # so that the end of the process is seen here
        self.last: str | None = ""  # what had begun last, or None where the process came to its end

    def _run(self, link: Connection) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        known = self.seen | self.begun

        def begin(what: str) -> bool:
            if what in known:
                return False
            known.add(what)
            link.send({"begin": what})
            return True

        try:
            for row in PARTS[self.part](self.op, begin, self.args.samples):
                link.send(row)
        except Exception as error:
            link.send({"failed": f"{type(error).__name__}: {str(error)[:200]}"})
        link.send({"end": True})

    def poll(self) -> bool:
        """Take what the process has sent; return True if the op is done."""
        late = time.monotonic() > self.ends
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            while self.link.poll():
                self._take(self.link.recv())
            if not late:
                return False
        self.process.kill()
        self.process.join()
        if late:
            self.failed.append(f"ran past {self.args.limit} s, in {self.last}")
        elif self.last is not None:
            self.failed.append(f"the process died in {self.last}")
            if self.last:
                self._start()
                return False
        return True

    def _take(self, row: Row) -> None:
        if "begin" in row:
            self.last = row["begin"]
            self.begun.add(row["begin"])
        elif "failed" in row:
            self.failed.append(row["failed"])
        elif "end" in row:
            self.last = None
        else:
            self.rows.append(row)


def measure(part: str, args: argparse.Namespace) -> None:
    """Run one part over all ops that are not in the cache."""
    cache = Cache(args.cache)
    ops = [op for op in op_db if re.search(args.ops, name_of(op)) and (part, name_of(op)) not in cache.done]
    ops.sort(key=lambda op: isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo))  # elementwise ones are alike: last
    list(PARTS[part](ops_named(["softmax"])["softmax"], lambda _: True, 1))  # what is imported now no child imports
    named = (f"call {row['call']}" if row.get("call") else row.get("leaf") for row in cache.rows(part))
    seen = {name for name in named if name}
    waiting, running = ops[::-1], list[Job]()
    while waiting or running:
        while waiting and len(running) < args.workers:
            running.append(Job(part, waiting.pop(), args, seen))
        time.sleep(0.02)
        for job in [job for job in running if job.poll()]:
            running.remove(job)
            seen |= job.begun
            entry = {"part": part, "op": name_of(job.op), "rules": cache.mark, "failed": job.failed, "rows": job.rows}
            cache.add(entry)
            note = f"  {job.failed}" if job.failed else ""
            print(f"{len(ops) - len(waiting) - len(running)}/{len(ops)} {entry['op']}: {len(job.rows)} rows{note}")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "report", "page"])
    parser.add_argument("--cache", type=Path, default=Path("out/ops.jsonl"))
    parser.add_argument("--ops", default="", help="only ops whose name matches this regular expression")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per op")
    parser.add_argument("--samples", type=int, default=3, help="samples per op of the part `whole`")
    parser.add_argument("--workers", type=int, choices=range(1, WORKERS + 1), default=WORKERS)
    parser.add_argument("--write", action="store_true", help="write the checked-in lists")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.part == "page":
        write_page()
    elif args.part == "report":
        cache = Cache(args.cache)
        rows = {part: list(cache.rows(part)) for part in PARTS}
        print(json.dumps(figures(rows), indent=1))
        if args.write:
            write(rows)
    else:
        measure(args.part, args)


if __name__ == "__main__":
    main()
