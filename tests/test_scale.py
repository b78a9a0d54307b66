"""docs/scale.md is what `python -m tools.scale` wrote of its models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.long import some
from tests.runtime.commands import call
from tools.measured import front_line
from tools.scale import DEGREES, HEAD, MEMORY, MODELS, PAGE, count_bytes
from tpcompiler.runtime.artifact import read_manifest
from tpcompiler.runtime.records import TensorRecord

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")


def read_rows() -> list[list[str]]:
    head = HEAD.format(line=front_line(PAGE.name))
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(head)
    return [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", text[len(head) : text.index(MEMORY)], re.MULTILINE)]


def test_the_page_has_every_model_and_degree() -> None:
    """If not: python -m tools.scale"""
    rows = read_rows()
    found = [(row[0], int(row[2])) for row in rows]
    assert found == [pair for name in MODELS for degree in DEGREES if (pair := (name, degree)) in found]
    assert {name for name, _ in found} == MODELS.keys()
    assert all(float(row[6].removesuffix(" GiB")) < 4 for row in rows)


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_what_the_page_says(name: str, tmp_path: Path) -> None:
    """How these models are cut today, from one layer of each. If not: python -m tools.scale NAME"""
    layers = MODELS[name]["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps({**MODELS[name], "num_hidden_layers": 1}))
    assert call("export", tmp_path, "-o", tmp_path / "model.pt2").exit_code == 0
    for degree in some(DEGREES, 3):
        plan = ["--tp", degree, "--plan", tmp_path / "config.json"]
        assert call("convert", tmp_path / "model.pt2", *plan, "-o", tmp_path / f"{degree}").exit_code == 0
        manifest = read_manifest(tmp_path / f"{degree}")
        parts: dict[bool, list[TensorRecord]] = {False: [], True: []}
        for tensor in manifest.tensors:
            parts[".layers." in tensor.name].append(tensor)
        (rest, rest_share), (layer, layer_share) = (count_bytes(rows, manifest.mesh) for rows in parts.values())
        whole, share = rest + layers * layer, rest_share + layers * layer_share
        (row,) = [cells for cells in read_rows() if cells[0] == name and cells[2] == str(degree)]
        assert (row[1], row[-1]) == (f"{whole / 2e9:.0f}B", f"{share / 1e9:.1f} GB")
