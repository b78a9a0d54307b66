"""Caches handed from the ranks of one artifact to those of another: bytes by hand, a proof, and processes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.export import export

import tpcompiler
from tests.launch import ROOT, fork_ranks
from tests.runtime.commands import call as command
from tests.trust.small import Decode
from tpcompiler import ArtifactError, LaunchError, UnsupportedError
from tpcompiler.report import handover
from tpcompiler.runtime.handover import HandoverLink, Move, _in_buckets, read_handover
from tpcompiler.runtime.turns import taking_turns

BATCH, HEADS, STEPS, FEATURES = 2, 2, 64, 16
CACHE = BATCH * HEADS * STEPS * FEATURES * 4  # bytes of the keys, and of the values


def call(at: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(at)
    shapes = ((BATCH, 4, 1, FEATURES), (BATCH, HEADS, 1, FEATURES), (BATCH, HEADS, 1, FEATURES))
    return (*(torch.randn(shape, generator=generator) for shape in shapes), torch.tensor([at]))


@pytest.fixture(scope="module")
def decode() -> Any:
    torch.manual_seed(0)
    return export(Decode(), call(5))


def converted(program: Any, ranks: int, cut: str) -> tpcompiler.ParallelProgram:
    return tpcompiler.parallelize(program, ranks, {"keys": cut, "values": cut} if cut != "R" else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "shares"),
    [
        # Of each pair of ranks the share of a cache that goes from one to the other.
        ((2, "S(1)"), (2, "S(1)"), {(0, 0): 1 / 2, (1, 1): 1 / 2}),
        ((2, "S(1)"), (4, "S(2)"), {(s, t): 1 / 8 for s in range(2) for t in range(4)}),
        ((4, "S(2)"), (2, "S(2)"), {(0, 0): 1 / 4, (1, 0): 1 / 4, (2, 1): 1 / 4, (3, 1): 1 / 4}),
        # 64 steps in 22, 22 and 20
        ((2, "S(2)"), (3, "S(2)"), {(0, 0): 22 / 64, (0, 1): 10 / 64, (1, 1): 12 / 64, (1, 2): 20 / 64}),
        # Whole caches: each rank gets all of it, keys from one sender and values from the next.
        ((2, "S(1)"), (2, "R"), {(s, t): 1 / 2 for s in range(2) for t in range(2)}),
        # Of ranks with equal shares, each sends to few.
        ((2, "R"), (2, "S(1)"), {(0, 0): 1 / 2, (1, 1): 1 / 2}),
        ((2, "R"), (3, "S(2)"), {(0, 0): 22 / 128, (1, 0): 22 / 128, (1, 1): 22 / 64, (0, 2): 20 / 64}),
    ],
)
def test_bytes_by_hand(
    decode: Any, source: tuple[int, str], target: tuple[int, str], shares: dict[tuple[int, int], float]
) -> None:
    made = converted(decode, *source).handover(converted(decode, *target))
    sent = {(each.source, each.target): each.bytes for each in made.sent}
    assert sent == {pair: 2 * CACHE * share for pair, share in shares.items()}
    assert made.bytes == sum(sent.values())


def test_large_parts_are_shared_out(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages cost little, two ranks that both have all of it send half of it each."""
    monkeypatch.setattr(handover, "MESSAGE", 0)
    made = converted(decode, 2, "R").handover(converted(decode, 3, "S(2)"))
    sent = Counter[int]()
    for each in made.sent:
        sent[each.source] += each.bytes
    assert sent == {0: CACHE, 1: CACHE}


def cut_wrongly(move: Move) -> Move:
    (start, stop), *others = move.source_slice
    return msgspec.structs.replace(move, source_slice=[[start + 1, stop + 1], *others])


