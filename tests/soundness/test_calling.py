"""How programs are called is in the manifest, and damage to it in all files alike is noticed without the original."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.runtime.poisons import entries_of
from tests.soundness.test_files_changed import put
from tests.soundness.test_order import GRAPH
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import rank_file


class Look(nn.Module):
    """Ranks that differ in an argument alone, dynamic sizes of which the export has found something."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.down = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.down(self.table(ids))
        return {"rows": rows.reshape(ids.shape[0] // 4, 4, -1), "first": shift[: ids.shape[0]]}


@pytest.fixture(scope="module")
def made() -> tpcompiler.ParallelProgram:
    example = (torch.zeros(8, 3, dtype=torch.int64), torch.randn(9))
    exported = export(Look(), example, dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO}))
    return tpcompiler.parallelize(exported, 2, {"table": "rowwise"})


def assert_more(program: ExportedProgram) -> None:
    program._guards_code = [*program._guards_code, "L['shift'].size()[0] != 77"]


def assert_nothing(program: ExportedProgram) -> None:
    program._guards_code = []


def narrow(program: ExportedProgram) -> None:
    for symbol, known in program.range_constraints.items():
        program.range_constraints[symbol] = type(known)(known.lower, 70)


def rename(program: ExportedProgram) -> None:
    signature: Any = program.module_call_graph[0].signature
    signature.forward_arg_names = list(reversed(signature.forward_arg_names))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [assert_more, assert_nothing, narrow, rename])
def test_damage_that_is_written_out(made: tpcompiler.ParallelProgram, damage: Any, tmp_path: Path) -> None:
    made.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok
    program = torch.export.load(tmp_path / "out" / rank_file(0))
    damage(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, tmp_path / "damaged.pt2")
    put(tmp_path / "out", None, GRAPH, entries_of(tmp_path / "damaged.pt2")[GRAPH])
    if damage is rename:  # nor would torch's Python read it in one way only
        with pytest.raises(ArtifactError, match="the argument 'shift' has the name that torch gives to another one"):
            tpcompiler.open(tmp_path / "out").check()
    else:
        assert not tpcompiler.open(tmp_path / "out").check().ok


def test_what_the_manifest_says(made: tpcompiler.ParallelProgram) -> None:
    calling = made.manifest().calling
    assert calling.returns == "TreeSpec(dict, ['rows', 'first'], [*, *])"
    assert calling.names == ["ids", "shift"]
    assert list(calling.ranges.values()) == [[2, None]] * 3
    assert "L['ids'].size()[0] <= L['shift'].size()[0]" in calling.asserted
