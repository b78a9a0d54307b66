"""Running sums and extrema over a sharded dim: ranks exchange the totals of their shards, one number per line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export
from torch.fx.experimental.proxy_tensor import make_fx

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.rules import scans
from tpcompiler.rules.registry import call_variant

SCANS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cummax": lambda x: tuple(x.cummax(1)),
    "cummin": lambda x: tuple(x.cummin(1)),
}
SAMPLES, FEATURES = 2, 3


class Scan(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.scale = name, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> Any:
        return SCANS[self.name](x * self.scale)


def values(size: int) -> torch.Tensor:
    """Numbers with ties, infinities and NaN, of which a scan of extrema returns the last place."""
    x = torch.randint(-4, 5, (SAMPLES, size, FEATURES)) / 2
    x[0, size // 2, 0], x[1, -1, 1], x[1, 0, 2] = float("nan"), float("inf"), -float("inf")
    return x


def converted(
    net: nn.Module, x: torch.Tensor, cut: Mapping[str, str], mesh: Mapping[str, int], machine: str = "ideal"
) -> tpcompiler.ParallelProgram:
    exported = export(net, (x,))
    cuts = [dict(cut)] * len(exported.graph_signature.user_outputs)
    return tpcompiler.parallelize(exported, dict(mesh), {}, inputs=[dict(cut)], outputs=cuts, machine=machine)


def check_sent(program: tpcompiler.ParallelProgram, gathered: list[int], shards: int) -> None:
    """Compare what is sent with gathers of totals by hand: these, or about as much by all_to_all, to whole lines and back."""
    sent = program.collectives()
    if {each.kind for each in sent} == {"all_gather"}:
        assert sorted(each.payload_bytes for each in sent) == sorted(gathered)
    else:
        assert "all_to_all" in {each.kind for each in sent} <= {"all_gather", "all_to_all"}
        assert sum(each.wire_bytes for each in sent) < 1.3 * sum(gathered) * (shards - 1) / shards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ({"cp": 2}, {"cp": "S(1)"}),
        ({"cp": 4}, {"cp": "S(1)"}),
        ({"cp": 2, "tp": 2}, {"cp": "S(1)"}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"dp": "S(0)", "cp": "S(1)"}),
        ({"cp": 2, "tp": 2}, {"cp": "S(1)", "tp": "S(1)"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SCANS)
def test_totals_over_data_axes(name: str, mesh: dict[str, int], cut: dict[str, str]) -> None:
    """One total of 4 bytes for each line and shard, and for extrema its place in 8."""
    x = values(64)
    program = converted(Scan(name), x, cut, mesh)
    shards = mesh["cp"] * (mesh["tp"] if "tp" in cut else 1)
    totals = SAMPLES // mesh.get("dp", 1) * FEATURES * shards
    by_hand = [totals * 4] + ([totals * 8] if name in ("cummax", "cummin") else [])
    check_sent(program, by_hand, shards)
    assert program.verify((x,)).ok


@pytest.mark.sample(2)
@pytest.mark.sweep
@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("size", [3, 4, 6, 7, 12])
def test_all_sizes_and_ranks(name: str, world: int, size: int) -> None:
    """Shares of several sizes are gathered."""
    x = values(size)
    program = converted(Scan(name), x, {"cp": "S(1)"}, {"cp": world})
    assert program.verify((x,)).ok
    if size % world:
        assert sum(each.wire_bytes for each in program.collectives()) >= SAMPLES * FEATURES * 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["cumsum", "cummax"])
def test_a_wrong_total_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: totals that count the rank's own shard too."""
    monkeypatch.setattr(scans, "_shifted", lambda totals, dim, start: totals)
    x = torch.arange(SAMPLES * 8 * FEATURES).view(SAMPLES, 8, FEATURES) / 8
    assert not converted(Scan(name), x, {"cp": "S(1)"}, {"cp": 2}).verify((x,)).ok


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_a_layer_before_extrema_stays_cut(name: str, world: int) -> None:
    """The look-up of places does not make the layer's weight whole, as keys with fewer heads than ranks would be."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 32)

        def forward(self, x: torch.Tensor) -> Any:
            return tuple(getattr(self.up(x), name)(-1))

    x = torch.randn(4, 8)
    for machine in ("ideal", "h100"):
        program = tpcompiler.parallelize(export(randomise(Net()), (x,)), world, {"up": "colwise"}, machine=machine)
        whole, ranks = program.parameter_bytes()
        assert ranks == [whole // world] * world
        assert program.verify((x,)).ok


CHUNK, HEADS, STATE, WIDTH = 8, 2, 4, 4


CHUNK, HEADS, STATE, WIDTH = 8, 2, 4, 4


CHUNK, HEADS, STATE, WIDTH = 8, 2, 4, 4


CHUNK, HEADS, STATE, WIDTH = 8, 2, 4, 4


def segments(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of all segments that end at one place and begin after another, -inf where there is none."""
    size = x.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool)
    sums = x.unsqueeze(-1).expand(*x.shape, size).masked_fill(~below.tril(-1), 0).cumsum(-2)
    return sums.masked_fill(~below.tril(), -torch.inf)


class ChunkedScan(nn.Module):
    """The state-space dual form of Dao and Gu, "Transformers are SSMs", 2024, as in its listing."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [HEADS * WIDTH, HEADS * STATE, HEADS * STATE, HEADS]
        self.up, self.down = nn.Linear(16, sum(self.sizes)), nn.Linear(HEADS * WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (part.unflatten(-1, (HEADS, -1)) for part in self.up(x).split(self.sizes, -1))
        v, b, c, a = (part.unflatten(1, (-1, CHUNK)) for part in split)
        decay = -F.softplus(a.squeeze(-1)).permute(0, 3, 1, 2)
        sums = decay.cumsum(-1)
        within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, segments(decay).exp(), v)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, (sums[..., -1:] - sums).exp(), v)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
        between = segments(F.pad(sums[..., -1], (1, 0))).exp()
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        before = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, sums.exp())
        return self.down((within + before).flatten(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_chunked_scan_exchanges_states_and_decays_of_chunks(world: int) -> None:
    """For each chunk and head a state and a number, where the tokens are 4 times as many bytes."""
    x = torch.randn(2, 8 * CHUNK, 16)
    program = converted(randomise(ChunkedScan()), x, {"cp": "S(1)"}, {"cp": world})
    states = 2 * 8 * HEADS * STATE * WIDTH * 4
    check_sent(program, [2 * 8 * HEADS * 4, states], world)
    assert x.numel() * 4 == 4 * states
    assert program.verify((x,)).ok


@pytest.mark.parametrize("op", [torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default])
def test_narrow_integers_stay_narrow(op: Any) -> None:
    """Ranks would exchange twice the bytes: torch widens the sums of integers unless it is given their dtype."""

    def scan(x: torch.Tensor) -> Any:
        return call_variant(op, {0: 2}, (x, 0), {"dtype": torch.int32})

    nodes = make_fx(scan, tracing_mode="fake")(torch.ones(8, 3, dtype=torch.int32)).graph.nodes
    assert {node.meta["val"].dtype for node in nodes if node.op != "output"} == {torch.int32}
