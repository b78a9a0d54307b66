"""Threads that call a loaded artifact: one after the other they may, at once they are refused, and no rank hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tpcompiler
from tests.launch import Ended, fork_ranks
from tests.long import in_long_runs

WORKER = Path(__file__).parent / "thread_worker.py"
HELP = (
    "  help: let one thread make all calls, from a queue whose requests all ranks take in the same order, and restart "
    "the job (docs/deploy.md)"
)
PLAN = {"up": "colwise", "down": "rowwise"}


class Scaled(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module, scale: float) -> None:
        super().__init__()
        self.up, self.down, self.scale = up, down, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale
        return made


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """Two over one set of weights, as prefill and decode are."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Linear(16, 8)
    return {"one": Scaled(*layers, 1.0), "two": Scaled(*layers, 2.0)}


@pytest.fixture(scope="module")
def directory(models: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    exported = {name: torch.export.export(model, (torch.randn(3, 8),)) for name, model in models.items()}
    tpcompiler.parallelize(exported, 2, PLAN).save((folder := tmp_path_factory.mktemp("turns")) / "out")
    return folder


def expected(models: dict[str, nn.Module], name: str, scale: float) -> str:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return f"{name}: {models[name](x * scale).sum():.3f}"


def ended(directory: Path, how: str) -> Ended:
    found = fork_ranks(2, WORKER, directory, how, timeout=90, together=False)
    assert found.codes == (0, 0), found.printed
    return found


def refuses(directory: Path, models: dict[str, nn.Module]) -> None:
    first, second = (text.splitlines() for text in ended(directory, "at once").printed)
    where = "of the group 'tp=2:tp' on rank 0"
    assert first == [
        f"two: LaunchError: a second thread calls a program {where} while a first one does: every rank may run their "
        "requests in another order, and mix up the answers",
        HELP,
        f"one: LaunchError: a second thread called a program {where} during this call, whose answer may be another "
        "request's",
        HELP,
        f"one: LaunchError: no program {where} can be called any more: two threads have called at once",
        HELP,
    ]
    assert second[0] == expected(models, "one", 1)
    # This one waited for rank 0, which will not come. A package prints a line of its own before.
    failed = next(line for line in second if line.startswith("two: "))
    assert failed.startswith("two: LaunchError: rank 1: a collective of the group 'tp=2:tp' (ranks 0, 1) has failed")


@pytest.mark.slow
def test_two_threads_at_once_are_refused(directory: Path, models: dict[str, nn.Module]) -> None:
    """Two programs of one set; neither call is answered, nor is a later one, and the other rank does not hang."""
    refuses(directory, models)


@pytest.mark.slow
def test_threads_one_after_the_other(directory: Path, models: dict[str, nn.Module]) -> None:
    wanted = [expected(models, ("one", "two")[at % 2], at) for at in range(6)]
    assert [text.splitlines() for text in ended(directory, "in turn").printed] == [wanted] * 2


@pytest.mark.slow
def test_a_call_inside_of_a_call(directory: Path, models: dict[str, nn.Module]) -> None:
    """The same thread: its order is the same on all ranks."""
    assert [text.splitlines() for text in ended(directory, "inside").printed] == [[expected(models, "one", 1)]] * 2


@in_long_runs
def test_so_are_they_where_a_package_runs(directory: Path, models: dict[str, nn.Module]) -> None:
    """The same code guards a package, which takes long to compile."""
    tpcompiler.open(directory / "out").package(check=False)
    (directory / "refused").unlink(missing_ok=True)
    refuses(directory, models)
