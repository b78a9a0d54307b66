"""The guides run as they stand: their blocks in order, in one session and one directory, and each prints what is shown below it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.launch import fork_code

DOCS = Path(__file__).parents[1] / "docs"
NEEDS = {"quantised": ["torchao", "transformers"], "moe": ["transformers"], "long-context": ["transformers"]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCS.exists(), reason="an installed wheel has no docs beside the tests"),
]


def run(language: str, block: str, session: dict[str, Any]) -> str:
    """What the block prints. A command runs in a process that has imported nothing of the session's: it may lack an `--import`."""
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "<a block of the page>", "exec", dont_inherit=True), session)
        return out.getvalue()
    printed = ""
    for line in block.splitlines():
        command, *words = shlex.split(line)
        assert command == "tpcompiler"
        done = fork_code("from tpcompiler.cli.commands import main\nmain()", *words, cwd=Path.cwd())
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    return printed


@pytest.mark.parametrize("page", NEEDS)
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without a language is what the one before prints; `...` in it is whatever a machine or a version makes it."""
    for module in NEEDS[page]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    session: dict[str, Any] = {"__name__": "__main__"}
    printed, compared = "", 0
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language:
            printed = run(language, block, session)
            continue
        shown = re.escape(block.strip()).replace(r"\.\.\.", ".*?")
        assert re.fullmatch(shown, printed.strip(), re.DOTALL), printed
        compared += 1
    assert compared
