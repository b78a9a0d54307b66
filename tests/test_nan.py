"""A NaN or an infinity that one rank holds comes out where the single device has it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
import tpcompiler.passes._collectives
from tests.launch import called
from tests.trust.damage import Artifact
from tpcompiler.ir import edit
from tpcompiler.ir.nan_safe_reduce import decode, encode
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS = 32, 9
Given = tuple[torch.Tensor, ...]


class Each(nn.Module):
    """Every function on an input of its own, so that nothing is gathered for one that another could use."""

    def __init__(self, functions: Sequence[Callable[[torch.Tensor], Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, values: list[torch.Tensor]) -> list[Any]:
        return [function(value) for function, value in zip(self.functions, values, strict=True)]


REDUCED: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(0),
    "max of a dim": lambda x: tuple(x.max(0)),
    "min of a dim": lambda x: tuple(x.min(0)),
    "norm": lambda x: torch.linalg.vector_norm(x, INF, 0),
    "least norm": lambda x: torch.linalg.vector_norm(x, -INF, 0),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=0)),
    "logsumexp": lambda x: x.logsumexp(0),
    "amax in bfloat16": lambda x: x.to(torch.bfloat16).amax(0),
    "amin in half": lambda x: x.to(torch.half).amin(0),
    "amax in float64": lambda x: x.double().amax(0),
    "any": lambda x: x.isnan().any(0),
    "all": lambda x: x.isnan().all(0),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
    "norm of squares": lambda x: torch.linalg.vector_norm(x, 2, 0),
}
KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, 0),
}
FUNCTIONS = {**REDUCED, **KEPT}


def values(degree: int) -> torch.Tensor:
    """A column for each case: NaN on each rank in turn, infinities of either sign, beside NaN, alone, NaN everywhere."""
    torch.manual_seed(0)
    made = torch.randn(ROWS, COLUMNS)
    own = ROWS // degree
    for rank in range(degree):
        made[own * rank + 1, rank % 4] = NAN
    made[1, 4] = INF
    made[-2, 4] = -INF
    made[own, 5], made[-1, 5] = -INF, NAN
    made[:, 6], made[:, 7] = -INF, NAN
    made[:own, 8] = -INF
    return made


def program(degree: int) -> tpcompiler.ParallelProgram:
    given = [values(degree) for _ in FUNCTIONS]
    exported = export(Each(list(FUNCTIONS.values())), (given,))
    leaves = len(torch.utils._pytree.tree_leaves(Each(list(FUNCTIONS.values()))(given)))
    outputs = ["R"] * (leaves - len(KEPT)) + ["S(0)"] * len(KEPT)
    return tpcompiler.parallelize(exported, degree, {}, inputs=["S(0)"] * len(given), outputs=outputs)


def assert_same(got: Any, want: Any, name: str) -> None:
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def test_every_function_runs_on_its_shard() -> None:
    """Else the tests below would prove nothing: what is gathered keeps NaN without any care."""
    assert {each.kind for each in program(2).collectives()} == {"all_reduce"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_keep_nan_and_infinity(degree: int) -> None:
    made = program(degree)
    report = made.verify(([values(degree) for _ in FUNCTIONS],))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("degree", [2, 4])
def test_processes_keep_nan_and_infinity(degree: int, tmp_path: Path) -> None:
    made = program(degree)
    made.save(tmp_path / "out")
    whole = [values(degree) for _ in FUNCTIONS]
    results = called([[([each.chunk(degree)[rank].clone() for each in whole],)] for rank in range(degree)], tmp_path)
    expected = Each(list(FUNCTIONS.values()))(whole)
    for rank, (own,) in enumerate(results):
        for name, got, want in zip(FUNCTIONS, own, expected, strict=True):
            assert_same(got, want.chunk(degree)[rank] if name in KEPT else want, f"{name} on rank {rank}")


def lossy(monkeypatch: pytest.MonkeyPatch) -> tpcompiler.ParallelProgram:
    """Programs that leave the maximum of floats to the backend."""
    monkeypatch.setattr(tpcompiler.passes._collectives, "is_lossy", lambda *_: False)
    exported = export(Each([FUNCTIONS["amax"]]), ([values(2)],))
    return tpcompiler.parallelize(exported, 2, {}, inputs=["S(0)"])


@pytest.mark.slow
def test_a_plain_reduction_loses_nan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gloo loses it, `verify` simulates that it does, and `check` refuses such a program."""
    made, x = lossy(monkeypatch), values(2)
    report = made.verify(([x],))
    assert not report.ok
    assert "NaN" in str(report), str(report)
    ranks = read_ranks(made.only)
    checked = check_programs(ranks, made.manifest(), made.only.original())
    assert "reduces floats by max, in which a backend may lose a rank's NaN" in str(checked)
    monkeypatch.setattr(tpcompiler.ParallelProgram, "inspect", lambda *_: None)
    made.save(tmp_path / "out")
    results = called([[([part.clone()],)] for part in x.chunk(2)], tmp_path)
    lost = x.amax(0).isnan() & ~results[0][0][0].isnan()
    assert lost.any()
    assert made.verify(([x.nan_to_num()],)).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.half, torch.bfloat16])
