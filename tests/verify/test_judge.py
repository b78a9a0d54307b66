"""The judge notices damage: every fault here changes a rank's program or its weights, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.test_api import PLAN, Mlp, exported
from tests.zoo.faults import collectives_of, without_collective
from tpcompiler.verify.compare import VerifyReport, compare
from tpcompiler.verify.simulate import simulate

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
