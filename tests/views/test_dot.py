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
from tests.views.artifacts import LAYERS, Mixed, Mlp, Tower, ids, saved
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


@pytest.mark.slow
def test_edges_go_around_layout_ops_and_waits(tmp_path: Path) -> None:
    plan: dict[str, object] = {"up": "colwise", "down": "rowwise"}
    source = artifact_dot(saved(tmp_path / "mlp", Mlp(), torch.zeros(4, 8), plan)).source
    assert re.findall(r"^\s*(.*) -> (\S+|\".*\") \[", source, re.MULTILINE) == [
        ("x", "linear"),
        ("linear", "relu"),
        ("relu", "linear_1"),
        ("linear_1", "all_reduce"),
        ("x", "add"),
        ("all_reduce", "add"),
        ("add", '"output 0"'),
    ]


@pytest.mark.slow
def test_a_collective_says_what_it_carries(tower: Path) -> None:
    source = artifact_dot(tower).source
    assert shown(source, "all_reduce") == [
        "all_reduce",
        "P(sum) &rarr; R",
        "384 B over tp, 384 B on the wire",
    ]
    assert "all_reduce_1" not in source
    assert "per call: 3 all_reduce, 1.15 kB on the wire" in source


def test_an_op_lists_its_parameters(tower: Path) -> None:
    assert shown(artifact_dot(tower).source, "linear") == [
        "up",
        "linear",
        "S(2) f32[2, 6, 8]",
        "weight S(0) f32[16, 8]",
        "bias S(0) f32[16]",
    ]


def test_equal_layers_share_a_frame(tower: Path) -> None:
    frames = re.findall(r"label=<<TABLE.*?<B>(.*?)</B>(.*?)> labeljust", artifact_dot(tower).source)
    assert [(title, re.sub(r"<[^>]*>", "", each)) for title, each in frames] == [
        ("layers.* x 3", "each: 1 all_reduce, 384 B on the wire")
    ]


@pytest.mark.slow
def test_only_fallbacks_are_dashed(mixed: Path) -> None:
    source = artifact_dot(mixed).source
    assert shown(source, "all_gather_into_tensor") == [
        "all_gather",
        "S(0) &rarr; R",
        "256 B over tp, 128 B on the wire",
        "fallback: sort: it needs the dim of 64 whole",
    ]
    assert shown(source, "all_gather_into_tensor_1") == [
        "all_gather",
        "S(1) &rarr; R",
        "256 B over tp, 128 B on the wire",
        'plan-demanded: the plan ("out":',
        '"colwise_gather_output")',
    ]
    dashed = [line for line in source.splitlines() if "filled,dashed" in line]
    assert len(dashed) == 1


def test_colours_are_explained(mixed: Path) -> None:
    head = artifact_dot(mixed).source.splitlines()[1]
    assert re.findall(r'BGCOLOR="(.*?)".*?<FONT.*?>(.*?)</FONT>', head) == [
        ("#eceff1", "R whole"),
        ("#cfe3fb", "S(0) cut"),
        ("#d3efd6", "S(1) cut"),
        ("#b3123f", "collective"),
        ("#ffffff", "fallback"),
    ]


def test_the_same_files_make_the_same_text(tower: Path) -> None:
    assert artifact_dot(tower).source == artifact_dot(tower).source
    assert artifact_dot(tower).source == artifact_dot(tower, rank=1).source.replace("rank 1", "rank 0")
    assert artifact_dot(tower).source.isascii()


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
