"""Every row of the table: its message, its exit code, no traceback, nothing written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.export import ExportedProgram

from tests.bad_input import table
from tests.bad_input.row import Row, write_good
from tests.launch import fork_launched, torchrun
from tests.long import LONG
from tests.runtime.commands import call
from tpcompiler import errors
from tpcompiler.cli.options import report
from tpcompiler.errors import TpCompilerError

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

ROWS = [row for rows in table.TABLE.values() for row in rows]
LAUNCHED = "one rank alone fails"  # by torchrun in long runs; other ranks are forked, and torch shows their errors
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportedProgram]:
    directory = tmp_path_factory.mktemp("good")
    return directory, write_good(directory)


def test_there_are_rows_of_every_kind() -> None:
    assert len(ROWS) >= 60
    assert len({(row.what, row.call) for row in ROWS}) == len(ROWS)
    assert all(row.help or row.code in (0, 1) for row in ROWS)
    assert all(len(row.text.splitlines()) <= 3 for row in ROWS if row.code != 1)


@pytest.mark.sample(100)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what.replace(" ", "_"))
def test_bad_input(
    row: Row, good: tuple[Path, ExportedProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, program = good
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    row.spoil(monkeypatch)
    before = everything(tmp_path)
    assert said(row, program) == (row.code, table.masked(row.text))
    assert everything(tmp_path) == before


def said(row: Row, program: ExportedProgram) -> tuple[int | type[TpCompilerError], str]:
    if not isinstance(row.call, str):
        with pytest.raises(TpCompilerError) as raised:
            row.call(program)
        public = next(kind for kind in type(raised.value).__mro__ if kind.__module__ == errors.__name__)
        return public, table.masked(str(raised.value))
    words = shlex.split(row.call)
    if words[0] == "torchrun":
        launched = row.what == LAUNCHED and os.environ.get(LONG)
        return root_cause(torchrun(int(words[2]), *words[3:]).stdout if launched else fork_launched(words[1:]).shown)
    at = words.index("tpcompiler")
    result = call(*words[at + 1 :], **dict(word.split("=", 1) for word in words[:at]))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    one, none = (result.stdout, result.stderr) if result.exit_code == 1 else (result.stderr, result.stdout)
    assert none == "" or result.exit_code == 0
    return result.exit_code, table.masked(one.removesuffix("\n"))


def root_cause(shown: str) -> tuple[int, str]:
    """Return the exit code and the message of the rank that torchrun takes for the cause; nothing may follow it."""
    above, _, end = shown.rpartition("\n  traceback : ")
    *lines, border = end.splitlines()
    assert set(border) == {"="}, shown
    assert "Root Cause" in above
    assert "Traceback" not in end
    code = re.findall(r"\n  exitcode  : (\d+)", above)[-1]
    return int(code), table.masked("\n".join(line.removeprefix("  ") for line in lines))


def test_the_rank_that_failed_first_is_the_cause_though_it_ends_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.9
    monkeypatch.setattr(time, "time", lambda: now)
    files = [tmp_path / str(rank) for rank in range(2)]
    for file, follows in zip(files, (True, False), strict=True):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        report("other" if follows else "own", follows=follows)
        now += 1
    failures = {rank: ProcessFailure(rank, 0, 2, str(file)) for rank, file in enumerate(files)}
    assert root_cause(str(ChildFailedError("script.py", failures))) == (2, "own")


def everything(directory: Path) -> dict[str, bytes | None]:
    """All files, without the bytecode that Python keeps of a user's module."""
    paths = (path for path in directory.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}
