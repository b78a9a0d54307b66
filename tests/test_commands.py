"""The commands: help, the page that lists them, and old spellings, which do the same as the new ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.runtime.commands import call, right
from tests.runtime.models import PLAN_TEXT
from tpcompiler import cli
from tpcompiler.cli.old_spellings import NEW_SPELLINGS, replace_old_spellings

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


@pytest.mark.sample(5)
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


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("old", "new", "warned"),
    [
        ("show {out}", "inspect {out} --rank 0", ["show is now inspect --rank 0"]),
        ("show {out} --rank 1", "inspect {out} --rank 1", ["show is now inspect --rank 0"]),
        ("cost {out}", "explain {out}", ["cost is now explain"]),
        ("check {out} --original {model}", "check {out} --against {model}", ["--original is now --against"]),
        ("check {out} --original={model}", "check {out} --against {model}", ["--original is now --against"]),
        ("plan {model} --tp 2 --partial {plan}", "plan {model} --tp 2 --plan {plan}", ["--partial is now --plan"]),
        (
            "doctor {model} --mesh dp=1",
            "plan {model} --other-axes dp=1",
            ["doctor is now plan", "--mesh is now --other-axes"],
        ),
    ],
)
def test_old_spellings(old: str, new: str, warned: list[str], model: Path, out: Path, plan: Path) -> None:
    """They do the same, with a warning."""
    given = {"model": model, "out": out, "plan": plan}
    result = call(*old.format(**given).split())
    assert (result.exit_code, result.stdout) == (0, right(*new.format(**given).split()))
    lines = [f"warning: {each}; 0.1 is the last release with {each.split()[0]}" for each in warned]
    assert result.stderr.splitlines() == lines


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("check out --max-memory 24GB", ["check", "out", "--budget", "24GB held"]),
        ("check out --max-wire-bytes=192", ["check", "out", "--budget", "192 sent"]),
        ("merge out -o m.pt2", ["reshard", "--single-device", "out", "-o", "m.pt2"]),
        ("generate out --tokens 3", ["run", "--tokens", "16", "out", "--tokens", "3"]),
        ("convert m.pt2 --input x=S(0) --partial", ["convert", "m.pt2", "--input", "x=S(0)", "--ignore-unused"]),
        ("cut out --ranks 0,1", ["cut", "out", "--ranks", "0,1"]),
    ],
)
def test_old_spellings_with_values(old: str, new: list[str]) -> None:
    assert replace_old_spellings(old.split()) == new
    budget = ["check", "out", "--budget", "2 all_reduce/layer"]
    assert replace_old_spellings(budget) == budget


@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_has_every_command_and_old_spelling() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text.partition("## Options")[0], re.MULTILINE) == COMMANDS
    rows = dict(re.findall(r"^\| `(.*)` \| `(.*)` \|$", text.partition("## Old spellings")[2], re.MULTILINE))
    assert rows == {old: new.format("N") for old, new in NEW_SPELLINGS.items()}


def test_old_spellings_have_new_ones() -> None:
    """Of each command and option that the table names, and no help shows the old one."""
    group = typer.main.get_command(cli.app)
    for old, new in NEW_SPELLINGS.items():
        command, *option = old.split()
        name = NEW_SPELLINGS.get(command, command).split()[0]
        known = {each for parameter in group.commands[name].params for each in parameter.opts}
        assert {word for word in (new if option else new.partition(" ")[2]).split() if word.startswith("--")} <= known
        assert option or command not in group.commands
