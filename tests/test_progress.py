"""What long steps tell, and how a terminal shows it."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

import tpcompiler
from tests.launch import fork_code
from tests.runtime.models import PLAN, export_mlp
from tpcompiler.cli import bars
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import sha256
from tpcompiler.runtime.model_file import read_model
from tpcompiler.terminal.progress import counted, listening, reporting

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

Told = dict[str, list[tuple[str, int, int]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("progress") / "model.pt2"
    torch.export.save(export_mlp(), path)
    tpcompiler.parallelize(export_mlp(), 2, PLAN).save(path.with_name("out"))
    return path


def heard(work: Callable[[], object]) -> Told:
    """Unit, how many are done, and of how many, by step."""
    told: Told = {}
    with listening(lambda step, *rest: told.setdefault(step, []).append(rest)):
        work()
    return told


def test_what_is_counted_is_done_when_the_next_one_is_asked_for() -> None:
    items, seen = ["a"], []

    def work() -> None:
        for item in counted(items, "spelling", "letters"):
            if item == "a":
                items.append("b")  # as `diagnose` finds more meshes on its way
            seen.append(item)

    assert heard(work) == {"spelling": [("letters", 0, 1), ("letters", 1, 2), ("letters", 2, 2)]}
    assert seen == ["a", "b"]
    for _ in counted(items, "alone", "letters"):  # nobody listens
        pass
    told = heard(lambda: next(item for item in counted(items, "searching", "letters") if item == "a"))
    assert told["searching"][-1] == ("letters", 2, 2)  # it is over


@pytest.mark.slow
def test_every_long_step_tells_how_far_it_is(model: Path) -> None:
    exported = export_mlp()
    made = tpcompiler.parallelize(exported, 2, PLAN)
    args, kwargs = exported.example_inputs
    steps = {
        "convert": lambda: tpcompiler.parallelize(exported, 2, "auto"),
        "save": lambda: made.save(model.with_name("out"), force=True),
        "check": lambda: tpcompiler.open(model.with_name("out")).check(),
        "verify": lambda: made.verify(args, kwargs),
        "diagnose": lambda: tpcompiler.diagnose(exported),
        "fit": lambda: tpcompiler.parallelize(exported, 2, "auto", memory=1650),
        "explain": lambda: tpcompiler.open(model.with_name("out")).explain("linear"),
    }
    told = {name: heard(work) for name, work in steps.items()}
    for name, step in (
        ("convert", "reading the ops"),
        ("convert", "pricing choices"),
        ("convert", "pricing changes"),
        ("convert", "cutting the ops"),
        ("save", "writing files"),
        ("save", "checking the ops"),
        ("check", "reading programs"),
        ("verify", "running the ranks"),
        ("verify", "running the model"),
        ("diagnose", "trying meshes"),
        ("convert", "eliminating choices"),
        ("fit", "making it fit"),
        ("explain", "trying other choices"),
    ):
        (_, first, _), *_, (_, done, total) = told[name][step]
        assert (first, done) == (0, total), (name, step)
        assert total > 0, (name, step)
    calls = sum(len(made.rank_program(rank).graph.nodes) for rank in range(2))
    assert told["verify"]["running the ranks"][-1] == ("ops", calls, calls)
    variables = told["explain"]["eliminating choices"]
    of_one = variables[: next(at for at, (_, done, total) in enumerate(variables) if done == total) + 1]
    assert [done for _, done, _ in of_one] == list(range(len(of_one)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("trust", [False, True])
def test_a_file_tells_how_many_of_its_bytes_are_read(model: Path, trust: bool) -> None:
    """Each once, and up to the end, also where it cannot be read."""
    told = heard(lambda: read_model(model, trust=trust))[f"reading {model}"]
    size = model.stat().st_size
    assert {(unit, total) for unit, _, total in told} == {("bytes", size)}
    done = [done for _, done, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, size)
    assert size > done[-2] > 0.9 * size
    assert not {done for done in done[1:-1] if done in (0, size)}
    damaged = model.with_name("damaged.pt2")
    damaged.write_bytes(model.read_bytes().replace(b"graph_module", b"graph_modulo"))

    def fail() -> None:
        with pytest.raises(ArtifactError):
            read_model(damaged, trust=trust)

    assert heard(fail)[f"reading {damaged}"][-1] == ("bytes", size, size)
    hashed = heard(lambda: sha256(model))["hashing model.pt2"]
    assert hashed[-1] == ("bytes", size, size)


def test_a_bar_has_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns."""
    now = 0.0
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(bars, "Console", lambda **_: console)
    monkeypatch.setattr(bars, "Progress", partial(Progress, auto_refresh=False, get_time=lambda: now))
    ops, weights = reporting("running the ranks", "ops"), reporting("cutting the weights", "bytes")
    with bars.progress("waiting") as steps:
        now = 10.0
        steps.update("reading [/b]")
        for done in range(4):
            now = 10.0 + done
            ops(250 * done, 25_000)
            weights(2_000_000 * done, 20_000_000)
        reporting("drawing all again", "files")(0, 2)
        *_, reading, running, cutting, _ = console.export_text().splitlines()
    assert "reading [/b]" in reading
    assert reading.endswith("0:00:03")  # since it was said
    assert running.split()[-6:] == ["750", "of", "25,000", "ops", "250.0/s", "0:01:37"]
    assert cutting.split()[-7:] == ["MB", "of", "20", "MB", "2", "MB/s", "0:00:07"]


