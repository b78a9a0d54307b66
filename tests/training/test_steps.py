"""Steps of an optimizer on the ranks' shares, in gloo processes from files: they are those of the single device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpcompiler
from tests.launch import run_ranks
from tests.passes.stages import Call
from tests.training.test_gradients import IDS, PLAN, ROWS, cross_entropy, llama
from tpcompiler.checkpoint.training import _Blocks
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.shares import cut, row_sharding


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> Any:
    torch.manual_seed(0)
    return Call(lambda self, ids, labels: cross_entropy(self.model(ids).logits, labels), model=llama().double())


def single(batches: list[list[torch.Tensor]]) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """The model after its steps, its losses and the norms of its gradients."""
    model = network()
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for each in batches:
        optimizer.zero_grad()
        for ids in each:
            loss = model(ids, ids) / len(each)
            loss.backward()
            losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return model, losses, norms


@pytest.mark.slow
@pytest.mark.parametrize("rest", [{}, {"**": "shard_at_rest(dp)"}], ids=["whole over dp", "in shards"])
def test_adamw_on_two_by_two_ranks(rest: dict[str, str], tmp_path: Path) -> None:
    """Four steps of two batches each, clipped; parameters, losses and norms within 1e-12 of the single device."""
    plan = {f"model.{name}": style for name, style in PLAN.items()} | rest
    inputs = dict.fromkeys(["ids", "labels"], ROWS)
    program = tpcompiler.export_training(network(), (IDS, IDS))
    made = tpcompiler.parallelize(program, {"dp": 2, "tp": 2}, plan, inputs=inputs)
    made.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").verify((IDS, IDS)).ok
    batches = [list(torch.randint(0, 64, (2, *IDS.shape))) for _ in range(4)]
    torch.save(batches, tmp_path / "batches")
    run_ranks(4, Path(__file__).parent / "steps_worker.py", tmp_path)
    model, losses, norms = single(batches)
    ranks = [torch.load(tmp_path / f"{rank}.made") for rank in range(4)]
    for own_losses, own_norms, _, again in ranks:
        torch.testing.assert_close([own_losses, own_norms], [losses, norms], rtol=1e-12, atol=1e-12)
        assert (
            again == "this loss had its backward before, which frees what it needs, even with retain_graph: call again"
        )
    whole = dict(model.named_parameters())
    rows = [row for row in made.manifest().tensors if row.name in whole]
    assert len(rows) == len(whole)
    for rank, (_, _, shares, _) in enumerate(ranks):
        wanted = {
            row.name: cut(whole[row.name].detach(), row_sharding(row, made.mesh), made.mesh, rank) for row in rows
        }
        torch.testing.assert_close(shares, wanted, rtol=1e-12, atol=1e-12)


def test_a_program_without_gradients(tmp_path: Path, group_of_one: None) -> None:
    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    tpcompiler.parallelize(exported, 1, {}).save(tmp_path / "out")
    with pytest.raises(ArtifactError, match="return no gradients"):
        tpcompiler.load(tmp_path / "out", training=True)


class Grouped(torch.nn.Module):
    """Attention with one matrix for four heads of queries and one of keys and values, parts of which ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([16, 4, 4], -1)
        heads = [each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": [2, 1]}], ids=str)
def test_each_element_counts_once_in_a_norm(mesh: Any) -> None:
    """Ranks cut some rows of the packed matrix, and all hold the others."""
    torch.manual_seed(0)
    model, x = Grouped().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    made = tpcompiler.parallelize(tpcompiler.export_training(model, (x,)), mesh, {"qkv": "colwise", "out": "rowwise"})
    assert made.verify((x,)).ok
    rows = {row.name: row for row in made.manifest().tensors}
    assert "r" in str(rows["qkv.weight"].sharding).replace("parts", "")
    model(x).backward()
    totals = dict.fromkeys(rows, 0.0)
    for rank in range(made.world_size):
        blocks = _Blocks(made.manifest(), rank, {})
        for name, row in rows.items():
            own = cut(model.get_parameter(name).grad, row_sharding(row, made.mesh), made.mesh, rank)  # type: ignore[arg-type]
            totals[name] += sum(float(own[place].square().sum()) / count for place, count in blocks.of(name))
    for name, total in totals.items():
        assert total == pytest.approx(float(model.get_parameter(name).grad.square().sum()), rel=1e-12)  # type: ignore[union-attr]