DAMAGES: dict[str, Callable[[list[Move]], list[Move]]] = {
    "dropped": lambda moves: moves[1:],
    "doubled": lambda moves: [moves[0], *moves],
    "of another rank": lambda moves: [msgspec.structs.replace(moves[0], source=1), *moves[1:]],
    "to another rank": lambda moves: [msgspec.structs.replace(moves[0], target=2), *moves[1:]],
    "other elements": lambda moves: [cut_wrongly(moves[0]), *moves[1:]],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damages_are_found(decode: Any, damage: str) -> None:
    both = [converted(decode, 2, "S(1)"), converted(decode, 4, "S(2)")]
    programs = [{"": each.only} for each in both]
    sound = both[0].handover(both[1]).handover
    assert handover.find_wrong_move(sound, *programs) == ""
    wrong = msgspec.structs.replace(sound, moves=DAMAGES[damage](sound.moves))
    assert handover.find_wrong_move(wrong, *programs) != ""


@dataclass(frozen=True)
class Side:
    """The results of a side's ranks: bytes moved, results of calls, buffers."""

    ranks: list[tuple[int, list[torch.Tensor], dict[str, torch.Tensor]]]


def hand_over(sides: dict[str, tpcompiler.ParallelProgram], path: Path, calls: dict[str, Any]) -> dict[str, Side]:
    """Save both artifacts, and run both worlds at once, in gloo processes."""
    source, target = sides.values()
    source.handover(target).save(path / "handover.json")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = store.port
    del store  # the port is free again
    ended, worlds = {}, []
    for side, program in sides.items():
        program.save(path / side)
        torch.save(calls[side], path / f"{side}.calls")

    def run(side: str, ranks: int) -> None:
        words = (side, path / side, path / "handover.json", f"localhost:{port}", path)
        ended[side] = fork_ranks(ranks, ROOT / "tests/handover_worker.py", *words, timeout=150)

    for side, program in sides.items():
        worlds.append(threading.Thread(target=run, args=(side, program.world_size)))
        worlds[-1].start()
    for world in worlds:
        world.join()
    for each in ended.values():
        assert not any(each.codes), "\n".join(each.printed)
    return {
        side: Side([torch.load(path / f"{side}_{rank}.results") for rank in range(program.world_size)])
        for side, program in sides.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"), [((4, "S(2)"), (2, "S(1)")), ((2, "S(1)"), (3, "S(2)"))], ids=["4 to 2", "2 to 3"]
)
def test_processes(decode: Any, tmp_path: Path, source: tuple[int, str], target: tuple[int, str]) -> None:
    """Two steps on one side, one on the other: results and caches are those of one device, bit by bit where moved."""
    sides = {"source": converted(decode, *source), "target": converted(decode, *target)}
    before, after = [call(5), call(6)], [call(7)]
    found = hand_over(sides, tmp_path, {"source": before, "target": after})
    module = decode.module()
    wanted = [module(*each) for each in (*before, *after)]
    for side, results in (("source", wanted[:2]), ("target", wanted[2:])):
        for _, own, _ in found[side].ranks:
            for have, want in zip(own, results, strict=True):
                torch.testing.assert_close(have, want)
    assert sum(moved for moved, *_ in found["target"].ranks) == 2 * CACHE
    assert sum(moved for moved, *_ in found["source"].ranks) == 2 * CACHE
    dim = int(target[1][2])
    for name in ("keys", "values"):
        whole = torch.cat([buffers[name] for *_, buffers in found["target"].ranks], dim)
        assert torch.equal(whole, module.get_buffer(name))


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_programs_that_do_not_fit(decode: Any) -> None:
    own = converted(decode, 2, "S(1)")
    plain = tpcompiler.parallelize(export(Plain(), (torch.ones(4),)), 2, {})
    with pytest.raises(ArtifactError, match="writes no buffer: there is nothing to hand over"):
        plain.handover(own)
    with pytest.raises(ArtifactError, match=r"writes 'keys', f32\[2, 2, 64, 16\], and the program has none"):
        own.handover(plain)


def test_the_command(decode: Any, tmp_path: Path) -> None:
    """The file has what is printed, and the bytes that each rank receives are those of what it holds."""
    for name, ranks, cut in (("source", 2, "S(1)"), ("target", 4, "S(2)")):
        converted(decode, ranks, cut).save(tmp_path / name)
    words = [str(tmp_path / name) for name in ("source", "target", "handover.json")]
    result = command("handover", *words[:2], "-o", words[2], "--json")
    assert result.exit_code == 0, result.output
    answer = msgspec.json.decode(result.stdout)
    made, digest = read_handover(words[2])
    assert msgspec.to_builtins(made) == answer["handover"]
    assert len(digest) == 64
    received = Counter[int]()
    for each in answer["sent"]:
        received[each["target"]] += each["bytes"]
    assert received == dict.fromkeys(range(4), 2 * CACHE // 4)


class Mixed(nn.Module):
    """Buffers of 3, 10 and 8 bytes, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a_seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("b_state", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("c_count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a_seen.copy_(x[:3] > 0)
        self.b_state.add_(x.to(torch.bfloat16))
        self.c_count.add_(7)
        return x + self.b_state


@pytest.mark.slow
def test_buffers_of_several_dtypes(tmp_path: Path) -> None:
    """In one message, in which a number may begin anywhere."""
    x = torch.tensor([1.0, -1.0, 1.0, 0.5, 2.0])
    program = export(Mixed(), (x,))
    sides = {"source": tpcompiler.parallelize(program, 2, {}), "target": tpcompiler.parallelize(program, 3, {})}
    found = hand_over(sides, tmp_path, {"source": [(x,)], "target": []})
    module = program.module()
    module(x)
    for moved, _, buffers in found["target"].ranks:
        assert moved == 3 + 10 + 8
        for name, value in module.named_buffers():
            assert torch.equal(buffers[name], value), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target_slice": [[0, 1]]}, "a part of 'keys' has 2 elements on rank 0 and 1 on rank 0"),
        ({"source_slice": [[2, 0]]}, "a part of 'keys' ends before it begins: [[2, 0]]"),
        ({"target": 1}, "a part of 'keys' goes from rank 0 of 1 to rank 1 of 1"),
        ({"tensor": "values"}, "a part is of 'values', which is not listed"),
    ],
)
def test_damaged_files(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Ranks would wait for each other for ever."""
    row = {"shape": [2], "dtype": "f32", "source_sharding": "R", "target_sharding": "R"}
    move = {"tensor": "keys", "source": 0, "source_slice": [[0, 2]], "target": 0, "target_slice": [[0, 2]], **change}
    data = {"source_ranks": 1, "target_ranks": 1, "tensors": {"keys": row}, "moves": [move]}
    (tmp_path / "handover.json").write_bytes(msgspec.json.encode(data))
    with pytest.raises(ArtifactError, match=re.escape(said)):
        read_handover(tmp_path / "handover.json")


class Closed:
    """A group whose other side is gone."""

    def send(self, *_: object) -> None:
        raise RuntimeError("connection closed by peer")


def test_the_other_side_is_gone_or_another_thread_calls(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    own = converted(decode, 2, "S(1)")
    module: Any = own.rank_program(0).module()
    module.exported_program, module.leaf_names, module.group_names = own.rank_program(0), [], ["the group"]
    link = HandoverLink(own.handover(own).handover, "source", Closed(), (1, 1))
    with pytest.raises(LaunchError, match="the other side of the handover failed: connection closed by peer"):
        link.transfer(module)
    calls, ends = threading.Event(), threading.Event()

    def call() -> None:
        with contextlib.suppress(LaunchError), taking_turns(["the group"]):
            calls.set()
            ends.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    assert calls.wait(60)
    with pytest.raises(LaunchError, match="a second thread calls a program of the group 'the group'"):
        link.transfer(module)  # a call would have some of the tensors
    ends.set()
    thread.join()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 24), nn.Linear(24, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.b(torch.relu(self.a(x))))


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x).square().mean()


PLAN = {"**.a": "colwise", "**.b": "rowwise", "a": "colwise", "b": "rowwise"}
A, B, NORM = (24 * 8 + 24) * 4, 24 * 8 * 4, 3 * 8 * 4  # bytes: a layer and its bias, a weight, b's bias and the norm's


def sides(source: Any, target: Any, dtype: torch.dtype = torch.float32) -> list[tpcompiler.ParallelProgram]:
    """A trainer, and a service whose weights are others."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    trained = tpcompiler.export_training(Loss(Layers()), (x,))
    served = export(Layers().to(dtype).eval(), (x.to(dtype),))
    plans = [{name: how for name, how in PLAN.items() if ("*" in name) is it} for it in (True, False)]
    return [
        tpcompiler.parallelize(program, mesh, plan)
        for program, mesh, plan in zip((trained, served), (source, target), plans, strict=True)
    ]


def moved(source: tpcompiler.ParallelProgram, target: tpcompiler.ParallelProgram) -> dict[str, list[torch.Tensor]]:
    """The shares of the target's ranks after a handover of weights, of which the file says every part."""
    made, own = source.handover(target, weights=True).handover, target.only
    shares = {name: [own.share(name, rank).clone() for rank in range(own.world_size)] for name in made.tensors}
    for move in made.moves:
        name = made.tensors[move.tensor].source_name or move.tensor
        part = source.only.share(name, move.source)[tuple(slice(*each) for each in move.source_slice)]
        shares[move.tensor][move.target][tuple(slice(*each) for each in move.target_slice)] = part
    return shares


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("source", "target", "bytes_sent"),
    [
        # Each share once; the bias of b, which only the first rank adds, once; the norm's weights to each rank.
        (4, 2, A + B + 32 + 2 * 64),
        ({"dp": 2, "tp": 2}, 3, A + B + 32 + 3 * 64),
        (3, {"dp": 2, "tp": 2}, 2 * (A + B + 32) + 4 * 64),
    ],
)
def test_weights_from_trainer_to_service(source: Any, target: Any, bytes_sent: int) -> None:
    trainer, service = sides(source, target)
    shares = moved(trainer, service)
    trained = trainer.original()
    again = tpcompiler.parallelize(
        export(loaded(trained), (torch.randn(4, 8),)), target, {"a": "colwise", "b": "rowwise"}
    )
    assert shares.keys() == {row.name for row in service.manifest().tensors}
    for name, own in shares.items():
        for rank, share in enumerate(own):
            assert torch.equal(share, again.only.share(name, rank)), (name, rank)
    assert trainer.handover(service, weights=True).bytes == bytes_sent


