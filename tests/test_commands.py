"""The commands: help, and the page that lists them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.commands import call, right
from tests.runtime.models import PLAN_TEXT

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
COMMANDS = [
    "export",
    "inspect",
    "plan",
    "calibrate",
    "convert",
    "cut",
    "verify",
    "check",
    "explain",
    "diff",
    "reshard",
    "package",
    "handover",
    "run",
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(PLAN_TEXT)
    return path


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ("--help", "", 0),
        ("convert --help", "", 0),
        ("--version", "", 0),
        ("convert", "Missing argument", 2),
        ("", "", 2),
        ("inspect missing.pt2", "missing.pt2 does not exist", 2),
        ("check missing", "missing does not exist", 2),
        ("handover {here} missing", "missing does not exist", 2),
        ("export missing -o model.pt2", "missing does not exist", 2),
        ("verify {here} --against missing.pt2", "missing.pt2 does not exist", 2),
        ("convert {here} --tp 2 -o out --plan missing.yaml", "plan file missing.yaml does not exist", 2),
        ("convert {here} --tp 2 -o out --plan {here}", "the plan is not a mapping", 2),
        ("convert {here} --tp 2 -o out --checkpoint missing", "missing does not exist", 2),
        ("plan {here} --memory 24", "did you mean 24GB?", 2),
    ],
)
def test_what_words_alone_decide_is_said_before_torch_is_imported(
    words: str, said: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("- colwise")
    text = f"""
import sys
sys.argv = ["tpcompiler", *{words.format(here=tmp_path / "here").split()!r}]
from tpcompiler.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "False"
    assert said in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_has_an_example(command: str) -> None:
    text = right(*command.split(), "--help")
    _, found, example = text.partition("  Example:\n")
    assert found
    assert f"tpcompiler {command}".strip() in example or f"-m tpcompiler.cli {command}" in example


def test_no_words_show_the_commands() -> None:
    """In the order in which they are used."""
    result = call()
    assert result.exit_code == 2
    assert re.findall(r"^  (\w+)  ", result.output.partition("Commands:\n")[2], re.MULTILINE) == COMMANDS


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_has_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text.partition("## Options")[0], re.MULTILINE) == COMMANDS
