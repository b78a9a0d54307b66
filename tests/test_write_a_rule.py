"""The page on writing a rule: its walk-through runs, and what it quotes is what stands in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import fork_code
from tests.runtime.commands import right

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "write-a-rule.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_walk_through_runs() -> None:
    code = "\n".join(blocks("python"))
    done = fork_code(code)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"^# (register_rule.*)$|# (\d+ placements hold)$", code, re.MULTILINE)
    assert len(promised) == 2
    for words in promised:
        assert "".join(words) in done.stdout


def test_what_is_quoted_is_the_code() -> None:
    rule, sample = blocks("py")
    assert rule in (ROOT / "tpcompiler" / "rules" / "linalg.py").read_text()
    assert sample in (ROOT / "tests" / "rules" / "vector_samples.py").read_text().replace("\n    ", "\n")


@pytest.mark.sample(3)
@pytest.mark.parametrize("command", ["convert", "verify", "run", "inspect"])
def test_the_commands_take_an_import(command: str) -> None:
    assert "--import" in right(command, "--help")
