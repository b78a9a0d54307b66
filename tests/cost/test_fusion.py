"""What counts as a kernel, and the bytes that each op moves, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler.cost.fusion import Kernel, find_kernels
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.objective import Objective, Work
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.passes.canonicalize import canonicalize

X, WIDE = 4 * 8, 4 * 16  # numbers of the input, and of what is between
ROWS = torch.zeros(4, 8)


def counted(
    function: Any, *inputs: torch.Tensor, fuses: bool = True, **parameters: torch.Tensor
) -> tuple[list[str], int]:
    """The floors that a program pays, in order, and the numbers that all of its ops move."""
    program = canonical(function, *inputs, **parameters)
    floors, moved, objective = [], 0.0, Objective.of(Machine(1.0, 1.0, 1.0))
    for node, kernel in find_kernels(program.graph, fuses).items():
        floors += [kernel.floor] if kernel.floor else []
        values = [*(operand.meta["val"] for operand in edit.operands(node)), *edit.outputs(node)]
        pairs = [(value, Sharding.replicated(value.ndim)) for value in values]
        moved += objective.work_seconds(kernel, Work(), pairs, Mesh.of(1)) / values[-1].element_size()
    return floors, int(moved)


def canonical(function: Any, *inputs: torch.Tensor, **parameters: torch.Tensor) -> CanonicalProgram:
    class Model(nn.Module):
        def forward(self, *given: torch.Tensor) -> Any:
            return function(self, *given)

    model = Model()
    for name, value in parameters.items():
        model.register_buffer(name, value)
    return canonicalize(torch.export.export(model, inputs))


def test_a_chain_is_one_kernel() -> None:
    """The chain reads its input once, and writes what is returned."""
    assert counted(lambda self, x: (x.exp() + x).sigmoid(), ROWS) == (["other"], 2 * X)


def test_a_norm_is_one_kernel_with_what_is_around_it() -> None:
    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).relu()

    assert counted(norm, ROWS) == (["other"], 2 * X)


def test_products_end_a_kernel() -> None:
    """relu lies between two products: it reads what one wrote, and the other reads what it writes."""

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, self.up)), self.down)

    floors, moved = counted(mlp, ROWS, up=torch.zeros(16, 8), down=torch.zeros(8, 16))
    assert floors == ["product", "other", "product"]
    assert moved == (X + 16 * 8 + WIDE) + 2 * WIDE + (WIDE + 16 * 8 + X)


def test_a_residual_does_not_join_kernels_across_a_product() -> None:
    """Else a whole decoder would be one."""

    def layer(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + F.linear(x.relu(), self.w)
        return x

    floors, _ = counted(layer, ROWS, w=torch.zeros(8, 8))
    assert floors == ["other", "product"] * 3 + ["other"]


def test_views_are_none() -> None:
    assert counted(lambda self, x: x.t().reshape(2, 16)[:, :8].relu(), ROWS)[0] == ["other"]
    assert counted(lambda self, x: (x.t(), x[None]), ROWS) == ([], 0)


def test_a_look_up_reads_what_it_returns() -> None:
    floors, moved = counted(
        lambda self, i: F.embedding(i, self.words), torch.zeros(4, dtype=torch.int64), words=torch.zeros(1000, 8)
    )
    assert floors == ["other"]
    assert moved == 2 * 4 * 8 + 4 * 2  # rows, and indices of 8 bytes in numbers of 4


def test_an_expanded_tensor_is_read_once() -> None:
    """The control has all of it in memory."""
    floors, moved = counted(lambda self, x: F.linear(x, self.row.expand(16, 8)), ROWS, row=torch.zeros(8))
    assert (floors, moved) == (["product"], X + 8 + WIDE)
    floors, moved = counted(lambda self, x: F.linear(x, self.rows), ROWS, rows=torch.zeros(16, 8))
    assert (floors, moved) == (["product"], X + 16 * 8 + WIDE)


def test_a_cache_moves_what_is_written() -> None:
    def write(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.cache[2:6] = x
        return self.cache[2:3] * 2

    floors, moved = counted(write, ROWS, cache=torch.zeros(1000, 8))
    assert floors == ["other"]
    assert moved < 10 * X


def test_a_weight_is_widened_where_it_is_used() -> None:
    """One byte is read of each number, and no kernel more runs; a control has two users."""
    weight = torch.zeros(16, 8, dtype=torch.int8)
    floors, moved = counted(lambda self, x: F.linear(x, self.w.to(torch.float32)), ROWS, w=weight)
    assert (floors, moved) == (["product"], X + 16 * 8 // 4 + WIDE)

    def twice(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = self.w.to(torch.float32)
        return F.linear(F.linear(x, wide), wide.t())

    assert counted(twice, ROWS, w=weight)[0] == ["other", "product", "product"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
def test_experts_that_no_token_takes_are_not_read(tokens: int) -> None:
    """Of 8 experts a token leaves each with the probability 7 / 8, or 6 / 8 if it takes two."""
    rows = torch.zeros(tokens, 16, dtype=torch.bfloat16)
    ends = torch.full((8,), tokens, dtype=torch.int32)
    stacked = torch.zeros(8, 16, 32, dtype=torch.bfloat16)

    def one(self: Any, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(x, self.stacked, e)  # type: ignore[no-any-return]

    floors, moved = counted(one, rows, ends, stacked=stacked)
    assert floors == ["product"]
    assert moved == int(tokens * 16 + (1 - (7 / 8) ** tokens) * 8 * 16 * 32 + 8 * 2 + tokens * 32)

    def two(self: Any, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = scores.topk(2).indices.flatten()
        ends = F.one_hot(chosen.sort().values, 8).sum(0).cumsum(0).to(torch.int32)
        return torch.ops.aten._grouped_mm(x, self.stacked, ends)  # type: ignore[no-any-return]

    (product,) = products(two, rows.repeat(2, 1), torch.zeros(tokens, 8), stacked=stacked)
    assert product.moves[1] == pytest.approx(1 - (6 / 8) ** tokens)


def products(function: Any, *inputs: torch.Tensor, **parameters: torch.Tensor) -> list[Kernel]:
    """The kernels of products, in order."""
    kernels = find_kernels(canonical(function, *inputs, **parameters).graph).values()
    return [kernel for kernel in kernels if kernel.floor == "product"]


def test_narrow_operands_of_products() -> None:
    """Both, or the weights alone, also where a kernel takes them as they are; scales of the result are no operands."""
    narrow, wide, scales = torch.zeros(16, 32, dtype=torch.int8), torch.zeros(4, 32), torch.ones(16)

    def dtypes(function: Any, *inputs: torch.Tensor, **parameters: torch.Tensor) -> list[str]:
        return [kernel.dtype for kernel in products(function, *inputs, **parameters)]

    assert dtypes(lambda self, x: torch._int_mm(x, self.w.t()), torch.zeros(32, 32).char(), w=narrow) == ["int8"]
    assert dtypes(lambda self, x: F.linear(x, self.w.float()), wide, w=narrow) == ["int8_weights"]
    scaled = dtypes(lambda self, x: F.linear(x, self.w.float() * self.s[:, None]), wide, w=narrow, s=scales)
    assert scaled == ["int8_weights"]
    eight = narrow.to(torch.float8_e4m3fn)
    assert dtypes(lambda self, x: F.linear(x, self.w.float(), self.s), wide, w=eight, s=scales) == ["float8_weights"]
    packed = torch.ops.aten._weight_int8pack_mm
    assert dtypes(lambda self, x: packed(x, self.w, self.s), wide, w=narrow, s=scales) == ["int8_weights"]
    assert dtypes(lambda self, x: F.linear(x, self.w), wide, w=narrow.float()) == [""]


def test_attention_is_one() -> None:
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
    floors, moved = counted(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, k.clone())
    assert (floors, moved) == (["attention"], 2 * q.numel() + 2 * k.numel())


def test_indices_of_sizes_are_computed_where_they_are_used() -> None:
    """The look-up after a product reads what it returns, and its indices take no kernel before the product."""

    def pick(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight)[:, torch.arange(4) * 2].relu()

    weight = torch.zeros(8, 16)
    floors, moved = counted(pick, ROWS, weight=weight)
    assert (floors, moved) == (["product", "other"], X + 8 * 16 + WIDE + 2 * 4 * 4)


def test_a_mask_of_sizes_is_written_for_an_attention() -> None:
    def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(4)[:, None] >= torch.arange(4)
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], attn_mask=mask)

    assert counted(attend, ROWS)[0] == ["other", "attention"]


def test_without_a_compiler_every_op_is_a_kernel() -> None:
    """Each op of the chain reads its operands and writes its result, and each view takes time; the control fuses."""

    def chain(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + x).t().sigmoid()

    floors, moved = counted(chain, ROWS, fuses=False)
    assert (sorted(floors), moved) == (["other"] * 3 + ["view"], (2 + 3 + 2) * X)
    assert counted(chain, ROWS) == (["other"], 2 * X)
