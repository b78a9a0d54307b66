"""How scripts that load an artifact end: with their own exit code, and none of gloo's threads left for the shutdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.exits import (
    DESTROY,
    IN_THE_CALLERS_GROUP,
    LOAD,
    Template,
    never_switch,
    write_artifact,
)

# Registered before torch registers anything, so it runs last.
COUNT_THREADS = """
import atexit, pathlib
def count():
    names = [file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("gloo's threads:", names.count("pt_gloo_runloop"))
atexit.register(count)
"""
ERROR_BEFORE_THE_CALL = LOAD.replace(
    "# the last call", 'if torch.distributed.get_rank() == 1: raise ValueError("mine")'
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exit")
    write_artifact(path)
    return path


@pytest.fixture(scope="module")
def template(directory: Path) -> Iterator[Template]:
    with Template(directory, "import tpcompiler; tpcompiler.load") as made:
        yield made


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("script", "threads"),
    [
        (LOAD, 0),
        (LOAD + DESTROY, 0),
        (IN_THE_CALLERS_GROUP, 2),  # the caller's, which have done nothing
        (IN_THE_CALLERS_GROUP + "torch.distributed.all_reduce(torch.ones(1))\n" + DESTROY, 0),
        (LOAD + "kept = torch.distributed.group.WORLD\n" + DESTROY, 2),  # the default group's, which have done nothing
    ],
)
def test_no_thread_of_the_programs_groups_is_left(template: Template, script: str, threads: int) -> None:
    ended = template.run(never_switch(COUNT_THREADS + script))
    assert (ended.codes, ended.printed) == ((0, 0), (f"gloo's threads: {threads}\n",) * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("script", "codes"),
    [
        (LOAD + "import sys; sys.exit(3)\n", (3, 3)),
        (LOAD + 'raise ValueError("mine")\n', (1, 1)),
        (ERROR_BEFORE_THE_CALL, (1, 1)),  # the other waits for it in a collective
    ],
)
def test_an_exit_code_is_kept(template: Template, script: str, codes: tuple[int, int]) -> None:
    ended = template.run(never_switch(script))
    assert ended.codes == codes, ended.printed
    if script == ERROR_BEFORE_THE_CALL:
        assert "a collective of the group 'tp=2:tp' (ranks 0, 1) has failed: another rank has ended" in ended.printed[0]