def test_a_step_that_lasts_has_a_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name once, also of steps that begin again and again, and then how far it is; of short ones none."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", shown)

    def wait_for(text: str) -> None:
        end = time.monotonic() + 10
        while text not in shown.getvalue():
            assert time.monotonic() < end, shown.getvalue()
            time.sleep(0.01)

    monkeypatch.setattr(bars, "PATIENCE", 100.0)
    with bars.progress("short"):
        reporting("ops of it", "ops")(0, 2)
    assert shown.getvalue() == ""
    monkeypatch.setattr(bars, "PATIENCE", 0.05)
    monkeypatch.setattr(bars, "AGAIN", 0.1)
    ops, weights = reporting("trying choices", "ops"), reporting("cutting the weights", "bytes")
    with bars.progress("reading \x1b[/b]") as steps:
        wait_for("reading \\x1b[/b]\n")
        steps.update("searching")
        for _ in range(3):
            ops(0, 25_000)
            ops(1_000, 25_000)
            wait_for("trying choices: 25,000 ops\n")
            wait_for("  1,000 of 25,000 ops\n")
            ops(25_000, 25_000)
        weights(2_000_000, 20_000_000)
        wait_for("cutting the weights: 20 MB\n")
        wait_for("  2 MB of 20 MB\n")
        wait_for("searching\n")
    lines = shown.getvalue().splitlines()
    named = [line for line in lines if not line.startswith("  ")]
    assert sorted(named) == [
        "cutting the weights: 20 MB",
        "reading \\x1b[/b]",
        "searching",
        "trying choices: 25,000 ops",
    ]
    assert set(lines) - set(named) <= {"  1,000 of 25,000 ops", "  2 MB of 20 MB"}
    with bars.progress("silent", quiet=True) as nothing:
        nothing.update("as well")
        time.sleep(0.2)
    assert len(shown.getvalue().splitlines()) == len(lines)


@pytest.mark.slow
def test_nothing_is_shown_in_a_pipe_nor_with_json(model: Path) -> None:
    """But for steps that last. The same words on a terminal show bars there, and what is printed stays as it is."""
    out = model.with_name("out")
    plain, silent = run_piped("check", out)
    assert silent == ""
    printed, shown = run_on_a_terminal("check", out)
    assert printed == plain
    assert re.search(r"checking the ops +━+ 0 of \d+ ops  0\.0/s", shown)
    assert run_on_a_terminal("check", out, "--json")[1] == ""


def run_piped(*words: object) -> tuple[str, str]:
    done = fork_code("from tpcompiler.cli.commands import main\nmain()", *map(str, words))
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_on_a_terminal(*words: object) -> tuple[str, str]:
    """What is printed into a pipe, and what standard error, a terminal, was sent."""
    ours, theirs = pty.openpty()
    found = bytearray()

    def read() -> None:
        while True:
            try:
                found.extend(os.read(ours, 1 << 16))
            except OSError:  # nobody can write any more
                return

    reader = threading.Thread(target=read)
    reader.start()
    environment = {"COLUMNS": "120", "TERM": "xterm"}
    code = f"import os\nos.environ |= {environment}\nos.dup2(os.open({os.ttyname(theirs)!r}, os.O_WRONLY), 2)\n"
    done = fork_code(f"{code}from tpcompiler.cli.commands import main\nmain()", *map(str, words))
    os.close(theirs)
    reader.join()
    os.close(ours)
    return done.stdout, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", found.decode())
