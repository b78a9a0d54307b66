"""docs/promises.md names tests that exist, and every test of the promises is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.launch import ROOT

DOC = ROOT / "docs" / "promises.md"
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not DOC.exists(), reason="an installed wheel has no docs beside the tests")


def defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return {f"{path.relative_to(ROOT).as_posix()}::{name}" for name in functions}


def named() -> set[str]:
    return set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", DOC.read_text(encoding="utf-8")))


def test_every_named_test_exists() -> None:
    files = {ROOT / name.partition("::")[0] for name in named()}
    assert named() <= set().union(*(defined_in(path) for path in files))
    assert len(named()) > 20


def test_every_test_of_a_promise_is_named() -> None:
    have = set().union(*(defined_in(path) for path in HERE.glob("test_*.py") if path != Path(__file__)))
    assert have <= named()


def test_every_section_is_held_by_a_test_or_promises_nothing() -> None:
    _, *sections = DOC.read_text(encoding="utf-8").split("\n## ")
    assert len(sections) > 5
    for section in sections:
        title = section.partition("\n")[0]
        assert "::test_" in section or title in ("What you must do", "Converting in several threads: not promised")
