"""Docstrings name things and give orders: no nominal openers, no borrowed words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("passes", *(f"tpcompiler/{room.name}" for room in (ROOT / "tpcompiler").iterdir() if room.name != "passes"))
NOMINAL = re.compile(
    r"(What|Whether|Which|Of|Those|That|How|Why|Where|As|The same|Who|When|From|In|To|With|By|For|On)\b"
)
BORROWED = re.compile(
    r"\b(anew|beside|but for|as yet|is said|are said|is told|otherwise than|is none|of its own|lies in|holds to)\b"
)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = getattr(node, "name", "the file")
            yield f"{path.relative_to(ROOT)}: {name}", ast.get_docstring(node) or ""


def paths(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.suffix == ".py" else [*path.rglob("*.py")]


@pytest.mark.parametrize("room", [room for room in ROOMS if paths(room)])
def test_docstrings_are_plain_english(room: str) -> None:
    texts = [each for path in paths(room) for each in docstrings(path)]
    assert texts
    assert [where for where, text in texts if NOMINAL.match(text)] == []
    assert [where for where, text in texts if BORROWED.search(text)] == []