def loaded(trained: Any) -> nn.Module:
    """The service's model with the trainer's weights."""
    model = Layers()
    model.load_state_dict({name.removeprefix("model."): value for name, value in trained.state_dict.items()})
    return model.eval()


def test_weights_arrive_in_the_dtype_of_the_service() -> None:
    trainer, service = sides(2, 4, torch.bfloat16)
    handed = trainer.handover(service, weights=True).handover.tensors
    assert {each.dtype for each in handed.values()} == {"bf16"}
    assert handed["a.weight"].source_name == "model.a.weight"


def test_no_bucket_is_larger_than_asked() -> None:
    parts = [(torch.randn(shape), torch.bfloat16) for shape in ((3, 5), (), (100, 7), (0, 4), (2, 2, 2), (33,))]
    buckets = _in_buckets(parts, 64)
    assert max(sum(part.numel() * 2 for part, _ in bucket) for bucket in buckets) <= 64
    sent = torch.cat([part.flatten() for bucket in buckets for part, _ in bucket])
    assert torch.equal(sent, torch.cat([part.flatten() for part, _ in parts]))


def test_weights_of_another_model_are_refused(decode: Any) -> None:
    trainer, _ = sides(2, 2)
    with pytest.raises(ArtifactError, match="has no parameter"):
        trainer.handover(converted(decode, 2, "R"), weights=True)
    other = tpcompiler.parallelize(export(nn.Sequential(nn.Linear(8, 8)), (torch.randn(4, 8),)), 2, {})
    with pytest.raises(ArtifactError, match=r"holds '0\.weight'.* has none"):
        trainer.handover(other, weights=True)


