"""Collectives start right after their operand and are waited for right before their first use, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import tpcompiler
from tests.passes.stages import Call, local
from tests.zoo.index import CASES
from tpcompiler.ir import edit
from tpcompiler.ir.text import program_text
from tpcompiler.passes.schedule_collectives import schedule_collectives

MACHINE = "ideal"


def text(module: Call, x: torch.Tensor, plan: dict[str, str], **kwargs: Any) -> str:
    return program_text(schedule_collectives(local(module, (x,), plan, **kwargs)))


def test_a_wait_moves_down_to_its_first_use() -> None:
    module = Call(lambda self, x: (x @ self.a) @ self.b + torch.sin(x), a=(4, 8), b=(8, 4))
    assert_expected_inline(
        text(module, torch.randn(2, 4), {"a": "S(1)", "b": "S(0)"}),
        """\
p_a: S(1) = a f32[4, 4]
p_b: S(0) = b f32[4, 4]
x: R = input f32[2, 4]
matmul: S(1) = matmul(x, p_a)
matmul_1: P(sum) = matmul(matmul, p_b)
all_reduce = all_reduce(matmul_1, 'sum', 'tp=2:tp')
sin: R = sin(x)
wait_tensor: R = wait_tensor(all_reduce)
add: R = add(wait_tensor, sin)
return add
""",
    )


def test_a_start_moves_up_to_its_operand_with_what_goes_before_it() -> None:
    """An output is gathered at the end where nobody else needs it whole; its dim is not the first in memory."""
    module = Call(lambda self, x: (x @ self.a, torch.sin(x) @ self.b), a=(4, 8), b=(4, 4))
    assert_expected_inline(
        text(module, torch.randn(2, 4), {"a": "S(1)"}, outputs=["R", None]),
        """\
p_a: S(1) = a f32[4, 4]
p_b: R = b f32[4, 4]
x: R = input f32[2, 4]
matmul: S(1) = matmul(x, p_a)
unsqueeze = unsqueeze(matmul, 0)
all_gather_into_tensor = all_gather_into_tensor(unsqueeze, 2, 'tp=2:tp')
sin: R = sin(x)
matmul_1: R = matmul(sin, p_b)
wait_tensor = wait_tensor(all_gather_into_tensor)
permute = permute(wait_tensor, [1, 0, 2])
clone = clone(permute, memory_format=torch.contiguous_format)
view: R = view(clone, [2, 8])
return view, matmul_1
""",
    )


def test_one_result_more_is_held_at_a_time() -> None:
    """Values that are gathered at their use: each starts when the one before has arrived, and not all at once."""
    module = Call(lambda self, x, y, z: torch.sin(torch.sin(x.sort(0).values) + y.sort(0).values) + z.sort(0).values)
    program = local(module, tuple(torch.randn(4, 2) for _ in "xyz"), degree=2, inputs=["S(0)"] * 3)
    assert_expected_inline(
        program_text(schedule_collectives(program)),
        """\
x: S(0) = input f32[2, 2]
y: S(0) = input f32[2, 2]
z: S(0) = input f32[2, 2]
all_gather_into_tensor = all_gather_into_tensor(x, 2, 'tp=2:tp')
wait_tensor: R = wait_tensor(all_gather_into_tensor)
all_gather_into_tensor_1 = all_gather_into_tensor(y, 2, 'tp=2:tp')
sort: (R, R) = sort(wait_tensor, 0)
getitem: R = getitem(sort, 0)
sin: R = sin(getitem)
wait_tensor_1: R = wait_tensor(all_gather_into_tensor_1)
all_gather_into_tensor_2 = all_gather_into_tensor(z, 2, 'tp=2:tp')
sort_1: (R, R) = sort(wait_tensor_1, 0)
getitem_2: R = getitem(sort_1, 0)
add: R = add(sin, getitem_2)
sin_1: R = sin(add)
wait_tensor_2: R = wait_tensor(all_gather_into_tensor_2)
sort_2: (R, R) = sort(wait_tensor_2, 0)
getitem_4: R = getitem(sort_2, 0)
add_1: R = add(sin_1, getitem_4)
return add_1
""",
    )


def between(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the waits, each with an op that follows it before its first use and is no wait, and no part of a change."""
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        if edit.is_wait(node):
            for other in nodes[at + 1 :]:
                if node in other.all_input_nodes:
                    break
                if not edit.is_wait(other) and "reshard" not in other.meta["custom"]["tpcompiler"]:
                    yield node, other


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "t5", "swin", "unet"])
def test_no_wait_stands_before_an_op_that_does_not_use_it(name: str) -> None:
    case = CASES[name]
    made = tpcompiler.parallelize(case.export(False), 2, case.asked(), machine=MACHINE)
    assert list(between(made.rank_program(0).graph)) == []
    assert made.verify((), case.inputs(*case.example)).ok


def test_the_order_of_collectives_is_kept() -> None:
    module = Call(lambda self, x: (x @ self.a, torch.sin(x) @ self.b, x.sum()), a=(4, 8), b=(4, 8))
    program = local(module, (torch.randn(2, 4),), {"a": "S(1)", "b": "S(1)"}, outputs=["R", "R", None])
    before = [node.name for node in program.graph.nodes if edit.is_collective(node)]
    after = [node.name for node in schedule_collectives(program).graph.nodes if edit.is_collective(node)]
    assert len(before) == 2
    assert before == after