@pytest.mark.parametrize("op", ["max", "min"])
def test_the_order_of_the_integers_is_that_of_the_floats(dtype: torch.dtype, op: str) -> None:
    limits = torch.finfo(dtype)
    rising = [-INF, limits.min, -1.5, -limits.tiny, 0.0, limits.smallest_normal, 1.5, limits.max, INF]
    floats = torch.tensor(rising, dtype=dtype)
    integers = encode(floats, op)
    assert integers.element_size() >= 4
    assert (integers[1:] > integers[:-1]).all()
    assert torch.equal(decode(integers, dtype), floats)
    for nan in (NAN, -NAN):
        one = encode(torch.tensor([nan], dtype=dtype), op)
        assert decode(getattr(torch.cat([integers, one]), op)(), dtype).isnan()


@dataclass(frozen=True)
class Damage:
    """A change of one call in the encoding, and words of the finding."""

    target: str
    at: int
    value: Any
    words: str


DAMAGES = {
    "NaN is no longer first": Damage("masked_fill", 2, 7, "moves and reduces values"),
    "for the other reduction": Damage("masked_fill", 2, -(2**31), "reduces by max what is encoded for min"),
    "another reduction": Damage("all_reduce", 1, "sum", "reduces by sum what is encoded for max"),
    "another shift": Damage("bitwise_right_shift", 1, 30, "moves and reduces values"),
    "other bits": Damage("bitwise_and", 1, 1, "moves and reduces values"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", DAMAGES)
def test_an_encoding_that_is_damaged_is_found(name: str) -> None:
    exported = export(Each([FUNCTIONS["amax"]]), ([values(2)],))
    made = tpcompiler.parallelize(exported, 2, {}, inputs=["S(0)"])
    ranks = [made.rank_program(rank) for rank in range(2)]
    damage = DAMAGES[name]
    for rank in ranks:
        node = next(node for node in edit.calls(rank.graph) if damage.target in str(node.target))
        node.update_arg(damage.at, damage.value)
    report = check_programs(Artifact(ranks, made.manifest()).written(), made.manifest(), made.only.original())
    assert damage.words in str(report)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("is_bool", [True, False])
def test_attention_over_keys_that_are_cut(spoilt: int, number: float, is_bool: bool) -> None:
    """A number in a key or value of the second rank, which the mask hides from some queries."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, steps, 8) for steps in (4, 256, 256))
    mask = torch.rand(4, 256) > 0.4
    mask[1, 128:] = False
    if not is_bool:
        mask = torch.zeros(4, 256).masked_fill(~mask, -INF)
    made = tpcompiler.parallelize(export(Attention(), (q, k, v, mask)), 2, {}, inputs=["R", "S(2)", "S(2)", "R"])
    assert {each.kind for each in made.collectives()} == {"all_reduce"}
    (q, k, v)[spoilt][0, 1, -1, 2] = number
    report = made.verify((q, k, v, mask))
    assert report.ok, str(report)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, 3, mode="sum", padding_idx=5)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return self.table(ids, per_sample_weights=weights)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("number", [NAN, INF])
@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("kind", [Looked, Bags])
def test_a_row_that_is_not_looked_up_is_not_seen(kind: type[nn.Module], row: int, number: float) -> None:
    """A rank looks up a row of its own for the ids of others, and must not multiply it by zero."""
    module = kind()
    with torch.no_grad():
        module.table.weight[row] = number
    ids = torch.tensor([[0, 6, 5], [7, 2, 5], [1, 1, 3]])
    args: Given = (ids, torch.rand(3, 3)) if kind is Bags else (ids,)
    made = tpcompiler.parallelize(export(module, args), 2, {"table.weight": "S(0)"})
    report = made.verify(args)
    assert report.ok, str(report)
