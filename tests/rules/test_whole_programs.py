"""Rules in whole programs: bodies of their own are traced, sizes are counted, weights are found by their features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.sound import findings
from tpcompiler.ir.node_placement import placement_of


class Weighted(nn.Module):
    """A function of an input and a weight."""

    def __init__(self, forward: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


CASES: dict[str, tuple[nn.Module, torch.Tensor, dict[str, Any], dict[str, Any]]] = {
    "columns of a grouped convolution": (
        nn.Conv1d(8, 12, 3, groups=4),
        torch.randn(2, 8, 9),
        {"weight": "S(0)"},
        {"inputs": ["S(1)"]},
    ),
    "groups, as many as channels, unevenly": (
        nn.Conv2d(5, 10, 2, groups=5),
        torch.randn(2, 5, 4, 4),
        {},
        {"inputs": ["S(1)"]},
    ),
    "groups of a transposed convolution": (
        nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2),
        torch.randn(2, 6, 4, 4),
        {"weight": "S(0)"},
        {"inputs": ["S(1)"]},
    ),
    "patches": (nn.Conv2d(3, 8, 4, 4), torch.randn(1, 3, 16, 8), {}, {"inputs": ["S(2)"]}),
    "windows of a size that follows": (nn.AdaptiveAvgPool2d((4, 3)), torch.randn(2, 3, 8, 5), {}, {"inputs": ["S(2)"]}),
    "two weights between three": (
        Weighted(lambda x, w: torch.einsum("...k,khd->...hd", x, w), 6, 4, 5),
        torch.randn(2, 3, 6),
        {"weight": "S(1)"},
        {},
    ),
    "features of two inputs": (
        Weighted(lambda x, w: F.bilinear(x, 2 * x, w), 8, 3, 3),
        torch.randn(4, 3),
        {"weight": "S(0)"},
        {},
    ),
    "keys that broadcast over heads": (
        Weighted(
            lambda x, w: F.scaled_dot_product_attention(
                (x @ w).view(2, 5, 4, 2).transpose(1, 2), x[:, None, :, :2], x[:, None, :, :2]
            ),
            8,
            8,
        ),
        torch.randn(2, 5, 8),
        {"weight": "S(1)"},
        {},
    ),
    "complex numbers in pairs": (
        Weighted(
            lambda x, w: torch.view_as_real(torch.view_as_complex((x @ w).unflatten(2, (4, 2))) * 1j).flatten(2), 6, 8
        ),
        torch.randn(2, 3, 6),
        {"weight": "S(1)"},
        {},
    ),
}

STATIC = ("keys that broadcast over heads",)


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_and_without_a_fallback(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    module, x, plan, boundary = CASES[name]
    batch = dynamic and x.shape[0] > 1 and name not in STATIC
    shapes = ({0: Dim("batch", min=2, max=64)},) if batch else None
    if isinstance(module, Weighted):
        shapes = (shapes[0],) if shapes else None
    program = tpcompiler.parallelize(export(module, (x,), dynamic_shapes=shapes), 2, plan, **boundary)
    assert [c.reason for c in program.collectives() if c.why == "fallback"] == []
    report = program.verify((x,))
    assert report.ok, str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_eps_of_a_norm_over_a_dim_that_is_cut(dtype: torch.dtype) -> None:
    """Without one, torch adds that of the dtype in which it computes: small values tell them apart."""
    x = torch.randn(1).to(dtype)
    module = Weighted(lambda x, w: F.rms_norm(w, (8,)) + x, 3, 8).to(dtype)
    module.weight.data.mul_(0.02)
    program = tpcompiler.parallelize(export(module, (x,)), 2, {"weight": "S(1)"})
    assert program.verify((x,)).ok


PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "a sum and another operand": lambda m, w: torch.einsum("ij,k->k", w, m[0]),
    "three operands": lambda m, w: torch.einsum("ij,ik,kj->k", w, w, m),
    "bilinear": lambda m, w: F.bilinear(w.t(), m, w.reshape(1, 8, 4)),
}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("degree", [2, 4])
def test_a_pending_operand_beside_a_sum_over_the_same_ranks(name: str, degree: int) -> None:
    """Each rank has addends of both factors of a product, and the product of their sums is not the sum of products."""
    x = torch.randn(8, 4)
    module = Weighted(lambda x, w: PRODUCTS[name](w.t() @ x, w), 8, 4)
    program = tpcompiler.parallelize(export(module, (x,)), degree, {"weight": "S(0)"}, inputs=["S(0)"])
    assert program.verify((x,)).ok
    assert findings(program) == []


@pytest.mark.slow
def test_columns_of_a_grouped_convolution_are_its_groups() -> None:
    module = nn.Sequential(nn.Conv1d(8, 16, 3, groups=4), nn.ReLU(), nn.Conv1d(16, 6, 1))
    x = torch.randn(2, 8, 9)
    program = tpcompiler.parallelize(export(module, (x,)), 4, {"0": "colwise", "2": "rowwise"})
    placed = {
        fqn: placement_of(node).shardings[0].text(program.mesh) for node, fqn in program.converted.resharded.leaves()
    }
    assert placed == {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)", "2.bias": "P(sum)"}
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    assert program.verify((x,)).ok


class Table(nn.Module):
    """Rows of a table, looked up or added."""

    def __init__(self, forward: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randint(1, 100, (7, 3)).to(dtype))
        self.function = forward

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.function(self.rows, at)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    {
        "look-up": lambda rows, at: F.embedding(at, rows),
        "index": lambda rows, at: rows[at - 7],
        "gather": lambda rows, at: rows.gather(0, at[:, None].expand(-1, 3)),
        "add": lambda rows, at: rows.new_ones(8, 3).index_add(0, at, rows),
        "put": lambda rows, at: rows.new_ones(8, 3).index_put((at,), rows, accumulate=True),
        "scatter": lambda rows, at: rows.new_ones(8, 3).scatter_add(0, at[:, None].expand(-1, 3), rows),
    }.values(),
)
def test_rows_of_a_table_that_is_cut(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """What rows are added to joins the sum on one rank: an integer has no equal shares. 7 rows over 3 are uneven."""
    args = (torch.tensor([6, 0, 3, 3, 2, 6, 1]),)
    made = tpcompiler.parallelize(export(Table(function, dtype), args), 3, {"rows": "S(0)"})
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    report = made.verify(args)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16])
def test_a_table_that_not_every_backend_sums_stays_whole(dtype: torch.dtype) -> None:
    exported = export(Table(lambda rows, at: F.embedding(at, rows), dtype), (torch.tensor([5, 0]),))
    with pytest.raises(tpcompiler.ShardingError, match="it needs the dim of 7 whole"):
        tpcompiler.parallelize(exported, 2, {"rows": "S(0)"})


@pytest.mark.slow
def test_a_size_that_is_dynamic_in_one_operand_and_a_number_in_another(tmp_path: Path) -> None:
    """Only a call can tell that both are equal: the dim stays whole, and what is returned is cut."""

    class Running(nn.Module):
        state: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.randn(3, 4, 7))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = x + self.state
            self.state.mul_(0.5).add_(torch.tanh(x))
            return made.relu(), y * 2

    x = torch.randn(3, 4, 7)
    program = export(Running(), (x, x.clone()), dynamic_shapes=({1: Dim.AUTO}, {1: Dim.AUTO}))
    made = tpcompiler.parallelize(program, 2, {}, outputs=["S(1)", "R"])
    made.save(tmp_path / "out")  # it is checked
    assert made.verify((x, x + 1), then=[(x * 2, x)]).ok
