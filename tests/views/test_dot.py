"""The dot text of small artifacts."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import graphviz
import pytest
import torch

from tests.needs import needs
from tests.views.artifacts import LAYERS, Mixed, Tower, ids, saved
from tests.views.opened import artifact_dot

MIXED: dict[str, object] = {"up": "colwise", "out": "colwise_gather_output"}


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tower") / "artifact", Tower(), ids(), LAYERS)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("mixed") / "artifact", Mixed(), torch.zeros(4, 8), MIXED)


def shown(source: str, name: str) -> list[str]:
    """The lines of text in the box of an item."""
    (label,) = re.findall(rf'^\s*"?{re.escape(name)}"? \[label=<(.*?)>  ?[a-z]+=', source, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"<TR>(.*?)</TR>", label)
    return [re.sub(r"<[^>]*>", "", row) for row in rows]


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Where each text of a picture stands (left, top, right, bottom), in a font with letters as wide as DejaVu's."""
    found = {}
    for number, text in enumerate(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")):
        words, size, x, y = text.text or "", *(float(text.get(name, 0)) for name in ("font-size", "x", "y"))
        width = len(words.rstrip()) * size * (0.7 if text.get("font-weight") == "bold" else 0.6)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
        found[f"{number}: {words}"] = left, y - 0.8 * size, left + width, y + 0.2 * size
    return found


@pytest.mark.sample(3)
@needs("dot")
@pytest.mark.parametrize("artifact", ["tower", "mixed"])
@pytest.mark.parametrize("font", ["Helvetica", "Arial"])
def test_texts_do_not_touch(artifact: str, font: str, request: pytest.FixtureRequest) -> None:
    """Also where Graphviz has placed them for narrower letters than the reader has."""
    dot = artifact_dot(request.getfixturevalue(artifact))
    source = graphviz.Source(dot.source.replace("fontname=Helvetica", f"fontname={font}"))
    placed = boxes(source.pipe(format="svg", encoding="utf-8", quiet=False))
    assert len(placed) > 30
    touching = [
        (one, other)
        for (one, a), (other, b) in combinations(placed.items(), 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]
    assert touching == []
