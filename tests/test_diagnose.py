"""Meshes that `diagnose` compares: each has what its conversion has."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.passes.test_shared_heads import WIDTH, Attention
from tests.runtime.commands import refused, right
from tpcompiler.api.diagnose import Diagnosis
from tpcompiler.api.request import Request
from tpcompiler.api.try_meshes import Device, MeshTrials
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.timeline import StepTime
from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.parallel.converted_program import convert_programs
from tpcompiler.solver.estimate import measure_memory
from tpcompiler.solver.report import find_obstacles
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import text_of

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


class Mlp(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, wide, bias=False), nn.Linear(wide, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@cache
def mlp(wide: int = 192) -> ExportedProgram:
    torch.manual_seed(0)
    return export(Mlp(wide), (torch.randn(2, 8, 64),))


def ranks_of(found: Diagnosis) -> list[int]:
    return [each.ranks for each in found.meshes.values()]


def held(made: tpcompiler.ParallelProgram) -> str:
    text = next(note.text for note in made.converted.notes if note.text.startswith("a rank holds about "))
    return text.removeprefix("a rank holds about ").partition(":")[0]


def held_of(program: ExportedProgram, ranks: int) -> int:
    return measure_memory(convert_programs(Request(program, ranks).conversions())[0]).total


@pytest.mark.slow
def test_each_degree_is_what_its_conversion_has() -> None:
    for each in tpcompiler.diagnose(mlp()).meshes.values():
        made = tpcompiler.parallelize(mlp(), each.ranks, "auto")
        assert each.collectives["model"] == len(made.collectives())
        assert each.wire_bytes["model"] == sum(c.wire_bytes for c in made.collectives())
        (own,) = each.costs
        assert format_bytes(own.total) == held(made)
        assert own.weights == max(made.parameter_bytes()[1])


def test_gains_end_at_the_fastest_degree() -> None:
    """Not at one that the next degree is no faster than: a later one may be."""
    found = tpcompiler.diagnose(mlp())

    def limits(milliseconds: list[float]) -> str:
        meshes = {}
        for (name, each), time in zip(found.meshes.items(), milliseconds, strict=False):
            seconds = {"model": StepTime.of({"other": time / 1000}, 0, 0)}
            meshes[name] = replace(each, costs=[replace(each.costs[0], seconds=seconds)])
        return text_of(replace(found, meshes=meshes, fastest="tp=2", cheapest="tp=1").parts())

    assert "beyond" not in limits([4, 3, 2.5, 1.84, 1.9, 1.7])
    assert "beyond --tp 6 a call takes no less" in limits([4, 3, 1.9, 1.84, 1.7, 1.8])


@pytest.mark.slow
def test_the_smallest_degree_within_a_limit() -> None:
    """As the conversions themselves say."""
    limit = held_of(mlp(), 3)
    found = tpcompiler.diagnose(mlp(), memory=limit)
    assert found.least == "tp=3"
    assert [name for name, each in found.meshes.items() if not each.fits] == ["tp=1", "tp=2"]
    for ranks in (1, 2):
        with pytest.raises(ShardingError, match="more than the limit"):
            tpcompiler.parallelize(mlp(), ranks, "auto", memory=limit)


def test_no_degree_is_enough() -> None:
    limit = held_of(mlp(512), 32)
    with pytest.raises(ShardingError, match=r"(?s)no mesh that was tried fits: on tp=16, .*help: use 32 ranks, or a"):
        tpcompiler.diagnose(mlp(512), memory=limit)


class Packed(nn.Module):
    """Six heads whose queries, keys and values are one matrix, weights in groups, and a table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(40, 48), nn.Linear(48, 144), nn.Linear(48, 48)
        self.register_buffer("q", torch.randint(-8, 8, (96, 48), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(96, 3))
        self.down, self.head = nn.Linear(96, 48), nn.Linear(48, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = (each.view(2, -1, 6, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, -1, 48))
        up = (self.q.view(96, 3, 16) * self.scales[:, :, None]).view(96, 48)
        return self.head(x + self.down(torch.relu(nn.functional.linear(x, up))))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("plan", "kind", "count", "layer"),
    [
        ({"qkv": "colwise", "out": "rowwise"}, "heads", 6, "the model"),
        ({"qkv": "colwise", "out": "rowwise"}, "features of a packed block", 48, "qkv"),
        ({"scales": "S(1)", "q": "S(1)"}, "quantisation groups", 3, "the model"),
        ({"words": "rowwise"}, "entries of the vocabulary", 40, "words"),
        ({"down": "rowwise"}, "features", 96, "down"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_obstacle(plan: dict[str, str], kind: str, count: int, layer: str) -> None:
    program = export(Packed().eval(), (torch.zeros(2, 12, dtype=torch.long),))
    found, _ = convert_programs(Request(program, 3, plan).conversions())
    assert (kind, count, layer) in [(each.kind, each.count, each.layers[0]) for each in find_obstacles(found)]


def test_a_degree_that_no_placement_suits() -> None:
    rows = torch.export.Dim("rows", min=2, max=6)
    program = export(Mlp(192), (torch.randn(2, 8, 64),), dynamic_shapes=({0: rows},))
    found = tpcompiler.diagnose(program, inputs={"x": "S(0)"})
    assert ranks_of(found) == [1, 2]
    impossible = [name for name, reason in found.left_out.items() if reason.startswith("not possible")]
    assert impossible == ["tp=4", "tp=8", "tp=16"]
    assert "none of these is a multiple of 8" in found.left_out["tp=8"]
    with pytest.raises(UnsupportedError, match="none of these is a multiple of 8"):
        tpcompiler.parallelize(program, 8, "auto", inputs={"x": "S(0)"})


@pytest.mark.slow
def test_the_smallest_within_a_latency(tmp_path: Path) -> None:
    """And the others, as the table has them: the fastest call, and the least time of a call times its ranks."""
    found = tpcompiler.diagnose(mlp())
    seconds = {each.ranks: each.seconds["model"].total for each in found.meshes.values() if each.fits}
    assert found.latency is found.within is None
    assert found.fastest == f"tp={min(seconds, key=lambda ranks: seconds[ranks])}"
    assert found.cheapest == f"tp={min(seconds, key=lambda ranks: seconds[ranks] * ranks)}"
    limit = seconds[4]
    within = min(n for n in seconds if seconds[n] <= limit)
    assert within > 1
    assert tpcompiler.diagnose(mlp(), latency=limit).within == f"tp={within}"
    assert tpcompiler.diagnose(mlp(), latency=min(seconds.values()) / 2).within is None
    torch.export.save(mlp(), tmp_path / "model.pt2")
    words = "plan", tmp_path / "model.pt2", "--latency"
    assert re.search(r"^the smallest within 1 ms for a call: --tp 1$", right(*words, "1ms"), re.MULTILINE)
    assert "within 0.0001 us" not in right(*words, "0.0001us")
    assert re.search(r"^within 0\.1 ns for a call: none; the fastest takes ", right(*words, "0.0001us"), re.MULTILINE)
    assert "'6' is no time\n  help: write 6ms, 250us or 1.5s" in refused(*words, "6")
    assert "leave it out with --tp and --mesh" in refused(*words, "6ms", "--tp", 2)


def test_the_command(tmp_path: Path) -> None:
    torch.export.save(mlp(100), tmp_path / "model.pt2")
    text = right("plan", tmp_path / "model.pt2")
    assert max(map(len, text.partition("\n\n")[0].splitlines()[1:])) <= 80
    assert "\n\nthe smallest that fits: --tp 1\nthe fastest: --tp 16, 21.1 ns for a call\n" in text
    assert "8: up.weight: the largest share is 1.04 times an even one\n" in text
    assert "\nsearched 7 times\n" in text
    data = json.loads(right("plan", tmp_path / "model.pt2", "--memory", "0.04MB", "--json"))
    held_by = {name: each["costs"][0] for name, each in data["meshes"].items()}
    assert {each["limit"] for each in held_by.values()} == {40_000}
    assert data["least"] == next(name for name, each in held_by.items() if each["total"] <= 40_000)


def test_weights_that_ranks_share_are_remarked() -> None:
    """Of 8 x 16 keys in float32 a half is 256 B, and a quarter would be 128."""
    program, machine = export(Attention(8, 2, False).eval(), (torch.ones(4, 3, WIDTH),)), read_machine("ideal")
    request = Request(program, {"tp": 1}, machine=machine)
    trials = MeshTrials(request.conversions(), [Device("ideal", machine, 10**9)])
    trials.place(trials.degree(2))
    said = [f"{name}.weight: 2 shares, each on 2 ranks: each rank holds 128 B more" for name in ("k", "v")]
    assert trials.place(trials.degree(4)).remarks == ["2 kv heads (the model) do not divide evenly", *said]


def test_a_given_machine_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCOMPILER_MACHINE", "nowhere.yaml")
    program = export(nn.Sequential(nn.Linear(8, 8)), (torch.ones(2, 8),))
    assert tpcompiler.diagnose(program, machine="ideal").machine == "ideal"
