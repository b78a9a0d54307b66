"""Every change of sharding becomes one explicit `reshard` node, and no pin is left."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn

from tests.passes.models import MEGATRON, Mlp
from tests.passes.stages import Call, divided, placed
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.ir.node_placement import PLACEMENT, has_reshard, reshard_of
from tpcompiler.ir.program import PlacedProgram, pin
from tpcompiler.ir.text import program_text
from tpcompiler.passes.place import place
from tpcompiler.solver.search import solve
from tpcompiler.solver.task import Task

X, Y = torch.randn(2, 4), torch.randn(2, 4)


def text(*args: Any, **kwargs: Any) -> str:
    return program_text(placed(*args, **kwargs))


def changes(program: PlacedProgram) -> str:
    found = (reshard_of(node) for node in program.graph.nodes if has_reshard(node))
    lines = (
        f"{c.name}: {c.source.text(program.mesh)} -> {c.target.text(program.mesh)}; {c.why}; {c.reason}" for c in found
    )
    return "".join(f"{line}\n" for line in lines)


def test_a_pin_becomes_the_change_that_it_asks_for() -> None:
    program = placed(Mlp(), (X,), {**MEGATRON, "up": "colwise_gather_output"}, outputs=["S(0)"])
    assert_expected_inline(
        program_text(program),
        """\
p_up_weight: S(0) = up.weight f32[6, 4]
p_up_bias: S(0) = up.bias f32[6]
p_down_weight: S(1) = down.weight f32[4, 6]
p_down_bias: P(sum) = down.bias f32[4]
x: R = input f32[2, 4]
linear: S(1) = linear(x, p_up_weight, p_up_bias)
reshard: R = reshard(linear)
reshard_1: S(1) = reshard(reshard)
relu: S(1) = relu(reshard_1)
linear_1: P(sum) = linear(relu, p_down_weight, p_down_bias)
reshard_2: S(0) = reshard(linear_1)
reshard_3: S(0) = reshard(x)
add: S(0) = add(reshard_3, reshard_2)
return add
""",
    )
    assert_expected_inline(
        changes(program),
        """\
reshard: S(1) -> R; plan-demanded; the plan ("up": "colwise_gather_output")
reshard_1: R -> S(1); fallback; d1 is cut by tp
reshard_2: P(sum) -> S(0); inherent; each rank has a partial sum of 'linear_1'
reshard_3: R -> S(0); fallback; d0 is cut by tp
""",
    )


def test_every_operand_gets_what_its_op_needs() -> None:
    module = Call(lambda self, x, y: x @ y + x)
    square = torch.randn(4, 4)
    program = placed(module, (square, square + 1), inputs=["S(0)", "S(1)"])
    assert_expected_inline(
        program_text(program),
        """\
x: S(0) = input f32[4, 4]
y: S(1) = input f32[4, 4]
reshard: R = reshard(x)
matmul: S(1) = matmul(reshard, y)
reshard_1: S(1) = reshard(x)
add: S(1) = add(matmul, reshard_1)
reshard_2: R = reshard(add)
return reshard_2
""",
    )
    assert_expected_inline(
        changes(program),
        """\
reshard: S(0) -> R; fallback; matmul: other operands are cut differently; n is cut by tp
reshard_1: S(0) -> S(1); fallback; add: other operands are cut differently; d1 is cut by tp
reshard_2: S(1) -> R; plan-demanded; outputs are R unless outputs= says otherwise
""",
    )


def test_a_written_back_value_returns_to_its_buffers_sharding() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(self.up(x))
        return x

    module = Call(forward, up=nn.Linear(4, 6), seen=torch.zeros(2, 6))
    assert_expected_inline(
        text(module, (X,), {"up": "colwise", "seen": "S(0)"}),
        """\
p_up_weight: S(0) = up.weight f32[6, 4]
p_up_bias: S(0) = up.bias f32[6]
b_seen: S(0) = seen f32[2, 6]
x: R = input f32[2, 4]
linear: S(1) = linear(x, p_up_weight, p_up_bias)
reshard: S(0) = reshard(linear)
return reshard, x
""",
    )


def test_the_planned_program_is_not_changed() -> None:
    program = divided(Mlp(), (X,), MEGATRON)
    found = solve(Task([program], Objective.of(read_machine())))
    before = program_text(found.programs[0])
    place(found.programs[0], found)
    assert program_text(found.programs[0]) == before
    assert any(node.target is pin for node in found.programs[0].graph.nodes)
    assert not any(PLACEMENT in node.meta for node in found.programs[0].graph.nodes)
