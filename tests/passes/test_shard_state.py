"""A rank gets its own share of every leaf, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.passes.models import MEGATRON, Mlp, Tied
from tests.passes.stages import Call, local, sharded
from tpcompiler.ir.program import ShardedProgram

X = torch.randn(2, 4)


IDS = torch.tensor([[1, 5, 7], [0, 2, 2]])


def ranks(
    module: nn.Module, args: tuple[Any, ...], plan: dict[str, Any], degree: int = 2, **kwargs: Any
) -> list[ShardedProgram]:
    """All ranks of one program: leaves that are whole are the program's own."""
    return [sharded(local(module, args, plan, degree=degree, rank=rank, **kwargs), rank) for rank in range(degree)]


def test_shares_make_the_whole() -> None:
    """The first rank holds a pending bias. No share is a view, which would keep the whole weight in memory and files."""
    module = Mlp()
    first, second = (program.local_state for program in ranks(module, (X,), MEGATRON))
    assert list(first) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    torch.testing.assert_close(torch.cat([first["up.weight"], second["up.weight"]]), module.up.weight)
    torch.testing.assert_close(torch.cat([first["up.bias"], second["up.bias"]]), module.up.bias)
    torch.testing.assert_close(torch.cat([first["down.weight"], second["down.weight"]], 1), module.down.weight)
    torch.testing.assert_close(first["down.bias"], module.down.bias)
    assert not second["down.bias"].any()
    for name in ("up.weight", "up.bias", "down.weight"):
        assert first[name].untyped_storage().nbytes() == first[name].numel() * first[name].element_size()
        assert first[name].is_contiguous()


def test_tied_leaves_stay_one_tensor() -> None:
    (first, second) = ranks(Tied(), (IDS,), {"embed": "embedding_rowwise"})
    for program in (first, second):
        assert program.local_state["embed.weight"] is program.local_state["head.weight"]
        assert list(program.local_state["head.weight"].shape) == [4, 4]


def test_constants_and_buffers_that_are_not_saved() -> None:
    constant = torch.randn(2, 6)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + constant + self.table

    module = Call(forward, w=(4, 6))
    module.register_buffer("table", torch.randn(6), persistent=False)
    (first, second) = ranks(module, (X,), {"w": "S(1)"})
    (name,) = set(first.local_state) - {"w", "table"}
    torch.testing.assert_close(torch.cat([first.local_state[name], second.local_state[name]], 1), constant)
    torch.testing.assert_close(torch.cat([first.local_state["table"], second.local_state["table"]]), module.table)
