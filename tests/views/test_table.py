"""The whole text of small artifacts, their dot text, and both of a program with gradients."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import graphviz
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import tpcompiler
from tests.needs import needs
from tests.views.artifacts import LAYERS, Mixed, Mlp, Tower, ids, randomised, saved
from tests.views.opened import artifact_dot, artifact_text
from tpcompiler.errors import ArtifactError


def test_one_layer_called_again_is_told_once(tmp_path: Path) -> None:
    lines = artifact_text(saved(tmp_path / "tower", Tower(shared=True), ids(), LAYERS)).splitlines()
    assert lines[1] == "parameters: 1.22 kB of 1.76 kB"
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "layers.0, called 3 times  each: 1 all_reduce; 384 B on the wire"
    ]
    assert sum("all_reduce" in line for line in lines) == 3  # of the call, of the layer, and once in it


def test_what_the_plan_asked_for_and_what_it_did_not(tmp_path: Path) -> None:
    plan: dict[str, object] = {"up": "colwise", "out": "colwise_gather_output"}
    assert (
        artifact_text(saved(tmp_path / "mixed", Mixed(), torch.zeros(4, 8), plan))
        == """\
mesh tp=2, rank 0 of 2
parameters: 608 B of 1.18 kB
per call: 2 all_gather; 256 B on the wire

R             input  x  f32[4, 8]
R             7 small ops (sum, add, abs, sqrt, mean, mul)  f32[4, 8]  seen R f32[8]  writes seen
S(1)          up  linear  f32[4, 8]  weight S(0) f32[16, 8], bias S(0) f32[16]
S(0) -> R     all_gather  f32[64]  256 B over tp, 128 B on the wire  fallback: sort: it needs the dim of 64 whole
R             sort  f32[64], i64[64]
R             amax  f32[4, 4]
S(1)          out  linear  f32[4, 8]  weight S(0) f32[16, 8], bias S(0) f32[16]
S(1) -> R     out  all_gather  f32[4, 16]  256 B over tp, 128 B on the wire  \
plan-demanded: the plan ("out": "colwise_gather_output")
R             output  0  f32[4, 4]
R             output  1  f32[4, 16]
"""
    )


def test_refuses_a_manifest_that_does_not_know_the_collectives(tmp_path: Path) -> None:
    directory = saved(tmp_path / "mlp", Mlp(), torch.zeros(4, 8), {"up": "colwise", "down": "rowwise"})
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "collectives": []}))
    with pytest.raises(ArtifactError, match="the program calls 1 collectives, the manifest records 0"):
        artifact_text(directory)


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


def test_equal_layers_share_a_frame(tmp_path: Path) -> None:
    source = artifact_dot(saved(tmp_path / "tower", Tower(), ids(), LAYERS)).source
    frames = re.findall(r"label=<<TABLE.*?<B>(.*?)</B>(.*?)> labeljust", source)
    assert [(title, re.sub(r"<[^>]*>", "", each)) for title, each in frames] == [
        ("layers.* x 3", "each: 1 all_reduce, 384 B on the wire")
    ]
    assert shown(source, "linear")[2:] == ["S(2) f32[2, 6, 8]", "weight S(0) f32[16, 8]", "bias S(0) f32[16]"]


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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "out"
    program = tpcompiler.export_training(randomised(Net()), (torch.randn(4, 8),))
    tpcompiler.parallelize(program, 2, LAYERS).save(path)
    return path


def test_the_table(out: Path) -> None:
    """The layers of the backward run from the last to the first, whose inputs need no gradient."""
    text = artifact_text(out)
    assert_expected_inline(
        text.partition("\n\n")[2].partition("R             output")[0],
        """\
R             input  x  f32[4, 8]
              layers.* x 4  each: 1 all_reduce; 128 B on the wire
S(1)            up  addmm  f32[4, 8]  bias S(0) f32[16], weight S(0) f32[16, 8]
S(1)            relu  f32[4, 8]
P(sum)          down  addmm  f32[4, 8]  bias R f32[8], weight S(1) f32[8, 16]
P(sum) -> R     down  all_reduce  f32[4, 8]  128 B over tp, 128 B on the wire
R               add  f32[4, 8]
R             pow, mean  f32[]
              backward
R               5 small ops (full, div, pow, mul)  f32[4, 8]
                layers.3-1 x 3  each: 1 all_reduce; 128 B on the wire
S(1)              down  mm  f32[4, 8]  weight S(1) f32[8, 16]
S(1)              down  mm  f32[8, 8]
R                 down  sum  f32[1, 8]
S(1)              threshold_backward  f32[4, 8]
P(sum)            up  mm  f32[4, 8]  weight S(0) f32[16, 8]
P(sum) -> R       up  all_reduce  f32[4, 8]  128 B over tp, 128 B on the wire
S(0)              up  mm  f32[8, 8]
S(1)              up  sum  f32[1, 8]
R                 add  f32[4, 8]
                layers.0
S(1)              down  mm  f32[4, 8]  weight S(1) f32[8, 16]
S(1)              down  mm  f32[8, 8]
R                 down  sum  f32[1, 8]
S(1)              threshold_backward  f32[4, 8]
S(0)              up  mm  f32[8, 8]
S(1)              up  sum  f32[1, 8]
""",
    )


def test_frames(out: Path) -> None:
    frames = re.findall(r"label=.*?<B>(.*?)</B>.*> labeljust", artifact_dot(out).source)
    assert frames == ["layers.* x 4", "backward", "layers.3-1 x 3", "layers.0"]


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
