"""Random programs under random plans on random meshes: all ranks are equal to the single device, or refuse politely."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import tpcompiler
from tests.long import some
from tests.property.programs import Net, Step
from tests.property.run import SHORT, Outcome, Tally, batch, judge
from tests.property.steps import ROWS

SEEDS = some(range(2), 2)  # of each some 17 programs count; `make trust` runs 10,000


@cache
def outcomes(seed: int) -> list[Outcome]:
    return batch(seed, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_are_the_single_device(seed: int) -> None:
    wrong = [outcome for outcome in outcomes(seed) if outcome.kind == "failed"]
    assert not wrong, "\n".join(f"{outcome.why}\n{outcome.case}" for outcome in wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # alone it runs all seeds
def test_the_programs_are_many_kinds_of_programs() -> None:
    """What is drawn by chance must not become poor unseen."""
    tally = Tally()
    for seed in SEEDS:
        for outcome in outcomes(seed):
            tally.add(outcome)
    print(tally)
    counted = tally.kinds["counted"]
    assert counted >= 15 * len(SEEDS)
    assert counted > 4 * (tally.kinds["refused"] + tally.kinds["discarded"])
    assert len(tally.of["sharded"]) > 15
    assert set(tally.of["collectives"]) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    assert {"tp=2", "tp=3", "tp=4", "dp=2,tp=2"} <= set(tally.of["mesh"])
    assert any(":" in mesh for mesh in tally.of["mesh"]), "no mesh of unequal shares was drawn"
    assert tally.of["programs"]["with collectives"] > 0.9 * counted
    assert tally.of["free sizes"]["0"] < 0.9 * counted
    assert {"colwise", "rowwise", "colwise_gather_output"} <= set(tally.of["plan"])
    assert 0.1 * counted < tally.of["numbers"]["with NaN or inf"] < 0.7 * counted
    assert tally.of["judged by"]["gloo processes"]


def test_ranks_that_answer_for_ids_beyond_are_noticed() -> None:
    net = Net()
    net.add(Step("table", (), (4,)), (2, 3))
    net.returned = (2,)
    args = torch.randn(2, 3), torch.randn(2, 3), torch.randint(ROWS, (2, 3))
    for check in (True, False):
        program = torch.export.export(net, args)
        made = tpcompiler.parallelize(program, 2, {"table0": "S(0)"}, check_indices=check)
        assert ("and no rank does" in judge(made, args)[1]) is not check
