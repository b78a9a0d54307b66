"""`tpcompiler diff`: what differs between artifacts of one model, in numbers that are the artifacts' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from msgspec.structs import astuple
from torch import nn

import tpcompiler
from tests.runtime.commands import call, refused, right
from tests.runtime.models import PLAN, export_mlp
from tpcompiler.errors import ArtifactError

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("difference")
    plans = {"out": PLAN, "gathered": {"layers.*.up": "colwise_gather_output"}, "whole": {}}
    for name, plan in plans.items():
        tpcompiler.parallelize(export_mlp(), 2, plan).save(path / name)
    tpcompiler.parallelize(export_mlp(seed=5), 2, PLAN).save(path / "trained", layout="shared")
    tpcompiler.parallelize(export_mlp(), 4, PLAN).save(path / "four")
    return path


@pytest.mark.slow
def test_equal_artifacts(folder: Path) -> None:
    said = "equal: the same mesh, placements, collectives and bytes (weights are not compared)\n"
    assert right("diff", folder / "out", folder / "trained") == said
    assert json.loads(right("diff", folder / "out", folder / "out", "--json"))["equal"]


@pytest.mark.slow
def test_layers_that_differ_alike_are_folded(folder: Path) -> None:
    result = call("diff", folder / "out", folder / "whole")
    assert (result.exit_code, result.stderr) == (1, "")
    assert_expected_inline(
        result.stdout,
        """\
in all
                                  first    second
mesh                              tp=2     tp=2
device                            cpu      cpu
held by the rank that holds most  1.3 kB   2.38 kB
sent by a rank in a call          192 B    0 B
us of the collectives on ideal    0.000    0.000
one call on ideal                 1.41 ns  1.53 ns

placements that differ
name                  kind       first   second
layers.*.up.weight    parameter  S(0)    R       x 2
layers.*.up.bias      parameter  S(0)    R       x 2
layers.*.down.weight  parameter  S(1)    R       x 2
layers.*.down.bias    parameter  P(sum)  R       x 2

collectives that differ, in each module
module         kind        why        count   wire bytes
layers.*.down  all_reduce  inherent  1 -> 0  96 B -> 0 B  x 2

""",
    )


def test_what_is_gathered_besides(folder: Path) -> None:
    found = tpcompiler.open(folder / "whole").diff(tpcompiler.open(folder / "gathered"))
    assert {(each.name[9:], each.first, each.second) for each in found.placements} == {
        ("up.weight", "R", "S(0)"),
        ("up.bias", "R", "S(0)"),
    }
    assert [astuple(each) for each in found.collectives] == [
        (f"layers.{layer}.up", "all_gather", "plan-demanded", (0, 0), (1, 3 * 16 * 4 // 2)) for layer in range(2)
    ]
    first, second = found.wire_bytes
    assert second - first == 2 * 3 * 16 * 4 // 2
    assert found.sent_seconds[1] - found.sent_seconds[0] == pytest.approx((second - first) / 450e9)


@pytest.mark.slow
def test_another_number_of_ranks(folder: Path) -> None:
    found = tpcompiler.open(folder / "out").diff(tpcompiler.open(folder / "four"))
    assert not found.equal
    assert (found.placements, found.meshes) == ([], ({"tp": 2}, {"tp": 4}))
    for held, ranks in zip(found.held_bytes, (2, 4), strict=True):
        program = tpcompiler.parallelize(export_mlp(), ranks, PLAN)
        assert held == program.parameter_bytes()[1]


def test_the_page_beside_the_tables(folder: Path, tmp_path: Path) -> None:
    page, plain = tmp_path / "page.html", call("diff", folder / "out", folder / "whole")
    result = call("diff", folder / "out", folder / "whole", "--html", page)
    assert (result.exit_code, result.stdout, result.stderr) == (1, plain.stdout, f"wrote {page}\n")
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert data["difference"]["totals"][3] == ["sent by a rank in a call", "192 B", "0 B"]
    assert '"differs":true' in page.read_text()
    assert call("diff", folder / "out", folder / "out", "--html", page).exit_code == 0
    assert '"differs":true' not in page.read_text()


def test_no_page_of_two_models(folder: Path, tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    tpcompiler.parallelize(program, 2, {}).save(tmp_path / "other")
    assert "two models" in refused("diff", folder / "out", tmp_path / "other", "--html", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
def test_two_models(tmp_path: Path) -> None:
    """Of other weights, and of the same weights and other ops."""
    for name, layer in {"relu": nn.ReLU(), "gelu": nn.GELU(), "wide": nn.Linear(4, 4)}.items():
        program = torch.export.export(nn.Sequential(nn.Linear(4, 4), layer), (torch.randn(2, 4),))
        tpcompiler.parallelize(program, 2, {}).save(tmp_path / name)
    with pytest.raises(ArtifactError, match=r"two models: call 'relu' is relu in .*relu and none in .*gelu"):
        tpcompiler.open(tmp_path / "relu").diff(tpcompiler.open(tmp_path / "gelu"))
    with pytest.raises(ArtifactError, match=r"two models: parameter '1.weight' is none in .*relu and f32\[4, 4\] in "):
        tpcompiler.open(tmp_path / "relu").diff(tpcompiler.open(tmp_path / "wide"))