def test_weights_that_may_be_those_of_two_layers_are_refused() -> None:
    x = torch.randn(4, 8)
    two, one = (export(each, (x,)) for each in (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)))
    source, target = (tpcompiler.parallelize(program, 2, {}) for program in (two, one))
    with pytest.raises(ArtifactError, match=r"holds 'weight', which may be '0\.weight' or '1\.weight'"):
        source.handover(target, weights=True)


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        generator = torch.Generator().manual_seed(seed)
        for value in self.state_dict().values():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.a(x))
        return normed


def test_running_statistics_go_with_the_weights() -> None:
    x = torch.randn(4, 8)
    trainer = tpcompiler.parallelize(
        tpcompiler.export_training(Normed(1), (x,), loss=lambda y: y.square().mean()), 2, {"**a": "colwise"}
    )
    service = tpcompiler.parallelize(export(Normed(2).eval(), (x,)), 4, {"a": "colwise"})
    shares = moved(trainer, service)
    assert shares.keys() >= {"norm.running_mean", "norm.running_var", "norm.weight", "a.weight"}
    again = tpcompiler.parallelize(export(Normed(1).eval(), (x,)), 4, {"a": "colwise"})
    for name, own in shares.items():
        for rank, share in enumerate(own):
            assert torch.equal(share, again.only.share(name, rank)), (name, rank)


def test_sides_whose_programs_run_over_different_ranks_are_refused() -> None:
    x = torch.randn(4, 8)
    source = tpcompiler.parallelize(export(Normed(1).eval(), (x,)), 2, {})
    both = {name: export(Normed(2).eval(), (x,)) for name in ("go", "score")}
    for target in (
        tpcompiler.parallelize(both, 4, {}, degrees={"score": 2}),
        tpcompiler.parallelize(both["go"], {"pp": 2, "tp": 2}, {}),
    ):
        for weights in (True, False):
            with pytest.raises(UnsupportedError, match="run over different ranks"):
                source.handover(target, weights=weights)
            with pytest.raises(UnsupportedError, match="run over different ranks"):
                target.handover(source, weights=weights)
