"""The dot text of small artifacts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.views.artifacts import LAYERS, Mixed, Mlp, Tower, ids, saved
from tpcompiler.views.dot import artifact_dot

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
    return [re.sub("(&#160;)+", " ", re.sub(r"<[^>]*>", "", row)) for row in rows]


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


def test_a_collective_says_what_it_carries(tower: Path) -> None:
    source = artifact_dot(tower).source
    assert shown(source, "all_reduce") == ["all_reduce P(sum) &rarr; R", "384 B over tp, 384 B on the wire"]
    assert "all_reduce_1" not in source
    assert "per call: 3 all_reduce, 1.12 KiB on the wire" in source


def test_an_op_lists_its_parameters(tower: Path) -> None:
    assert shown(artifact_dot(tower).source, "linear") == [
        "up linear",
        "S(2) f32[2, 6, 8]",
        "weight S(0) f32[16, 8]",
        "bias S(0) f32[16]",
    ]


def test_equal_layers_share_a_frame(tower: Path) -> None:
    frames = re.findall(r"label=<<B>(.*?)</B>(.*?)> labeljust", artifact_dot(tower).source)
    assert [(title, re.sub(r"<[^>]*>|&#160;", "", each)) for title, each in frames] == [
        ("layers.* x 3", "each: 1 all_reduce, 384 B on the wire")
    ]


def test_only_fallbacks_are_dashed(mixed: Path) -> None:
    source = artifact_dot(mixed).source
    assert shown(source, "all_gather_into_tensor") == [
        "all_gather S(2) &rarr; R",
        "256 B over tp, 128 B on the wire",
        "fallback: softmax: it needs the dim of 4",
        "whole",
    ]
    assert shown(source, "all_gather_into_tensor_1") == [
        "all_gather S(1) &rarr; R",
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


@pytest.mark.skipif(shutil.which("dot") is None, reason="the program `dot` (Graphviz) is not installed")
@pytest.mark.parametrize("artifact", ["tower", "mixed"])
def test_renders(artifact: str, request: pytest.FixtureRequest) -> None:
    drawn = artifact_dot(request.getfixturevalue(artifact)).pipe(format="svg", encoding="utf-8", quiet=False)
    assert "polygon" in drawn
