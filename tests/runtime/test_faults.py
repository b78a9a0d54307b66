"""Real processes of which one dies, comes late, or has something else: nobody hangs, and the others say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import fork_ranks
from tests.runtime.faults import FAULTS, run_fault, write_artifacts, wrong


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifacts(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, artifact: Path) -> None:
    assert not wrong(fault, run_fault(artifact, fault))


TAKEN = """
import sys, torch, torch.distributed as dist
import tpcompiler

dist.init_process_group("gloo")
alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
torch._C._distributed_c10d._register_process_group("tp=2:tp", alone)
try:
    tpcompiler.load(sys.argv[1])
except tpcompiler.errors.LaunchError as error:
    print(error)
"""


def test_the_name_of_a_group_stands_for_other_ranks(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "taken.py").write_text(TAKEN)
    ended = fork_ranks(2, tmp_path / "taken.py", artifact)
    said = "the process-group name 'tp=2:tp' is that of the ranks [{}], this artifact's of [0, 1]"
    assert [text.splitlines()[0] for text in ended.printed] == [said.format(rank) for rank in range(2)]
