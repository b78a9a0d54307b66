"""The judge notices damage: every fault here changes a rank's program or its weights, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.compared import compare
from tests.test_api import PLAN, Mlp, exported
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.compare.judge import Layout, difference
from tpcompiler.judge.compare.simulate import simulate

Programs = list[ExportedProgram]


def judged(damage: Callable[[Programs], Programs]) -> VerifyReport:
    program = tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, PLAN)
    programs = damage([copy.deepcopy(program.rank_program(rank)) for rank in range(2)])
    inputs = [node.name for node in program.resharded.user_inputs()]
    names = program.resharded.output_names()
    torch.manual_seed(0)
    return compare(
        program.original,
        programs,
        (torch.randn(2, 4),),
        {},
        program.layout(),
        inputs,
        names,
        intermediate=program.resharded.source,
    )


def a_bias_on_every_rank(programs: Programs) -> Programs:
    programs[1].state_dict["down.bias"].data.copy_(programs[0].state_dict["down.bias"])
    return programs


def swapped_shards(programs: Programs) -> Programs:
    one, two = (p.state_dict["up.weight"].data.clone() for p in programs)
    programs[0].state_dict["up.weight"].data.copy_(two)
    programs[1].state_dict["up.weight"].data.copy_(one)
    return programs


def a_sum_that_is_a_maximum(programs: Programs) -> Programs:
    for program in programs:
        for node in program.graph.nodes:
            if "all_reduce" in str(node.target):
                node.update_arg(1, "max")
    return programs


def no_all_reduce(programs: Programs) -> Programs:
    return [without_collective(p, collectives_of(p)[0]) for p in programs]


def test_what_is_right_is_accepted() -> None:
    report = judged(lambda programs: programs)
    assert report.ok
    assert report.first_diverging is None


@pytest.mark.parametrize(
    ("damage", "first"),
    [
        (a_bias_on_every_rank, "'linear_1' (aten.linear.default, claimed P(sum))"),
        (swapped_shards, "'linear' (aten.linear.default, claimed S(1))"),
        (a_sum_that_is_a_maximum, "'wait_tensor' (_c10d_functional.wait_tensor.default, claimed R)"),
        (no_all_reduce, "'wait_tensor' (_c10d_functional.wait_tensor.default, claimed R)"),
    ],
)
def test_damage_is_noticed_and_placed(damage: Callable[[Programs], Programs], first: str) -> None:
    report = judged(damage)
    assert not report.ok
    assert report.max_rel_err > 1e-2  # five orders of magnitude above the noise of the right program
    assert report.first_diverging is not None
    assert report.first_diverging.startswith(first)


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    program = tpcompiler.parallelize(exported(Mlp(), torch.randn(2, 4)), 2, PLAN)
    programs = [program.rank_program(0), no_all_reduce([program.rank_program(1)])[0]]
    with pytest.raises(tpcompiler.InternalError) as raised:
        simulate(programs, [[torch.randn(2, 4)]] * 2)
    assert str(raised.value).splitlines()[0] == (
        "ranks disagree: rank 0 is at all_reduce(torch.float32, sum, tp=2:tp) ('all_reduce'), rank 1 at the end"
    )


class Centred(nn.Module):
    """What it returns is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(self.down(nn.functional.gelu(self.up(x))), (64,)).mean(-1)


@pytest.mark.parametrize("seed", range(4))
def test_an_output_that_is_zero_but_for_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 32)
    program = tpcompiler.parallelize(export(Centred(), (x,)), 2, {"up": "colwise", "down": "rowwise"})
    assert program.verify((x,)).ok


@pytest.mark.parametrize(
    ("noise", "off", "ok"),
    [
        (1e-8, 7e-8, True),  # as far off as eight orders of summation
        (1e-8, 2e-7, False),
        (1.0, 0.4, True),  # rounding has decided between two branches: what is allowed ends at half of the scale
        (1.0, 0.6, False),
    ],
)
def test_how_far_off_an_output_may_be(noise: float, off: float, ok: bool) -> None:
    exact = torch.zeros(4, dtype=torch.float64) if noise < 1 else torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    want = (exact + torch.tensor([0, noise, 0, 0])).float()
    layout = Layout(Mesh((("tp", 2),)), {"y": Sharding.replicated(1)})
    found = difference("y", "y", want, exact, [want, want + off * torch.eye(4)[2]], layout, magnitude=1.0)
    assert found.ok == ok
