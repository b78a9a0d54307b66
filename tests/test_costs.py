"""`tpcompiler cost`: formulas that hold at other sizes, against conversions of those sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.runtime.commands import right
from tests.runtime.models import PLAN, Mlp, randomised
from tpcompiler.runtime.artifact import read_manifest

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

GATHERED = {**PLAN, "head": "colwise"}  # whose output is gathered


class Tokens(nn.Module):
    """The layers of `Mlp` on a sequence, and a second input with a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = randomised(Mlp())

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        return self.mlp(x, torch.zeros(4)), self.mlp.head(other)


DIMS = ({0: Dim("rows"), 1: Dim("steps", min=2, max=64)}, {1: Dim("others", max=32)})


def exported(batch: int, steps: int, others: int, dims: Any = None) -> ExportedProgram:
    return export(Tokens(), (torch.randn(batch, steps, 8), torch.randn(2, others, 8)), dynamic_shapes=dims)


def saved(path: Path, program: ExportedProgram, mesh: Any) -> Path:
    plan = {f"mlp.{name}": style for name, style in GATHERED.items()}
    inputs: Any = {"x": {"dp": "S(0)"}} if isinstance(mesh, dict) else None
    tpcompiler.parallelize(program, mesh, plan, inputs=inputs).save(path)
    return path


MESHES = pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, 2], ids=str)


@pytest.mark.slow
@pytest.mark.sweep(2)
@MESHES
def test_the_formula_holds_at_other_sizes(tmp_path: Path, mesh: Any) -> None:
    """In every layer and kind, where the model is exported for these sizes alone."""
    out = saved(tmp_path / "out", exported(4, 6, 5, DIMS), mesh)
    for batch, steps, others in [(4, 6, 5), (2, 3, 7), (10, 64, 32)]:
        at = {"batch": batch, "sequence": steps, "other.1": others}
        found = tpcompiler.open(out).cost(at)
        alone = saved(tmp_path / f"{batch}", exported(batch, steps, others), mesh)
        static = tpcompiler.open(alone).cost()
        assert static.sizes == []
        assert [(c.layer, c.kind, c.count, c.wire_bytes, c.seconds) for c in found.costs] == [
            (c.layer, c.kind, c.count, c.wire_bytes, c.seconds) for c in static.costs
        ]
        assert found.wire_bytes == sum(row.wire_bytes for row in read_manifest(alone).collectives)
        assert int(static.formula) == found.wire_bytes
        names = {"batch": batch, "sequence": steps}
        assert eval(found.formula.replace("other.1", str(others)), names) == found.wire_bytes


def test_the_table(tmp_path: Path) -> None:
    out = saved(tmp_path / "out", exported(4, 6, 5, DIMS), 2)
    assert_expected_inline(
        right("explain", out, "--at", "batch=8,other.1=20"),
        """\
dynamic sizes
name      input  dim  range     step  value
batch     x      0    0 to any  1     8
sequence  x      1    2 to 64   1     6
other.1   other  1    0 to 32   1     20

collectives of one call of a rank, us on ideal
layer         kind        count  formula                         wire bytes     us
mlp.layers.*  all_reduce      1  32*batch*sequence                  1.54 kB  0.003  x 2
mlp           all_gather      1  8*batch*sequence                     384 B  0.001
mlp.head      all_gather      1  16*other.1                           320 B  0.001
in all                        4  72*batch*sequence + 16*other.1     3.78 kB  0.008

one call with the sizes of the example takes 9.06 ns (weights 2.63 ns, copies 0.325 ns, other 2.41 ns, network 3.7 ns) on ideal
""",
    )
    data = json.loads(right("explain", out, "--json"))
    assert [size["name"] for size in data["sizes"]] == ["batch", "sequence", "other.1"]
    assert data["wire_bytes"] == sum(row["wire_bytes"] for row in data["costs"])
