"""The whole text of small artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.views.artifacts import LAYERS, Mixed, Mlp, Tower, ids, saved
from tests.views.opened import artifact_text
from tpcompiler.errors import ArtifactError


@pytest.mark.slow
def test_mlp(tmp_path: Path) -> None:
    directory = saved(tmp_path / "mlp", Mlp(), torch.zeros(4, 8), {"up": "colwise", "down": "rowwise"})
    assert (
        artifact_text(directory, rank=1)
        == """\
mesh tp=2, rank 1 of 2
parameters: 576 B of 1.12 kB
per call: 1 all_reduce; 128 B on the wire

R             input  x  f32[4, 8]
S(1)          up  linear  f32[4, 8]  weight S(0) f32[16, 8], bias S(0) f32[16]
S(1)          relu  f32[4, 8]
P(sum)        down  linear  f32[4, 8]  weight S(1) f32[8, 16], bias P(sum) f32[8]
P(sum) -> R   down  all_reduce  f32[4, 8]  128 B over tp, 128 B on the wire
R             add  f32[4, 8]
R             output  output  f32[4, 8]
"""
    )


@pytest.mark.slow
def test_layers_that_differ_are_told_apart(tmp_path: Path) -> None:
    plan = {"layers.2.up": "colwise", "layers.2.down": "rowwise"}
    lines = artifact_text(saved(tmp_path / "tower", Tower(), ids(), plan)).splitlines()
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "layers.0-1 x 2  each: no collectives; 0 B on the wire",
        "layers.2",
    ]
    assert [line.split() for line in lines if " up " in line] == [
        ["R", "up", "linear", "f32[2,", "6,", "16]", "weight", "R", "f32[16,", "8],", "bias", "R", "f32[16]"],
        ["S(2)", "up", "linear", "f32[2,", "6,", "8]", "weight", "S(0)", "f32[16,", "8],", "bias", "S(0)", "f32[16]"],
    ]
    assert [line.split()[2:5] for line in lines if "states" in line] == [
        ["states.0,", "states.1", "f32[2,"],
        ["states.2", "f32[2,", "6,"],
    ]


@pytest.mark.slow
def test_a_layer_between_keeps_its_neighbours_apart(tmp_path: Path) -> None:
    plan = {f"layers.{n}.{name}": style for n in (0, 2) for name, style in (("up", "colwise"), ("down", "rowwise"))}
    text = artifact_text(saved(tmp_path / "tower", Tower(), ids(), plan))
    titles = [line.strip() for line in text.splitlines() if line.startswith(" ")]
    assert titles == ["layers.0", "layers.1", "layers.2"]


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


def test_an_input_that_is_cut(tmp_path: Path) -> None:
    directory = saved(tmp_path / "tower", Tower(), ids(), LAYERS, inputs=["S(0)"], outputs={"logits": "S(0)"})
    assert (
        artifact_text(directory)
        == """\
mesh tp=2, rank 0 of 2
parameters: 2.37 kB of 4 kB
per call: 4 all_gather, 3 reduce_scatter; 1.2 kB on the wire

S(0)          input  ids  i64[1, 6]
S(0) -> R     embed  all_gather  i64[2, 6]  96 B over tp, 48 B on the wire  plan-demanded: embedding: gathered here because gathering the result would cost more (needed for: the plan ("layers.*.up": "colwise") and 2 more)
R             embed  embedding  f32[2, 6, 8]  weight R f32[10, 8]
              layers.* x 3  each: 1 reduce_scatter, 1 all_gather; 384 B on the wire
S(2)            up  linear  f32[2, 6, 8]  weight S(0) f32[16, 8], bias S(0) f32[16]
S(2)            relu  f32[2, 6, 8]
P(sum)          down  linear  f32[2, 6, 8]  weight S(1) f32[8, 16], bias P(sum) f32[8]
P(sum) -> S(0)  down  reduce_scatter  f32[1, 6, 8]  384 B over tp, 192 B on the wire
S(0)            add  f32[1, 6, 8]
S(0) -> R       all_gather  f32[2, 6, 8]  384 B over tp, 192 B on the wire  \
plan-demanded: n is cut by tp, asked by the plan ("layers.*.up": "colwise")
S(0)          head  linear  f32[1, 6, 10]  weight R f32[10, 8]
S(0)          output  logits  f32[1, 6, 10]
R             output  states.0, states.1, states.2  f32[2, 6, 8]
"""
    )


def test_refuses_a_manifest_that_does_not_know_the_collectives(tmp_path: Path) -> None:
    directory = saved(tmp_path / "mlp", Mlp(), torch.zeros(4, 8), {"up": "colwise", "down": "rowwise"})
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "collectives": []}))
    with pytest.raises(ArtifactError, match="the program calls 1 collectives, the manifest records 0"):
        artifact_text(directory)
