"""Sound programs in which something to check is missing: a use, a recorded size, a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.passes.test_apply_plan import Tied
from tests.trust.damage import Artifact
from tpcompiler.judge.sound.check import CheckReport, check_programs
from tpcompiler.judge.sound.written import read_ranks


class Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k)


class Scatter(nn.Module):
    def forward(self, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return into.scatter_add(1, (x > 0).long(), x)


class Assert(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 100).all(), "too large")
        return x * 2


class Windows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, 4, 8) * 2).reshape(x.shape[0], x.shape[1], 8)


class Fives(nn.Module):
    """The export finds that its rows are fewer than ten: five by five they are one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x.unflatten(0, (-1, 5)).relu(), 1)


class Flat(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y.view(-1) * 2


class Rows(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([row * 2 for row in x.chunk(2)[0].unbind(0)]), x + y


def artifact(model: nn.Module, args: tuple[Any, ...], sizes: Any = None, **boundary: Any) -> Artifact:
    return Artifact.of(tpcompiler.parallelize(export(model, args, dynamic_shapes=sizes), 4, {}, **boundary))


def checked(made: Artifact) -> CheckReport:
    return check_programs(made.written(), made.manifest)


def test_a_change_that_a_rank_without_a_share_does_not_use() -> None:
    """Of a batch of two the third rank has nothing: it cuts k as the others do, and does without attention."""
    made = artifact(Attend(), (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)), inputs=["S(0)", "R"])
    unused = [node for node in made.ranks[3].graph.nodes if node.op == "call_function" and not node.users]
    assert "index_select" in [node.name for node in unused]
    assert checked(made).findings == []


@pytest.mark.slow
def test_sizes_that_torch_cannot_compare(tmp_path: Path) -> None:
    """A cut batch of windows: whether 32 * s * t is less than 32 * t, torch does not know of what a file says."""
    sizes = ({0: Dim.AUTO, 1: 4 * Dim("windows", min=1, max=20)},)
    program = export(Windows(), (torch.randn(2, 8, 8),), dynamic_shapes=sizes)
    tpcompiler.parallelize(program, 2, {}, inputs=["S(0)"]).save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok


def test_sizes_that_only_the_export_has_compared() -> None:
    """In the example 7 cut rows are 8, more than the other 7, and no more than 10 are allowed: so it does not run.

    The report says that it was not run.
    """
    few = {0: Dim.AUTO(max=10)}
    made = artifact(Scatter(), (torch.randn(7, 12), torch.randn(7, 12)), (few, few), inputs=["S(0)", "S(1)"])
    report = checked(made)
    assert (report.findings, report.counts["ops that cannot be run here"]) == ([], 1)
    # An op of which ranks have a share is not believed.
    shared = artifact(Scatter(), (torch.randn(8, 12), torch.randn(8, 12)), inputs=["S(0)", "S(0)"])
    assert "ops that cannot be run here" not in checked(shared).counts


def test_a_size_that_there_is_not_at_all_sizes() -> None:
    """Of fewer than five rows there is no whole five, and another size is divided by how many there are."""
    few = {0: Dim.AUTO, 1: Dim.AUTO}
    made = artifact(Fives(), (torch.randn(5, 5, 5),), (few,), inputs=["P(sum)"], outputs=["P(sum)"])
    for _ in range(5):  # the sizes are drawn anew
        assert checked(made).findings == []


@pytest.mark.slow
def test_a_view_that_copies_on_some_ranks() -> None:
    """As it must where a rank's value lies in memory otherwise than the others'."""
    made = artifact(Flat(), (torch.randn(5, 8), torch.randn(2, 8)), inputs=["S(0)", "R"])
    view = next(node for node in made.last.graph.nodes if node.target is torch.ops.aten.view.default)
    view.target = torch.ops.aten.reshape.default
    assert made.ranks[0].graph is not made.last.graph
    assert checked(made).findings == []


@pytest.mark.slow
def test_a_call_that_makes_nothing() -> None:
    made = artifact(Assert(), (torch.randn(4, 8),), inputs=["S(0)"])
    assert "_assert_async" in str(made.ranks[0].graph)
    assert checked(made).findings == []


@pytest.mark.parametrize("op", ["mul", "lt"])
def test_a_call_without_a_recorded_value(op: str) -> None:
    made = artifact(Assert(), (torch.randn(4, 8),), inputs=["S(0)"])
    node = next(node for node in made.last.graph.nodes if node.name == op)
    del node.meta["val"]
    (first, *_) = checked(made).findings
    assert first.startswith(f"rank_3.pt2: '{op}' (")
    assert first.endswith(" has no recorded value")


@pytest.mark.slow
def test_the_other_name_of_a_tied_weight() -> None:
    """A strict export has an input for one name alone; its state keeps both."""
    exported = export(Tied(), (torch.randint(8, (2, 3)),), strict=True)
    assert len(exported.state_dict) == 2
    made = tpcompiler.parallelize(exported, 2, {"embed": "embedding_rowwise"})
    ranks = read_ranks(made.only)
    assert [{name: list(value.shape) for name, value in each.state.items()} for each in ranks] == [
        {"embed.weight": [4, 4], "rank_numbers": [1, 1]}
    ] * 2
    assert check_programs(ranks, made.manifest(), exported).findings == []


@pytest.mark.slow
def test_a_list_as_long_as_a_dynamic_size() -> None:
    """The example decides it: torch takes its two rows for all. A share of four rows over four ranks has another."""
    rows = torch.randn(4, 5)
    made = artifact(Rows(), (rows, rows.clone()), ({0: Dim.AUTO}, {0: Dim.AUTO}), inputs=["R", "S(0)"])
    report = checked(made)
    assert (report.findings, report.counts["ops that cannot be run here"]) == ([], 1)


@pytest.mark.slow
def test_sizes_of_which_a_division_makes_nothing() -> None:
    """A dim of s rows as s // 4 of 4, which torch knows as s // (s // 4): at s = 2 there are none."""
    made = artifact(nn.Unflatten(0, (-1, 4)), (torch.randn(8, 3),), ({0: Dim.AUTO},), outputs=["P(sum)"])
    assert checked(made).findings == []


class Halves(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = torch.maximum(x, y).chunk(2, 1)
        return (one * other).unflatten(1, (2, -1)), y * 2


@pytest.mark.slow
def test_a_size_that_the_export_took_for_another() -> None:
    """A view in 2 rows of a dim that the example makes 2 of, (s + 1) // 2, is recorded with that; no rank has a share."""
    args, free = (torch.randn(3, 4, 4, 12), torch.randn(3, 4, 4, 12)), {1: Dim.AUTO}
    exported = export(Halves(), args, dynamic_shapes=(free, free)).run_decompositions()
    made = Artifact.of(tpcompiler.parallelize(exported, 3, {}, inputs=["R", "S(1)"]))
    report = checked(made)
    assert (report.findings, report.counts["ops that cannot be run here"]) == ([], 1)


class NarrowTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def test_nothing_of_a_dynamic_size_is_sent_by_a_rank_without_a_share() -> None:
    """One column over several ranks: 0 rows are a fixed part of any number of rows."""
    sizes = ({0: Dim("a", min=2), 1: Dim("b", min=2)},)
    program = export(NarrowTable(), (torch.randint(0, 9, (5, 5, 5)),), dynamic_shapes=sizes)
    for degree in (2, 3):
        made = tpcompiler.parallelize(program, degree, {"table": "colwise"}, outputs=["S(1)"])
        assert checked(Artifact.of(made)).findings == []
