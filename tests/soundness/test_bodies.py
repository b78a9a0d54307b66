"""Every op that runs a body on its share is found sound, in any dtype; and a body that is wrong is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export

import tpcompiler
from tests.trust.damage import Artifact, claim, inserted
from tpcompiler.ir.node_placement import claims_of, read_claim
from tpcompiler.judge.sound.check import CheckReport, check_programs

IDS = torch.tensor([5, 0, 2, 3, 1])
PIXELS = (6, 12, 3)


def bags(mode: str) -> Callable[..., torch.Tensor]:
    return lambda a, ids: F.embedding_bag(ids, a, torch.tensor([0, 2, 2]), mode=mode, padding_idx=3)


OPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[torch.Tensor, ...], str]] = {
    "squeeze": (lambda a: torch.ops.aten.squeeze.default(a), (2, 1, 4), (), "S(0)"),
    "tril": (lambda a: a.tril(1), (6, 12), (), "S(0)"),
    "triu": (lambda a: a.triu(-2), (6, 12), (), "S(1)"),
    "mean": (lambda a: a.mean(), (64, 12), (), "S(0)"),
    "mean of a dim": (lambda a: a.mean(0), (64, 12), (), "S(0)"),
    "index": (lambda a, ids: a[ids], (6, 12), (IDS,), "S(0)"),
    "index of columns": (lambda a, ids: a[:, ids], (6, 12), (IDS,), "S(1)"),
    "index_select": (lambda a, ids: a.index_select(0, ids), (6, 12), (IDS,), "S(0)"),
    "gather": (lambda a, ids: a.gather(0, ids), (6, 12), (torch.randint(6, (4, 12)),), "S(0)"),
    "embedding": (lambda a, ids: F.embedding(ids, a), (6, 12), (IDS,), "S(0)"),
    "bags": (bags("sum"), (6, 12), (IDS,), "S(0)"),
    "bags, a mean": (bags("mean"), (6, 12), (IDS,), "S(0)"),
    "images of a group norm": (lambda a: torch.native_group_norm(a, None, None, *PIXELS, 4, 1e-5), PIXELS, (), "S(0)"),
    "groups of a norm": (lambda a: torch.native_group_norm(a, None, None, *PIXELS, 4, 1e-5), PIXELS, (), "S(1)"),
}


def made(op: str, dtype: torch.dtype) -> Artifact:
    forward, shape, more, cut = OPS[op]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.randn(shape).to(dtype))

        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
            return x, forward(self.value, *more)

    return Artifact.of(tpcompiler.parallelize(export(Net(), (torch.ones(2), *more)), 2, {"value": cut}))


def checked(artifact: Artifact) -> CheckReport:
    return check_programs(artifact.written(), artifact.manifest)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_body_is_sound(op: str, dtype: torch.dtype) -> None:
    artifact = made(op, dtype)
    claims = [read_claim(node) for node in artifact.ranks[0].graph.nodes if node.op == "call_function"]
    assert any(claim.body is not None for claim in claims)
    assert checked(artifact).findings == []


@pytest.mark.parametrize(
    "forward",
    [
        lambda a, ids: a.scatter_add(0, ids, a),
        lambda a, ids: a.index_put((ids[:, 0],), a, accumulate=True),
        lambda a, ids: a.index_add(0, ids[:, 0], a),
    ],
    ids=["scatter_add", "index_put", "index_add"],
)
def test_one_value_is_two_operands(forward: Callable[..., torch.Tensor]) -> None:
    """A rank has other shares of it: its rows to write to, and all rows to write."""

    class Net(nn.Module):
        def forward(self, a: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return forward(a, ids)

    args = torch.randn(6, 4), torch.randint(6, (6, 4))
    program = tpcompiler.parallelize(export(Net(), args), 2, {}, inputs=["S(0)", None], outputs=["S(0)"])
    artifact = Artifact.of(program)
    claims = [read_claim(node) for node in artifact.ranks[0].graph.nodes if node.op == "call_function"]
    assert any(claim.body is not None for claim in claims)
    assert checked(artifact).findings == []
    assert program.verify(args).ok


def another_weight(artifact: Artifact) -> None:
    for program in artifact.ranks:
        node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
        node.update_arg(1, 0.4)


def numbers_in_place_of_infinity(artifact: Artifact) -> None:
    for program in artifact.ranks:
        node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.masked_fill.Scalar)
        node.update_arg(0, inserted(node, torch.ops.aten.nan_to_num.default, (node.args[0],), node))


def no_more_than_so_many(artifact: Artifact) -> None:
    for program in artifact.ranks:
        node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.masked_fill.Scalar)
        node.update_arg(0, inserted(node, torch.ops.aten.clamp.default, (node.args[0], -1e4, 1e4), node))


def another_fill(artifact: Artifact) -> None:
    for program in artifact.ranks:
        node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.masked_fill.Scalar)
        node.update_arg(2, 1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("mean", another_weight),
        ("embedding", numbers_in_place_of_infinity),
        ("embedding", no_more_than_so_many),
        ("embedding", another_fill),
    ],
)
def test_a_body_is_its_rule_s(op: str, change: Callable[[Artifact], None]) -> None:
    """Whatever the values are: most of these differ from it on none that one would try."""
    artifact = made(op, torch.float32)
    change(artifact)
    (finding,) = checked(artifact).findings
    assert finding.endswith(f"is not what the rule of aten.{op}.default does on a share")


@pytest.mark.sample(1)
@pytest.mark.parametrize("sharding", ["R", "P(max)"])
def test_a_body_s_result_is_sharded_as_its_rule_says(sharding: str) -> None:
    """Even if all the claims about it fit together."""
    artifact = made("embedding", torch.float32)
    for program in artifact.ranks:
        for node, said in claims_of(program.graph):
            if said.sharding == ["P(sum)"]:
                claim(node)["sharding"] = [sharding]
            if said.change is not None:
                claim(node)["change"] = said.change.replace("P(sum)", sharding)
    finding = checked(artifact).findings[0]
    assert finding.endswith(f"takes S(0), R and makes P(sum) by its rule, and claims S(0), R and {sharding}")
