"""Budgets: what a program may send and hold, at conversion, of an artifact and from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.runtime.commands import call, refused, right
from tests.runtime.models import PLAN, PLAN_TEXT, export_mlp
from tpcompiler import ParallelProgram
from tpcompiler.cost.amounts import read_bytes
from tpcompiler.errors import BudgetError

GATHERED = {**PLAN, "head": "colwise_gather_output"}
SENT, HELD = 2 * 96 + 24, 2 * (8 * 8 + 8 + 8 * 8 + 8) * 4 + (2 * 8 + 2) * 4  # bytes of a rank


@pytest.fixture(scope="module")
def program() -> ParallelProgram:
    made = tpcompiler.parallelize(export_mlp(), 2, GATHERED)
    assert [c.module for c in made.collectives()] == ["layers.0.down", "layers.1.down", "head"]
    return made


@pytest.mark.parametrize(
    ("amount", "count"),
    [
        *((1000, 1000), ("7", 7), ("1kB", 1000), ("2 MB", 2_000_000), ("24GB", 24_000_000_000)),
        *(("3KiB", 3_072), ("1.5MiB", 1_572_864), ("22.5GiB", 24_159_191_040)),
    ],
)
def test_amounts(amount: int | str, count: int) -> None:
    assert read_bytes(amount) == count


@pytest.mark.parametrize(
    "limits",
    [
        ["1 all_reduce/layer", "2 all_reduce", "1 all_gather", "0 all_gather/layer", "0 all_to_all"],
        ["3 collectives", "0 fallbacks"],
        [f"{SENT} sent", f"{HELD} held"],
        [f"{HELD / 1000}kB held"],
        ["24GB held"],
    ],
)
def test_within(program: ParallelProgram, limits: Sequence[str]) -> None:
    program.check_budget(limits)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            ["0 all_reduce/layer"],
            "layers.0 and 1 more like it: 1 all_reduce, 1 more than 0 all_reduce/layer ('all_reduce' in layers.0.down)",
        ),
        (
            ["1 collectives"],
            "3 collectives, 2 more than 1 collectives ('all_reduce' in layers.0.down, 'all_reduce_1' in layers.1.down, "
            "'all_gather_into_tensor' in head)",
        ),
        (
            [f"{SENT - 1} sent"],
            f"each rank sends {SENT} B, 1 B more than {SENT - 1} B ('all_reduce' in layers.0.down, 'all_reduce_1' in "
            "layers.1.down, 'all_gather_into_tensor' in head)",
        ),
        (
            ["1kB held"],
            f"rank 0 holds {HELD / 1000:.3g} kB of parameters, buffers and constants, {HELD - 1000} B more than 1 kB",
        ),
    ],
)
def test_over(program: ParallelProgram, limits: Sequence[str], said: str) -> None:
    with pytest.raises(BudgetError) as raised:
        program.check_budget(limits)
    assert raised.value.message == f"the program is over its budget: {said}"


def test_all_that_is_over_is_said_at_once(program: ParallelProgram) -> None:
    with pytest.raises(BudgetError, match=r"3 collectives, 1 more .*; each rank sends \d+ B, .*; rank 0 holds"):
        program.check_budget(["2 collectives", "1 all_gather", "0 sent", "0 held"])


def test_the_command_line(tmp_path: Path) -> None:
    """Nothing is written of a conversion that is over; what is right is written, and can be checked."""
    model, plan, out = tmp_path / "model.pt2", tmp_path / "plan.yaml", tmp_path / "out"
    torch.export.save(export_mlp(), model)
    plan.write_text(PLAN_TEXT)
    words = ["convert", model, "--tp", 2, "--plan", plan, "-o", out]
    over = refused(*words, "--budget", "0 fallbacks", "--budget", "1 all_reduce")
    assert f"{model} is over its budget: 2 all_reduce, 1 more than 1 all_reduce" in over
    assert refused(*words, "--budget", "1kB held", "--dry-run").startswith(f"{model} is over its budget: rank 0 holds")
    assert not out.exists()
    right(*words, "--budget", "1 all_reduce/layer", "--budget", "192 sent", "--budget", "1.5kB held")
    assert "sound" in right("check", out, "--budget", "1 all_reduce/layer")
    assert call("check", out, "--budget", "191 B sent").exit_code == 2


def test_a_file_of_limits(program: ParallelProgram, tmp_path: Path) -> None:
    """The same as the limits one by one, and together with others."""
    limits = tmp_path / "budget.yaml"
    limits.write_text(f"- 2 all_reduce\n- 0 fallbacks\n- {SENT} sent\n- {HELD / 1000}kB held\n")
    program.check_budget([str(limits)])
    limits.write_text(f"- 1 all_reduce\n- {SENT - 1} sent\n- 1kB held\n")
    with pytest.raises(
        BudgetError, match=r"2 all_reduce, 1 more .*; each rank sends .*; rank 0 holds .*; 3 collectives"
    ):
        program.check_budget([str(limits), "2 collectives"])
