"""Sums of gradients over samples in few large collectives, which `check` proves and a fault in which is found."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import tpcompiler
from tests.passes.stages import Call
from tests.training.test_gradients import ROWS
from tests.trust.damage import Artifact
from tpcompiler.ir import edit
from tpcompiler.ir.buckets import BUCKET, take_apart
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.passes import bucket_sums as module
from tpcompiler.passes.canonicalize import canonicalize

WIDTH, LAYERS = 8, 6
WEIGHT, BIAS = WIDTH * WIDTH * 4, WIDTH * 4


def chain(dtype: torch.dtype = torch.float32) -> tuple[Any, tuple[torch.Tensor]]:
    """Layers in a row, which the backward goes through from the last to the first."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = Call(lambda self, x: self.layers(x).square().mean(), layers=layers).to(dtype)
    return model, (torch.randn(4, WIDTH, dtype=dtype),)


def converted(mesh: dict[str, int], **plan: str) -> tuple[tpcompiler.ParallelProgram, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    model, args = chain()
    program = tpcompiler.export_training(model, args)
    made = tpcompiler.parallelize(program, mesh, {f"layers.{at}": each for at, each in plan.items()}, inputs=[ROWS])
    return made, args


def buckets(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is BUCKET]


def test_few_large_and_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two layers: a bucket is closed once it is full, and starts before the backward of the next layers."""
    monkeypatch.setattr(module, "BYTES", 2 * (WEIGHT + BIAS))
    made, args = converted({"dp": 2})
    sums = [each for each in made.collectives() if each.payload_bytes > 4]
    assert [(each.kind, each.payload_bytes, each.wire_bytes) for each in sums] == [
        ("all_reduce", 2 * (WEIGHT + BIAS), 2 * (WEIGHT + BIAS))  # on 2 ranks 2 * 1/2 of it
    ] * (LAYERS // 2)
    graph = made.rank_program(0).graph
    order = {node: at for at, node in enumerate(graph.nodes)}
    products = [order[node] for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    for bucket, later in zip(buckets(graph), (2, 1, 0), strict=True):
        behind = [at for at in products if at > order[bucket]]
        assert len(behind) >= later * 2 * 2 - 1  # two products a layer in the backward
        assert min(order[wait] for wait in edit.waits_of(bucket)) > products[-1]
    assert made.verify(args).ok


def test_each_dtype_and_group_by_itself() -> None:
    """A layer in bfloat16; its gradients are summed in what they are computed in."""
    model = Call(
        lambda self, x: self.out(self.narrow(x.bfloat16()).float()).square().mean(),
        narrow=nn.Linear(WIDTH, WIDTH).bfloat16(),
        out=nn.Linear(WIDTH, WIDTH),
    )
    program = tpcompiler.export_training(model, (torch.randn(4, WIDTH),))
    made = tpcompiler.parallelize(program, {"dp": 2}, {}, inputs=[ROWS])
    sums = Counter(each.payload_bytes for each in made.collectives())
    assert sums == {4: 1, WEIGHT + BIAS: 1, (WEIGHT + BIAS) // 2: 1}
    assert made.verify().ok


@pytest.mark.slow
def test_ranks_with_other_shapes_make_the_same_buckets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 columns on 3 ranks: shares of 3 and of 2 are on either side of what fills a bucket."""
    monkeypatch.setattr(module, "BYTES", WIDTH * 3 * 4 + 3 * 4)
    made, args = converted({"dp": 2, "tp": 3}, **{"0": "colwise", "1": "rowwise"})
    assert made.verify(args).ok
    made.save(tmp_path / "out")  # and checks the files
    programs = [made.rank_program(rank).graph for rank in range(6)]
    counts = {tuple(len(edit.outputs(node)) for node in buckets(each)) for each in programs}
    assert len(counts) == 1
    assert len({tuple(edit.shape(node) for node in each.nodes if edit.is_wait(node)) for each in programs}) == 2


def test_ranks_with_other_shapes_make_buckets_in_the_same_order() -> None:
    """A bucket of the outer layers, which the backward fills last, and one of the layers between them, in bfloat16."""
    model = Call(
        lambda self, x: self.last(self.narrow(self.first(x).bfloat16()).float()).square().mean(),
        first=nn.Linear(WIDTH, WIDTH),
        narrow=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16(),
        last=nn.Linear(WIDTH, WIDTH),
    )
    program = tpcompiler.export_training(model, (torch.randn(4, WIDTH),))
    made = tpcompiler.parallelize(
        program, {"dp": 2, "tp": 3}, {"narrow.0": "colwise", "narrow.1": "rowwise"}, inputs=[ROWS]
    )
    dtypes = [[edit.fake(bucket)[0].dtype for bucket in buckets(made.rank_program(rank).graph)] for rank in range(6)]
    assert dtypes == [[torch.bfloat16, torch.float32]] * 6
    assert made.check().ok, made.check().findings


def swap(bucket: fx.Node) -> None:
    """Two results for each other."""
    first, second = [part for part in bucket.users if edit.shape(part) == (WIDTH, WIDTH)][:2]
    first.args, second.args = second.args, first.args


def send_twice(bucket: fx.Node) -> None:
    values: Any = bucket.args[0]
    same = [at for at, value in enumerate(values) if edit.shape(value) == (WIDTH, WIDTH)]
    bucket.args = ([values[same[0]] if at == same[1] else value for at, value in enumerate(values)], *bucket.args[1:])


def take_the_most(bucket: fx.Node) -> None:
    bucket.args = (bucket.args[0], "max", bucket.args[2])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [swap, send_twice, take_the_most])
def test_a_damaged_bucket_is_refused(damage: Callable[[fx.Node], None]) -> None:
    made, _ = converted({"dp": 2})
    model = canonicalize(made.only.original())
    for own in (lambda bucket: None, damage):
        artifact = Artifact.of(made)
        for program in {id(each): each for each in artifact.ranks}.values():
            for node in buckets(program.graph):
                own(node)
        assert bool(check_programs(artifact.written(), artifact.manifest, model=model).findings) == (own is damage)


def test_taken_apart() -> None:
    """An all_reduce for each, with the claim of its result; a program without buckets stays itself."""
    made, _ = converted({"dp": 2})
    program = made.rank_program(0)
    apart = take_apart(program)
    kinds = Counter(str(node.target).split(".")[1] for node in apart.graph.nodes if edit.is_collective(node))
    assert kinds == {"all_reduce": 2 * LAYERS + 1}
    assert not any(node.target is operator.getitem for node in apart.graph.nodes)
    assert take_apart(apart) is apart
