"""Pages of measurements name their date and versions, and their subject is what the tools would measure today."""

from __future__ import annotations

import re

import pytest

from tools.hf_models import ROWS
from tools.measured import DOCS, PAGES, faults, front_line, read, stamp

pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="an installed wheel has no docs beside the tests")
QUOTES = {"long-context.md", "search.md"}  # pages that quote one figure, with its date
GENERATED = {"ops.md"}  # with its line, by `make docs`


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", PAGES)
def test_the_subject_of_a_page_is_what_was_measured(page: str) -> None:
    text = front_line(page) if page in GENERATED else (DOCS / page).read_text(encoding="utf-8")
    found = faults(page, text, read().get(page, {}))
    assert not found, "\n".join(
        [
            *found,
            "Measure what changed by the page's command, or `python -m tools.PART` where a part is a tool; where a person "
            f"wrote the page, correct it, and run `python -m tools.measured {page} PART`.",
        ]
    )


def test_every_page_with_a_date_is_recorded() -> None:
    dated = {
        path.name for path in DOCS.glob("*.md") if re.search(r"\b20\d\d-\d\d-\d\d\b", path.read_text(encoding="utf-8"))
    }
    assert dated | GENERATED == PAGES.keys() | QUOTES


@pytest.mark.slow
def test_a_config_that_is_built_changes_no_row() -> None:
    """transformers fills in what a nested field leaves out."""
    pytest.importorskip("transformers")
    before = {name: stamp(subject) for name, subject in PAGES["architectures.md"].parts().items()}
    next(row for row in ROWS if row.model_type == "qwen2_vl").config()
    assert {name: stamp(subject) for name, subject in PAGES["architectures.md"].parts().items()} == before
