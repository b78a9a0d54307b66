"""The benchmark of predictions: its figures and what it predicts. Times are not tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tools.bench_cost import Arm, Result, plans_of, rank_correlation, summary, write
from tools.bench_models import scaled
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import read_machine

SLOW = """flops: 1.0e+8
memory_bandwidth: 1.0e+9
memory: 1.0e+10
fuses: false
links:
- {latency: 1.0e-6, bandwidth: 1.0e+8}
"""


@pytest.fixture
def slow(tmp_path: Path) -> Machine:
    """A machine on which work takes so long that small models gain by cuts."""
    (tmp_path / "slow.yaml").write_text(SLOW)
    return read_machine(tmp_path / "slow.yaml")


def result(model: str, predicted: Sequence[float], measured: Sequence[float], null: float = 1.0) -> Result:
    """Three rounds, of which the last took ten times as long for all."""
    plans = ("hand", "auto", "gathered", "whole")
    arms = [Arm(plan, p, [m, m, 10 * m]) for plan, p, m in zip(plans, predicted, measured, strict=True)]
    return Result(model, arms, [null * each for each in arms[0].rounds])


GOOD = result("good", [1.0, 0.9, 2.0, 3.0], [1.1, 1.0, 2.2, 3.3])
BAD = result("bad", [1.0, 0.9, 2.0, 3.0], [4.0, 5.0, 3.0, 2.0], null=1.05)


def test_ratios_are_of_the_same_round() -> None:
    assert GOOD.ratio("auto") == pytest.approx(1 / 1.1)
    assert (GOOD.ratio("null"), BAD.ratio("null")) == (1.0, pytest.approx(1.05))
    assert GOOD.arms[0].measured == 1.1


def test_the_ranks_of_times_count() -> None:
    assert GOOD.correlation == pytest.approx(1.0)
    assert BAD.correlation == pytest.approx(-1.0)
    swapped = result("swapped", [1.0, 0.9, 2.0, 3.0], [1.0, 1.1, 2.0, 3.0])
    assert swapped.correlation == pytest.approx(0.8)
    assert rank_correlation([*GOOD.arms, *swapped.arms]) == pytest.approx(0.889, abs=1e-3)  # with ties


def test_the_summary() -> None:
    """A model at exactly 0.8 is one of those that are as wanted."""
    swapped = result("swapped", [1.0, 0.9, 2.0, 3.0], [1.0, 1.1, 2.0, 3.0])
    said = "\n".join(summary([GOOD, BAD, swapped]))
    assert "within a model at least 0.8: 2 of 3" in said
    assert "auto above 1.03 of the plan by hand: bad, swapped; at worst 1.250" in said
    assert "null control outside of 0.97 to 1.03: bad" in said
    assert "over all 12 programs" in said


def test_worse_plans_are_predicted_to_be_worse(slow: Machine, tmp_path: Path) -> None:
    """And what is written is loaded as any artifact: one of two ranks' programs is there."""
    small = scaled("attention", "llama")
    programs = {name: program for name, (program, _) in small.export().items()}
    plans = plans_of(small.plan())
    seconds = {plan: write(programs, small.calls, plans[plan], 2, slow, tmp_path / plan) for plan in plans}
    assert seconds["auto"] <= seconds["hand"] < seconds["gathered"] < seconds["whole"]
    assert (tmp_path / "auto" / "rank_1.pt2").exists()


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)  # type: ignore[no-any-return]


def test_a_step_of_several_programs_is_all_of_its_calls(slow: Machine, tmp_path: Path) -> None:
    model = Two()
    exported = {
        name: torch.export.export(model, (x,))
        for name, x in {"prefill": torch.zeros(64, 8), "decode": torch.zeros(2, 8)}.items()
    }

    def seconds(**calls: int) -> float:
        return write(exported, calls, {"up": "colwise"}, 2, slow, tmp_path / str(calls))

    once, more = seconds(prefill=1, decode=1), seconds(prefill=1, decode=17)
    decode = (more - once) / 16
    assert 0 < decode < once / 2
    assert seconds(prefill=2, decode=1) == pytest.approx(2 * once - decode)
