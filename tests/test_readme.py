"""The README's example and the scripts of docs/run.md run as they stand, and the README's commands exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import tpcompiler
from tests.launch import fork_code, fork_ranks, torchrun
from tpcompiler import cli

ROOT = Path(__file__).parent.parent
README, RUN = ROOT / "README.md", ROOT / "docs" / "run.md"

needs_readme = pytest.mark.skipif(not README.exists(), reason="an installed wheel has no README beside the tests")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@needs_readme
@pytest.mark.guide
def test_the_example_and_its_serving_script_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,), (output,) = blocks(README, "python"), blocks(README, "text")
    serve, alone = blocks(RUN, "python")
    assert len([line for line in example.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TPCOMPILER_MACHINE")  # as a reader has it
    done = fork_code(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
    lines = [line for line in alone.splitlines() if "device" not in line or "print" in line]
    (tmp_path / "serve.py").write_text(serve.replace(', device="cuda"', ""))
    (tmp_path / "alone.py").write_text("\n".join(lines).replace('"nccl"', '"gloo"').replace(', device="cuda"', ""))
    ended = fork_ranks(2, tmp_path / "serve.py")
    done = torchrun(2, tmp_path / "alone.py")  # in interpreters that have nothing of this package
    for codes, printed in ((ended.codes, "".join(ended.printed)), ((done.returncode,), done.stdout)):
        assert not any(codes), printed
        assert len(re.findall(r"tensor\(-?\d", printed)) == 2, printed


@needs_readme
def test_the_named_commands_exist() -> None:
    makefile, text = (ROOT / "Makefile").read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    targets = re.findall(r"`make (\S+)`", text)
    assert targets[:2] == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in targets)
    commands: Any = typer.main.get_command(cli.app)
    listed = re.findall(r"^\| `tpcompiler (\w+)", text, re.MULTILINE)
    assert sorted(set(listed)) == sorted(name for name, command in commands.commands.items() if not command.hidden)
    name = "register_process_group"
    assert f'{name}("{tpcompiler.Mesh.of(2).group_name(("tp",))}"' in RUN.read_text(encoding="utf-8")


@pytest.mark.slow
@needs_readme
def test_the_named_files_exist() -> None:
    pages = [README, *(ROOT / "docs").glob("*.md"), *(ROOT / "passes").glob("*.md")]
    named = [
        (page.name, path)
        for page in pages
        for path in re.findall(
            r"`((?:docs|examples|passes|tests|tools|tpcompiler)/[\w/.*-]+)`", page.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 20
    assert [each for each in named if not [*ROOT.glob(each[1])]] == []
