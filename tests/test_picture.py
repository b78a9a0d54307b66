"""The committed picture is the one that the code draws now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.readme_picture import dot_text, stamp

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.slow
@pytest.mark.skipif(not DOCS.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_readmes_picture_is_fresh() -> None:
    committed = (DOCS / "minilm.dot").read_text(encoding="utf-8")
    assert committed == dot_text(), "run python tools/readme_picture.py"
    svg = (DOCS / "minilm.svg").read_text(encoding="utf-8")
    assert svg.endswith(stamp(committed)), "run python tools/readme_picture.py"
    assert len(re.findall(r"<title>[^<]*</title>", svg)) > 20
