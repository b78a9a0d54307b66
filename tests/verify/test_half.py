"""bfloat16 and float16: converted, proved, and a fault is found where its bound in half precision would hide it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.compared import compare
from tests.half import PLAN, export_decoder, randomised, token_ids
from tests.passes.stages import Call
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler import ParallelProgram
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.compare.judge import FLOOR
from tpcompiler.parallel.program_subject import layout_of

HALF = [torch.bfloat16, torch.float16]


@functools.cache
def converted(dtype: torch.dtype, world: int, dynamic: bool = False) -> ParallelProgram:
    return tpcompiler.parallelize(export_decoder(dtype, dynamic), world, PLAN)


def without_each(program: ParallelProgram, x: torch.Tensor) -> list[tuple[str, VerifyReport]]:
    """What the judge says of the programs without one collective, for every one."""
    ranks = [program.rank_program(rank) for rank in range(program.world_size)]
    inputs = [node.name for node in program.converted.resharded.user_inputs()]
    out = []
    for name in collectives_of(ranks[0]):
        broken = [without_collective(rank, name) for rank in ranks]
        names = program.converted.resharded.output_names()
        out.append((name, compare(program.only.original(), broken, (x,), {}, layout_of(program.only), inputs, names)))
    return out


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_decoder_is_equal(dtype: torch.dtype, world: int, dynamic: bool) -> None:
    for shape in [(2, 12), (3, 7), (1, 1)] if dynamic else [(2, 12)]:
        report = converted(dtype, world, dynamic).verify((token_ids(*shape),))
        assert report.ok, report
        assert [d.name for d in report.outputs] == ["output", "output in float32"]
        narrow, wide = (d.tolerance for d in report.outputs)
        assert FLOOR * torch.finfo(dtype).eps <= narrow < 0.5
        assert wide < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_every_missing_collective_is_noticed(dtype: torch.dtype) -> None:
    found = without_each(converted(dtype, 2), token_ids(2, 12))
    assert len(found) == 4  # the embedding, attention, the mlp, the gathered logits
    for name, report in found:
        assert not report.ok, name
        assert not report.outputs[1].ok, f"{name} in float32"


class Faint(nn.Module):
    """A residual whose cut part adds little: left unreduced it is off by less than half precision can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.02 * self.down(torch.relu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_a_faint_fault_is_noticed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    exported = export(randomised(Faint(), dtype), (x,))
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise", "down": "rowwise"})
    assert program.verify((x,)).ok
    ((_, report),) = without_each(program, x)
    narrow, wide = report.outputs
    assert not report.ok
    assert not wide.ok
    if dtype is torch.bfloat16:
        assert narrow.ok, "the reason for the comparison in float32: in bfloat16 alone nothing is seen"


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("world", [2, 4])
def test_every_value_keeps_its_dtype(dtype: torch.dtype, world: int) -> None:
    """The float32 norms too, and the bodies of the cut vocabulary: a rank's value has the type of what it is a share of."""
    program = converted(dtype, world)
    types = {n.name: n.meta["val"].dtype for n in program.converted.resharded.source.graph.nodes if edit.is_tensor(n)}
    seen = set()
    for rank in range(world):
        for node in program.rank_program(rank).graph.nodes:
            claim = read_claim(node)
            if claim.sharding and edit.is_tensor(node):
                assert node.meta["val"].dtype is types[claim.origin], node.name
                seen.add(node.meta["val"].dtype)
    assert seen == {dtype, torch.float32, *({torch.int64, torch.bool} & seen)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_a_mean_over_a_cut_dim_keeps_its_dtype(dtype: torch.dtype) -> None:
    """Its body divides a local sum by the global count."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = Call(lambda self, x: torch.relu(self.up(x)).mean(-1), up=nn.Linear(16, 32))
    program = tpcompiler.parallelize(export(randomised(module, dtype), (x,)), 2, {"up": "colwise"})
    values = [n.meta["val"] for n in program.rank_program(0).graph.nodes if edit.is_tensor(n)]
    assert {value.dtype for value in values} == {dtype}
    assert program.verify((x,)).ok


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_a_pending_sum_is_reduced_before_it_is_cast(dtype: torch.dtype) -> None:
    """As the single device does it: one half-precision value, then the cast. (Halves the bytes of the sum, too.)"""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = Call(lambda self, x: self.down(torch.relu(self.up(x))).to(torch.float32), up=nn.Linear(16, 32), down=nn.Linear(32, 16))  # fmt: skip
    program = tpcompiler.parallelize(export(randomised(module, dtype), (x,)), 2, {"up": "colwise", "down": "rowwise"})
    calls = [n for n in program.rank_program(0).graph.nodes if n.op == "call_function"]
    assert [str(n.target).split(".")[1] for n in calls[-3:]] == ["all_reduce", "wait_tensor", "_to_copy"]
    assert [n.meta["val"].dtype for n in calls[-3:]] == [dtype, dtype, torch.float32]
    assert program.verify((x,)).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", HALF)
def test_a_rank_that_answers_in_another_dtype_is_noticed(dtype: torch.dtype) -> None:
    """The comparison in float32 does not see it; the one in the program's own types does."""
    program = converted(dtype, 2)
    ranks = [program.rank_program(rank) for rank in range(2)]
    for rank in ranks:
        (last,) = rank.graph.output_node().args[0]
        with rank.graph.inserting_before(rank.graph.output_node()):
            cast = rank.graph.call_function(torch.ops.aten._to_copy.default, (last,), {"dtype": torch.float32})
        cast.meta = dict(last.meta)
        rank.graph.output_node().args = ((cast,),)
    report = compare(
        program.only.original(), ranks, (token_ids(2, 12),), {}, layout_of(program.only), ["ids"], ["output"]
    )
    assert [d.ok for d in report.outputs] == [False, True]
    assert not report.ok


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_a_choice_between_near_equals_is_judged_in_float32(dtype: torch.dtype) -> None:
    """In half precision an argmax over thousands of scores is a matter of rounding; a wrong program still shows."""
    module = Call(
        lambda self, x: self.head(self.down(torch.relu(self.up(x)))).argmax(-1),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
        head=nn.Linear(16, 4096),
    )
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    program = tpcompiler.parallelize(export(randomised(module, dtype), (x,)), 2, {"up": "colwise", "down": "rowwise"})
    report = program.verify((x,))
    assert report.ok, report
    narrow, wide = report.outputs
    assert (narrow.counted, wide.counted, wide.abs) == (True, True, 0)
    if dtype is torch.bfloat16:
        assert narrow.abs > 0, "the reason for it"
    ((_, broken),) = without_each(program, x)
    assert not broken.ok
