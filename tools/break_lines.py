"""Break lines of the source at random, one at a time, and count how many of them the tests notice.

    python -m tools.break_lines 12 --seed 1 -- -m "not slow and not guide"

Each change is small and keeps the file readable to Python: another comparison, the other branch, a number one larger, a
call left out. What stands behind `--` goes to pytest, which runs in a copy of the tree and ends at its first failure.
"""

from __future__ import annotations

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

ROOT = Path(__file__).parents[1]
SOURCES = ("tpcompiler", "passes")
PAIRS = ((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
LEFT = (".git", ".venv", "build", "dist", "__pycache__", ".*_cache")
SECONDS = 1_800  # a change may make a test wait for ever


@dataclass(frozen=True)
class Break:
    """A piece of a line, and what takes its place."""

    path: Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.end :]).decode()
        return "".join(lines)


def breaks(path: Path, text: str) -> Iterator[Break]:
    """Every change of a file that this knows, each of a piece that lies on one line."""
    tree = ast.parse(text)
    formatted = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno != node.end_lineno or node in formatted:
            continue  # before Python 3.12 nobody knows where a part of an f-string stands
        for made in _broken(node):
            old = ast.get_source_segment(text, node) or ""
            new = made if isinstance(made, str) else f"({ast.unparse(made)})"
            yield Break(path, node.lineno, node.col_offset, node.end_col_offset or 0, old, new)


def _broken(node: ast.AST) -> Iterator[ast.AST | str]:
    other = copy.deepcopy(node)
    if isinstance(other, ast.Compare) and type(other.ops[0]) in OTHER:
        other.ops[0] = OTHER[type(other.ops[0])]()
        yield other
    elif isinstance(other, ast.BoolOp):
        other.op = ast.Or() if isinstance(other.op, ast.And) else ast.And()
        yield other
    elif isinstance(other, ast.IfExp):
        other.body, other.orelse = other.orelse, other.body
        yield other
    elif isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not):
        yield other.operand
    elif isinstance(other, ast.Constant) and type(other.value) is int:
        yield str(other.value + 1)
    elif isinstance(other, ast.Expr) and isinstance(other.value, ast.Call):
        yield "pass"


def noticed(change: Break, words: list[str]) -> str:
    """The first test that fails of the change, or nothing."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT))
        path = tree / change.path
        path.write_text(change.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        pytest = [sys.executable, "-W", "ignore", "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", *words]
        try:
            environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            ran = subprocess.run(pytest, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "a test that waits"
        if ran.returncode == 0:
            return ""
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0].partition(" ")[2] if failed else "tests that cannot be collected"


def main(count: int, words: list[str] = typer.Argument(None), seed: int = 0) -> None:
    """Break COUNT lines; what follows `--` is for pytest."""
    every = [
        change
        for source in SOURCES
        for path in sorted((ROOT / source).rglob("*.py"))
        for change in breaks(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    ]
    found = 0
    for change in random.Random(seed).sample(every, count):
        test = noticed(change, words or [])
        found += bool(test)
        print(f"{change.path}:{change.line}: {change.old} -> {change.new}: {test or 'NOT NOTICED'}", flush=True)
    print(f"{found} of {count} noticed; {len(every):,} changes to choose from, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
