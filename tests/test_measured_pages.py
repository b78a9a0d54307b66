"""Pages of measurements name their date and versions, and their subject is what the tools would measure today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import measured
from tools.hf_models import ROWS
from tools.measured import DOCS, PAGES, Measured, faults, front_line, read, record, stamp

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="an installed wheel has no docs beside the tests")
QUOTES = {"long-context.md", "search.md"}  # pages that quote one figure, with its date


@pytest.mark.parametrize("page", PAGES)
def test_the_subject_of_a_page_is_what_was_measured(page: str) -> None:
    """If not: measure what changed by the command in the page's line, and where a person wrote the page, correct it and
    run `python -m tools.measured PAGE PART`."""
    assert faults(page, (DOCS / page).read_text(encoding="utf-8"), read().get(page, {})) == []


def test_every_page_with_a_date_is_recorded() -> None:
    dated = {
        path.name for path in DOCS.glob("*.md") if re.search(r"\b20\d\d-\d\d-\d\d\b", path.read_text(encoding="utf-8"))
    }
    assert dated == PAGES.keys() | QUOTES


def test_a_page_is_stale_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "__version__", "0.1.0")
    monkeypatch.setitem(PAGES, "scale.md", measured.Page("measure", lambda: {"a": [1], "b": [2], "new": None}))
    rows = {
        "a": Measured(stamp([1]), "2026-01-02", "0.1.7", "2.9.1"),
        "b": Measured(stamp([3]), "2026-01-01", "0.0.9", "2.13.0"),
        "gone": Measured(stamp(None), "2026-01-01", "0.1.0", "2.13.0"),
    }
    line = "Measured on 2026-01-01 to 2026-01-02 with tpcompiler 0.0.9 to 0.1.7 and torch 2.9.1 to 2.13.0: `measure`."
    assert front_line("scale.md", rows) == line
    assert faults("scale.md", line, rows) == [
        "new: never measured",
        "gone: is no longer measured",
        "b: changed since 2026-01-01",
        "b: measured with tpcompiler 0.0.9",
    ]
    assert faults("scale.md", "", {"a": rows["a"], "b": rows["a"], "new": rows["gone"]})[-1].startswith(
        "lacks the line"
    )


def test_a_part_is_recorded_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their dates, those that are gone go, and the page has the new line."""
    monkeypatch.setattr(measured, "DOCS", tmp_path)
    monkeypatch.setattr(measured, "RECORD", tmp_path / "measured.json")
    monkeypatch.setitem(PAGES, "scale.md", measured.Page("measure", lambda: {"a": 1, "b": 2}))
    page = tmp_path / "scale.md"
    page.write_text("# Title\n\nMeasured on 2026-01-01 with nothing: `nothing`.\n\nText\n")
    (tmp_path / "measured.json").write_text(
        '{"scale.md": {"a": ["x", "2026-01-01", "0.1.0", "2.9.1"], "gone": ["", "", "", ""]}}'
    )
    record("scale.md", ["b"], "2.13.0+cpu")
    rows = read()["scale.md"]
    assert list(rows) == ["a", "b"]
    assert rows["a"] == Measured("x", "2026-01-01", "0.1.0", "2.9.1")
    assert (rows["b"].subject, rows["b"].torch) == (stamp(2), "2.13.0")
    assert page.read_text() == f"# Title\n\n{front_line('scale.md')}\n\nText\n"
    assert faults("scale.md", page.read_text(), rows) == ["a: changed since 2026-01-01"]


def test_a_config_that_is_built_changes_no_row() -> None:
    """transformers fills in what a nested field leaves out."""
    pytest.importorskip("transformers")
    before = {name: stamp(subject) for name, subject in PAGES["architectures.md"].parts().items()}
    next(row for row in ROWS if row.model_type == "qwen2_vl").config()
    assert {name: stamp(subject) for name, subject in PAGES["architectures.md"].parts().items()} == before
