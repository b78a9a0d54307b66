"""The guides run as they stand: their blocks in order, in one session and one directory, and each prints what is shown below it."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import fork_code, fork_launched

DOCS = Path(__file__).parents[1] / "docs"
NEEDS = {
    "generation": ["transformers"],
    "model-sets": ["transformers"],
    "pipeline": ["transformers"],
    "unequal": ["transformers"],
    "ci": [],
    "quantised": ["torchao", "transformers"],
    "moe": ["transformers"],
    "long-context": ["transformers"],
    "training": ["transformers"],
    "same-bits": ["transformers"],
}
COMMAND = "from tpcompiler.cli.commands import main\nmain()"
SCRIPT = "import runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')"

pytestmark = [
    pytest.mark.skipif(not DOCS.exists(), reason="an installed wheel has no docs beside the tests"),
]


def run(language: str, block: str, session: dict[str, Any]) -> str:
    """What the block prints. One that begins with the name of a file is that file's text.

    A command runs in a process that has imported nothing of the session's: it may lack an `--import`.
    """
    named = re.match(r"# ([\w.-]+)\n", block)
    if named:
        Path(named[1]).write_text(block, encoding="utf-8")
        return ""
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "<a block of the page>", "exec", dont_inherit=True), session)
        return out.getvalue()
    if language != "bash":
        return ""
    with ThreadPoolExecutor() as pool:  # `&` starts a command next to those after it
        started = [
            pool.submit(command, line.removesuffix("&")) if line.endswith("&") else command(line)
            for line in block.splitlines()
        ]
        return "".join(each if isinstance(each, str) else each.result() for each in started)


def command(line: str) -> str:
    """What the command prints, its error too where the page says that it fails: `# exits with 2`."""
    program, *words = shlex.split(line, comments=True)
    if program == "torchrun":
        ended = fork_launched(words)
        code, printed = max(map(abs, ended.codes)), "".join(ended.printed)
    else:
        done = fork_code({"tpcompiler": COMMAND, "python": SCRIPT}[program], *words, cwd=Path.cwd())
        code, printed = done.returncode, done.stdout + (done.stderr if done.returncode else "")
    said = re.search(r"# exits with (\d)$", line)
    assert code == (int(said[1]) if said else 0), printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("page", ["first-model", *(pytest.param(page, marks=pytest.mark.guide) for page in NEEDS)])
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without a language is what the one before prints; `...` in it is whatever a machine or a version makes it."""
    for module in NEEDS.get(page, []):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TPCOMPILER_MACHINE")  # as a reader has it
    session: dict[str, Any] = {"__name__": "__main__"}
    printed, compared = "", 0
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language:
            printed = run(language, block, session)
            continue
        shown = re.escape(block.strip()).replace(r"\.\.\.", ".*?")
        if not re.fullmatch(shown, printed.strip(), re.DOTALL):
            lines = difflib.unified_diff(
                block.split("\n"), printed.split("\n"), f"docs/{page}.md", "printed", lineterm=""
            )
            pytest.fail("\n".join(lines), pytrace=False)
        compared += 1
    assert compared


def test_the_job_runs_commands_of_its_page() -> None:
    text = (DOCS / "ci.md").read_text(encoding="utf-8")
    page = {
        line.partition("  #")[0]
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    }
    (workflow,) = re.findall(r"^```yaml\n(name: .*?)^```", text, re.DOTALL | re.MULTILINE)
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    lines = [line.partition(" ||")[0] for step in job["steps"] for line in step.get("run", "").splitlines()]
    own = [line for line in lines if line.startswith(("tpcompiler ", "python "))]
    assert own
    assert set(own) <= page
