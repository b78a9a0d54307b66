"""Two collectives in flight at once: the check refuses another order of their starts, and waits that are not theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.soundness.test_files_changed import edit as edit_file
from tests.trust.damage import Artifact
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.judge.sound.check import check_programs

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
GRAPH = "models/model.json"


class Two(nn.Module):
    """Two pairs of layers, whose sums are both pending while the second is made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Linear(*sizes, bias=False) for sizes in ((8, 12), (8, 12), (12, 8), (12, 8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, g = self.c(torch.relu(self.a(x))), self.d(torch.relu(self.b(x)))
        return torch.tanh(h) * torch.exp(g)


@pytest.fixture(scope="module")
def program() -> tpcompiler.ParallelProgram:
    torch.manual_seed(0)
    plan = {"a": "colwise", "b": "colwise", "c": "rowwise", "d": "rowwise"}
    return tpcompiler.parallelize(export(Two(), (X,)), 2, plan)


def starts(program: ExportedProgram) -> list[fx.Node]:
    return [node for node in edit.calls(program.graph) if edit.is_collective(node)]


def waits(program: ExportedProgram) -> list[fx.Node]:
    return [wait for start in starts(program) for wait in start.users]


def findings(program: tpcompiler.ParallelProgram, change: Callable[[Artifact], None]) -> list[str]:
    artifact = Artifact.of(program).copied()
    change(artifact)
    return check_programs(artifact.written(), artifact.manifest, program.only.original()).findings


def nothing(artifact: Artifact) -> None:
    """Leave it as it is."""


def waits_in_another_order(artifact: Artifact) -> None:
    """One rank waits for the second collective first: the ranks meet, but they do not run one graph."""
    first, second = waits(artifact.last)
    first.prepend(second)


def starts_in_another_order(artifact: Artifact) -> None:
    first, second = starts(artifact.last)
    second.append(first)


def collectives_in_another_order(artifact: Artifact) -> None:
    """One rank starts and waits for the second one first."""
    first, second = starts(artifact.last)
    second.append(first)
    waits(artifact.last)[0].prepend(waits(artifact.last)[1])


def starts_in_another_order_on_all_ranks(artifact: Artifact) -> None:
    """The ranks meet, and each wait is for its own collective."""
    for rank in artifact.ranks:
        first, second = starts(rank)
        second.append(first)


def waits_for_each_other(artifact: Artifact) -> None:
    for rank in artifact.ranks:
        swap_waits(rank)


def waits_for_each_other_on_one_rank(artifact: Artifact) -> None:
    swap_waits(artifact.last)


def swap_waits(program: ExportedProgram) -> None:
    (first, one), (second, two) = zip(waits(program), starts(program), strict=True)
    first.args, second.args = (two,), (one,)


def both_wait_for_one(artifact: Artifact) -> None:
    for rank in artifact.ranks:
        waits(rank)[1].args = (starts(rank)[0],)


def no_wait(artifact: Artifact) -> None:
    for rank in artifact.ranks:
        wait = waits(rank)[1]
        wait.replace_all_uses_with(starts(rank)[1])
        edit.erase(wait)


def no_wait_and_no_start(artifact: Artifact) -> None:
    """One rank lacks the second collective altogether."""
    start, wait = starts(artifact.last)[1], waits(artifact.last)[1]
    wait.replace_all_uses_with(start.args[0])
    edit.erase(wait)
    edit.erase(start)


@pytest.mark.slow
@pytest.mark.parametrize("change", [nothing, starts_in_another_order_on_all_ranks])
def test_what_is_right(program: tpcompiler.ParallelProgram, change: Callable[[Artifact], None]) -> None:
    (first, second), (wait, _) = starts(program.rank_program(0)), waits(program.rank_program(0))
    assert first < second < wait
    assert findings(program, change) == []


IN_ANOTHER_ORDER = (
    "for reshard on rank 0, and rank 1 is at all_reduce(torch.float32 [4, 8], sum) over tp=2:tp for reshard_1"
)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (starts_in_another_order, IN_ANOTHER_ORDER),
        (collectives_in_another_order, IN_ANOTHER_ORDER),
        (waits_in_another_order, "ranks 0 and 1 have shares of different programs"),
        (
            waits_for_each_other,
            "is the end of reshard reshard, which has 2 operands and 2 results where a change has one",
        ),
        (waits_for_each_other_on_one_rank, "is the end of reshard reshard, which has 2 operands and 2 results"),
        (both_wait_for_one, "has 2 users where it needs one, its wait"),
        (no_wait, "has 1 users where it needs one, its wait"),
        (no_wait_and_no_start, "over tp=2:tp for reshard_1 on rank 0, and rank 1 is at its end"),
    ],
)
def test_what_is_refused(program: tpcompiler.ParallelProgram, change: Callable[[Artifact], None], finding: str) -> None:
    found = findings(program, change)
    assert any(finding in each for each in found), found


def test_a_wait_after_its_use(program: tpcompiler.ParallelProgram, tmp_path: Path) -> None:
    """In a file, where the order of a graph is that of a list: nobody can read it."""

    def change(data: Any) -> None:
        nodes = data["graph_module"]["graph"]["nodes"]
        at = next(at for at, node in enumerate(nodes) if "wait_tensor" in node["target"])
        nodes.append(nodes.pop(at))

    program.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok
    edit_file(tmp_path / "out", None, GRAPH, change)
    for read in (lambda out: tpcompiler.open(out).check(), lambda out: tpcompiler.open(out).verify((X,))):
        with pytest.raises(ArtifactError, match=r"program.pt2 cannot be read by torch .*: 'wait_tensor'"):
            read(tmp_path / "out")
