"""The table of methods in docs/long-context.md says what the code does now, and `auto` takes the least."""

from __future__ import annotations

import pytest

from tools import attention_table
from tools.attention_table import MESHES, Cost, conversion_of, costs, row_text
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.solver.task import Aim


@pytest.mark.sample(1)
@pytest.mark.skipif(not attention_table.PAGE.exists(), reason="an installed wheel has no docs beside the tests")
@pytest.mark.parametrize(("thousands", "heads"), [(8, 8), (128, 64)])
def test_the_page_is_fresh(thousands: int, heads: int) -> None:
    """If not: python -m tools.attention_table"""
    text = row_text(thousands, heads, "4")
    assert "**" in text
    assert text in attention_table.PAGE.read_text(encoding="utf-8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("thousands", "heads", "ranks", "best"),
    [(8, 64, "8", "all_to_all"), (8, 8, "16", "both"), (128, 8, "2 x 8", "both"), (32, 64, "2 x 8", "all_to_all")],
)
def test_auto_takes_the_least(thousands: int, heads: int, ranks: str, best: str) -> None:
    """Without turns, which take longer than a gather in every row of the page, and long to write for 16 ranks."""
    name, mesh = MESHES[ranks]
    machine, own = read_machine(name), conversion_of(thousands, heads, mesh)
    methods = dict(pair for pair, _ in zip(costs(own, heads, machine), range(3 if best == "both" else 2), strict=False))
    auto = Cost.of(find_placements([own], Aim(machine)), machine)
    assert min(methods, key=lambda method: methods[method].seconds) == best
    assert auto == methods[best]


def test_bytes_by_hand() -> None:
    """Of 8,192 steps, 16 heads and 128 features in bfloat16, each of 8 ranks has a share of 4,194,304 bytes."""
    share = 8192 * 16 * 128 * 2 // 8
    found = costs(conversion_of(8, 16, {"cp": 8}), 16, read_machine("h100"))
    assert [cost.wire_bytes for _, cost in zip(range(2), (cost for _, cost in found), strict=False)] == [
        2 * 7 * share,
        4 * 7 * share // 8,
    ]
