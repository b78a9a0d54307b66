"""Docstrings name things and give orders; no text of the source, messages included, has borrowed words."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("passes", *(f"tpcompiler/{room.name}" for room in (ROOT / "tpcompiler").iterdir() if room.name != "passes"))
NOMINAL = re.compile(
    r"(What|Whether|Which|Of|Those|That|How|Why|Where|As|The same|Who|When|From|In|To|With|By|For|On)\b"
)
BORROWED = re.compile(
    r"\b(anew|beside(?!=)|mend(s|ed)?|but for|as yet|(is|are) (said|told|none)|otherwise than|of (its|their) own(?! \w)"
    r"|lies? (in|on|there|so)|stands? in|holds? to|look (what|which|whether))\b"
)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = getattr(node, "name", "the file")
            yield f"{path.relative_to(ROOT)}: {name}", ast.get_docstring(node) or ""


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file with their line: string constants (f-strings with `{}`), and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield f"{node.lineno}: " + "".join(str(getattr(part, "value", "{}")) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{node.lineno}: {node.value}"
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield f"{token.start[0]}: {token.string}"


def paths(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.suffix == ".py" else [*path.rglob("*.py")]


@pytest.mark.sample(11)
@pytest.mark.parametrize("room", [room for room in ROOMS if paths(room)])
def test_docstrings_are_plain_english(room: str) -> None:
    found = [each for path in paths(room) for each in docstrings(path)]
    assert found
    assert [where for where, text in found if NOMINAL.match(text)] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if paths(room)])
def test_texts_have_no_borrowed_words(room: str) -> None:
    assert [f"{path}:{text}" for path in paths(room) for text in texts(path) if BORROWED.search(text)] == []


@pytest.mark.slow
def test_pages_have_no_borrowed_words() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "passes/README.md"]
    lines = [f"{page.name}: {line}" for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if BORROWED.search(line)] == []
