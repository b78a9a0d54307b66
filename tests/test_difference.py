"""`tpcompiler diff`: what differs between artifacts of one model, in numbers that are the artifacts' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import tpcompiler
from tests.runtime.commands import call
from tests.runtime.models import PLAN, export_mlp

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
