"""The same op on every part of a split becomes one op on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleOutput
from torch.export import Dim, export

import tpcompiler
from tests.passes.stages import Call, planned
from tests.zoo.case import randomise
from tpcompiler.ir.text import program_text
from tpcompiler.passes.regions.join_branches import join_branches

X = torch.randn(2, 3, 16)
PLAN = {"q": "colwise"}


def heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    """[b, 4, s, 4]: each head is a dim-1 row."""
    made: torch.Tensor = self.q(x).view(x.shape[0], x.shape[1], 4, 4).transpose(1, 2)
    return made


def norm_per_head(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = heads(self, x).split(1, dim=1)
    return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=1)


def norm_per_pair(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([self.norms[0](first), self.norms[1](second)], dim=1)


def scaled_alike(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([self.norms[0].weight * first, self.norms[0].weight * second], dim=1)


def one_is_used_again(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = [norm(part) for norm, part in zip(self.norms, heads(self, x).split(1, dim=1), strict=True)]
    return torch.cat(made, dim=1) * made[0]


def in_another_order(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([self.norms[0](second), self.norms[1](first)], dim=1)


def along_another_dim(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([self.norms[0](first), self.norms[1](second)], dim=2)


def of_other_sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).split([1, 3], dim=1)
    return torch.cat([self.norms[0](first), self.norms[1](second)], dim=1)


def with_other_numbers(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([first * 2, second * 3], dim=1)


def drawn(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = heads(self, x).sigmoid().chunk(2, dim=1)
    return torch.cat([torch.bernoulli(first), torch.bernoulli(second)], dim=1)


def only_some(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = heads(self, x).split(1, dim=1)[:2]
    return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=False)], dim=1)


@torch.library.custom_op("test_join_branches::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def by_an_op_of_ones_own(self: Any, x: torch.Tensor) -> torch.Tensor:
    """An op that says nothing of how it is batched."""
    first, second = heads(self, x).chunk(2, dim=1)
    return torch.cat([doubled(first), doubled(second)], dim=1)


def module(forward: Callable[..., torch.Tensor]) -> nn.Module:
    norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(4)])
    return randomise(Call(forward, q=nn.Linear(16, 16, bias=False), norms=norms))


def test_before_and_after() -> None:
    program = planned(module(norm_per_pair), (X,), PLAN)
    before, after = (program_text(p).split("x = input", 1)[1] for p in (program, join_branches(program)))
    assert_expected_inline(
        before,
        """\
 f32[2, 3, 16]
linear = linear(x, p_q_weight)
view = view(linear, [2, 3, 4, 4])
transpose = transpose(view, 1, 2)
split = split(transpose, 2, 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
layer_norm = layer_norm(getitem, [4], p_norms_0_weight, p_norms_0_bias, 1e-05, False)
layer_norm_1 = layer_norm(getitem_1, [4], p_norms_1_weight, p_norms_1_bias, 1e-05, False)
cat = cat([layer_norm, layer_norm_1], 1)
pin: R = pin(cat)
return pin
""",
    )
    assert_expected_inline(
        after,
        """\
 f32[2, 3, 16]
linear = linear(x, p_q_weight)
view = view(linear, [2, 3, 4, 4])
transpose = transpose(view, 1, 2)
unflatten = unflatten(transpose, 1, [2, -1])
stack = stack([p_norms_0_weight, p_norms_1_weight])
stack_1 = stack([p_norms_0_bias, p_norms_1_bias])
permute = permute(unflatten, [1, 0, 2, 3, 4])
native_layer_norm = native_layer_norm(permute, [4], None, None, 1e-05)
getitem_2 = getitem(native_layer_norm, 0)
view_1 = view(stack, [2, 1, 1, 1, 4])
mul = mul(getitem_2, view_1)
view_2 = view(stack_1, [2, 1, 1, 1, 4])
add = add(mul, view_2)
permute_1 = permute(add, [1, 0, 2, 3, 4])
clone = clone(permute_1, memory_format=torch.contiguous_format)
cat = _unsafe_view(clone, [2, 4, 3, 4])
pin: R = pin(cat)
return pin
""",
    )


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("forward", "world"), [(norm_per_head, 2), (norm_per_head, 4), (norm_per_pair, 2), (scaled_alike, 2)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_heads_of_other_ranks_are_not_gathered(
    forward: Callable[..., torch.Tensor], world: int, dynamic: bool
) -> None:
    sizes = {"x": {0: Dim("batch", max=64), 1: Dim("sequence", max=64)}} if dynamic else None
    made = tpcompiler.parallelize(export(module(forward), (X,), dynamic_shapes=sizes), world, PLAN, outputs=["S(1)"])
    assert made.verify((X,)).ok
    if dynamic:
        assert made.verify((torch.randn(5, 1, 16),)).ok
    assert made.collectives() == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "forward",
    [
        one_is_used_again,
        in_another_order,
        along_another_dim,
        of_other_sizes,
        with_other_numbers,
        drawn,
        only_some,
        by_an_op_of_ones_own,
    ],
)
def test_what_stays_apart(forward: Callable[..., torch.Tensor]) -> None:
    program = planned(module(forward), (X,), PLAN)
    assert program_text(join_branches(program)) == program_text(program)


def test_a_branch_that_the_plan_names_stays() -> None:
    program = planned(
        module(norm_per_head),
        (X,),
        {**PLAN, "norms.0": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())},
    )
    assert program_text(join_branches(program)) == program_text(program)
