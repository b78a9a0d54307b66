"""What the page of an artifact shows, against the files and numbers counted by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import tpcompiler
from tests.ir.drawn import GRID, Cut, cuts
from tests.runtime.poisons import entries_of
from tests.soundness.test_files_changed import put
from tests.soundness.test_order import GRAPH
from tests.views.artifacts import LAYERS, Cached, Mixed, Mlp, Tower, ids, one_step, randomised, saved
from tests.views.opened import advise_artifact, artifact_text, page_data
from tpcompiler.cost.machine import Link, Machine
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut_dim
from tpcompiler.report.slices import Holder, slices_of
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.records import plain_data
from tpcompiler.terminal.printed import format_bytes

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tower") / "artifact", Tower(), ids(), LAYERS)


@pytest.mark.slow
def test_every_collective_is_there(tower: Path) -> None:
    data = page_data(tower)
    added = ("item", "layer", "advice")
    rows = [{k: v for k, v in row.items() if k not in added} for row in data["records"]]
    assert rows == [plain_data(record) for record in read_manifest(tower).collectives]
    items = [data["items"][row["item"]] for row in data["records"]]
    assert [item["label"] for item in items] == [row["kind"] for row in data["records"]]
    assert all(item["kind"] == "collective" for item in items)


def test_the_costs_are_the_reports(tower: Path) -> None:
    data, records = page_data(tower), read_manifest(tower).collectives
    for rows in data["cost"].values():
        assert sum(row["layers"] * row["count"] for row in rows) == len(records)
        for name in ("wire_bytes", "payload_bytes"):
            assert sum(row["layers"] * row[name] for row in rows) == sum(getattr(record, name) for record in records)
    (row,) = data["cost"]["layers"]
    assert (row["layer"], row["layers"], row["count"], row["wire_bytes"]) == ("layers.0-2", 3, 1, 384)
    assert f"{format_bytes(data['wire'])} on the wire" in artifact_text(tower)


def test_items_stand_for_all_layers(tower: Path) -> None:
    data = page_data(tower)
    names = {row["name"]: row for row in data["tensors"]}
    assert {row.name for row in read_manifest(tower).tensors} == set(names)
    assert names["layers.2.down.bias"]["item"] == names["layers.0.down.weight"]["item"]
    assert data["items"][names["layers.1.up.weight"]["item"]]["module"] == "layers.0.up"


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("cached") / "artifact", Cached(), one_step(), LAYERS)


def test_caches_are_written_by_the_op_and_no_outputs(cached: Path) -> None:
    """They lie outside of the layers, whose numbers they have; so layers with a cache each are still told once."""
    data = page_data(cached)
    assert [item["label"] for item in data["items"] if item["kind"] == "output"] == ["output"]
    (layers,) = [member for member in data["members"] if isinstance(member, dict)]
    assert layers["title"] == "layers.* x 3"
    (writer,) = [item for item in data["items"] if item["writes"]]
    names = [row["name"] for row in data["tensors"]]
    assert (writer["label"], writer["writes"]) == ("index_copy", [["cache_0", names.index("cache_0")]])
    assert data["items"][data["tensors"][names.index("cache_2")]["item"]] == writer


def test_every_tensor_is_in_the_table_tied_ones_too(cached: Path) -> None:
    data = page_data(cached)
    assert sum(row["times"] for row in data["alike"]) == len(data["tensors"]) == len(read_manifest(cached).tensors)
    rows = {row["name"]: row for row in data["alike"]}
    assert (rows["layers.*.up.weight"]["times"], rows["cache_*"]["times"]) == (3, 3)
    (tied,) = [row for row in data["tensors"] if row.get("tied_to")]
    assert {tied["name"], tied["tied_to"]} == {"embed.weight", "head.weight"}
    assert tied["item"] is not None
    assert rows[tied["name"]]["times"] == 1


def test_each_rank_holds_what_its_file_does(tmp_path: Path) -> None:
    uneven = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8))
    out = saved(tmp_path / "out", uneven, torch.zeros(4, 8), {"0": "colwise", "2": "rowwise"})
    for rank in range(2):
        data = page_data(out, rank)
        state = torch.export.load(out / f"rank_{rank}.pt2").state_dict
        names = [row["name"] for row in data["tensors"]]
        assert data["held"][rank] == sum(state[name].nbytes for name in names)
        assert data["ranks"] == [rank]
        (relu,) = [item for item in data["items"] if item["label"] == "relu"]
        assert relu["value"] == f"f32[4, {8 - rank}]"


def test_advice_is_beside_its_fallback(tmp_path: Path) -> None:
    """Found anew from the artifact alone: what the program's own report says."""
    exported = torch.export.export(randomised(Mixed()), (torch.zeros(4, 8),))
    made = tpcompiler.parallelize(exported, 2, {"up": "colwise", "out": "colwise_gather_output"})
    made.save(tmp_path / "out")
    advice = advise_artifact(tmp_path / "out")
    records = page_data(tmp_path / "out", advice=advice)["records"]
    said = [row["advice"] for row in records if row["why"] == "fallback"]
    assert said == [
        "change 'up' from colwise to replicate (each rank sends 128 B less per call; each rank holds 288 B more)"
    ]
    assert f"help: {said[0]}" in made.report()
    assert not any(row["advice"] for row in records if row["why"] != "fallback")
    (tmp_path / "out" / "model.pt2").write_bytes(b"")
    assert advise_artifact(tmp_path / "out") == {}


