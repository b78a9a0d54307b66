"""docs/accuracy.md is what `python -m tools.bench_published` predicts of its rows."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tools.bench_published import HEAD, PAGE, ROW, cells_of, name_row, read_rows
from tools.measured import LINE

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
AGAIN = "If not: python -m tools.bench_published --write"
FIRST = {row.machine: row for row in reversed(read_rows())}  # a row of each machine


@cache
def lines() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    line = LINE.search(text)
    assert line is not None
    head = HEAD.format(line=line[0])
    assert text.startswith(head), AGAIN
    return [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text[len(head) :], re.MULTILINE)]


def test_the_page_has_every_row() -> None:
    """Also those that miss."""
    rows = [cells[1:8] for cells in lines() if len(cells) == len(ROW) and cells[1] not in (ROW[1], "---")]
    assert rows == [[*name_row(row), f"{row.measured * 1e3:.2f}"] for row in read_rows()]


@pytest.mark.slow
@pytest.mark.sweep(4)
@pytest.mark.parametrize("machine", FIRST)
def test_a_row_is_what_is_predicted_today(machine: str) -> None:
    row = FIRST[machine]
    exported = row.predict(None) if row.is_in_transformers else None
    cells = list(cells_of(row, row.by_megatron(), exported))
    assert cells in lines(), AGAIN


@pytest.mark.slow
def test_how_good_the_predictions_are() -> None:
    """Of all rows, decodes in bfloat16 with CUDA graphs, and prefills. Nothing is fitted to them."""
    found = {
        cells[0]: cells for cells in lines() if cells[0] in ("all", "gpt-fast, bfloat16", "prefill of 2,048, A100")
    }
    _, rows, median, _, near, _, gain, *_, correlation = found["all"]
    assert (rows, float(correlation) >= 0.95) == ("93", True)
    assert int(near) >= 60
    assert 0.8 <= float(median) <= 1.1
    assert 0.9 <= float(gain) <= 1.15
    _, rows, _, near, *_ = found["gpt-fast, bfloat16"]
    assert (rows, int(near) >= 14, int(found["gpt-fast, bfloat16"][7]) >= 10) == ("16", True, True)
    assert found["prefill of 2,048, A100"][1:4:2] == ["3", "3"]