GATHERED = {"layers.*.up": "colwise_gather_output", "layers.1.down": "rowwise", "embed": "embedding_rowwise"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_of_the_first_is_somewhere(tower: Path, tmp_path: Path, ranks: int) -> None:
    """Beside the one that it has become, or among those that are gone."""
    exported = torch.export.export(Tower().eval(), (ids(),))
    tpcompiler.parallelize(exported, ranks, GATHERED).save(tmp_path / "out")
    for first, second in ((tower, tmp_path / "out"), (tmp_path / "out", tower)):
        data = page_data(second, first=first)
        kept = [data["items"][row["item"]]["before"] for row in data["records"]]
        found = [row for row in kept if row] + data["gone"]
        expected = read_manifest(first).collectives
        assert sorted(row["wire_bytes"] for row in found) == sorted(row.wire_bytes for row in expected)
        for row in data["records"]:
            item = data["items"][row["item"]]
            told = item["before"] and [item["before"][key] for key in ("kind", "why", "wire_bytes")]
            assert item["differs"] == (told != [row[key] for key in ("kind", "why", "wire_bytes")])
        assert all(data["items"][row["item"]]["kind"] == "gone" for row in data["gone"])


@given(cuts())
def test_slices_are_what_ranks_hold(drawn: Cut) -> None:
    size, by = drawn
    found: dict[int, tuple[list[int], list[int]]] = {}
    for holder in slices_of([size], Sharding((by,)), GRID).holders:
        held = [at for start, stop in holder.runs[0] for at in range(start, stop)]
        found |= dict.fromkeys(holder.ranks, (held, holder.local))
    for rank in range(6):
        held = cut_dim(torch.arange(size), 0, by, GRID, GRID.coordinate(rank)).tolist()
        assert found[rank] == (held, [len(held)])


def test_a_symbolic_dim_is_cut_in_shares() -> None:
    mesh = Mesh.of(2)
    assert slices_of(["s0", 4], Sharding((DimSharding.by("tp"), WHOLE)), mesh).holders == [
        Holder(ranks=[0], local=["s0*1/2", 4], runs=[((0, 1),), ((0, 4),)]),
        Holder(ranks=[1], local=["s0*1/2", 4], runs=[((1, 2),), ((0, 4),)]),
    ]


def test_tensors_have_the_shapes_of_the_ranks_files(tower: Path) -> None:
    data = page_data(tower)
    for rank in range(2):
        state = torch.export.load(tower / f"rank_{rank}.pt2").state_dict
        for row in data["tensors"]:
            (local,) = [h["local"] for h in data["slices"][row["slices"]]["holders"] if rank in h["ranks"]]
            assert local == list(state[row["name"]].shape)


def value(data: dict[str, Any], label: str) -> Any:
    (item,) = [item for item in data["items"] if item["label"] == label and item["slices"] is not None]
    return data["slices"][item["slices"]]


def test_values_have_their_global_shape(tower: Path, tmp_path: Path) -> None:
    assert value(page_data(tower), "relu")["shape"] == [2, 6, 16]
    by_rows = saved(tmp_path / "rows", Tower(), ids(), LAYERS, inputs=["S(0)"])
    assert value(page_data(by_rows), "ids")["shape"] == [2, 6]  # of which a rank has [1, 6]


def test_a_claim_that_cannot_be_read_gives_no_global_shape(tower: Path, tmp_path: Path) -> None:
    assert page_data(tower)["unknown"] == []
    out = Path(shutil.copytree(tower, tmp_path / "out"))
    program = torch.export.load(out / "rank_0.pt2")
    for node in program.graph.nodes:
        if "relu" in node.name:
            node.meta["custom"]["tpcompiler"]["sharding"] = ["S(2) or so"]
    torch.export.save(program, tmp_path / "changed.pt2")
    put(out, None, GRAPH, entries_of(tmp_path / "changed.pt2")[GRAPH])
    data = page_data(out)
    (row,) = data["unknown"]
    assert (row["what"], dict(row["ops"])) == ("global shape", {"relu": 3})
    (relu,) = [item for item in data["items"] if item["label"] == "relu"]
    assert (relu["slices"], relu["unknown"]) == (None, row["why"])
    assert row["why"] == "its claim cannot be read: S(2) or so"


SLOW = Machine(flops=1.0, memory_bandwidth=1e6, memory=1e9, links={("", 0): [Link(latency=0.5, bandwidth=64.0)]})


@pytest.mark.slow
def test_times_are_the_rooflines_and_the_links(tmp_path: Path) -> None:
    exported = torch.export.export(Mlp().eval(), (torch.zeros(4, 8),))
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise", "down": "rowwise"})
    times = program.converted.predict(SLOW)
    product = 2.0 * 4 * 8 * 8
    assert [step.node for step in times.steps if 0 < step.compute < 1] == ["relu", "add"]  # what they move
    assert [(step.node, step.compute, step.sent) for step in times.steps if step.compute > 1 or step.sent] == [
        ("linear", product, 0.0),
        ("linear_1", product, 0.0),
        ("all_reduce", 0.0, 0.5 + 128 / 64),
    ]
    assert all(step.critical for step in times.steps)
    narrow = SLOW.__class__(1e9, 1.0, 1e9, SLOW.links)
    bytes_of_linear = 4 * (4 * 8 + 8 * 8 + 8 + 4 * 8)
    assert program.converted.predict(narrow).steps[0].compute == bytes_of_linear


def test_rows_of_experts_are_multiplied_once(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = nn.Parameter(torch.zeros(3, 16, 32, dtype=torch.bfloat16))

        def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._grouped_mm(rows, self.stacked, ends)  # type: ignore[no-any-return]

    example = torch.zeros(24, 16, dtype=torch.bfloat16), torch.tensor([8, 16, 24], dtype=torch.int32)
    exported = torch.export.export(Experts().eval(), example)
    program = tpcompiler.parallelize(exported, 2, {"stacked": "R"})
    (step,) = program.converted.predict(SLOW).steps
    assert step.compute == 2 * 24 * 16 * 32


@pytest.mark.slow
def test_the_critical_path_is_the_longer_branch(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.long = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(self.short(x), self.long(x), x)

    directory = saved(tmp_path / "out", Branches(), torch.zeros(1, 4, 8), {"short": "replicate"})
    data = page_data(directory)
    labels = [(data["items"][a]["module"], data["items"][b]["module"]) for a, b in data["chain"]]
    assert labels[:2] == [("", "long.0"), ("long.0", "long.1")]
    rows = {row["layer"]: row for row in data["timeline"]}
    assert (rows["short"]["compute"] > 0, rows["short"]["critical"]) == (True, 0.0)
    assert rows["outside of modules"]["critical"] > 0  # attention
