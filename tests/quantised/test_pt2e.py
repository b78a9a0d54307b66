"""Models that torchao's PT2E flow has quantised: int8 buffers around layers whose own weights are left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.quantised.layers import Mlp
from tests.zoo.case import randomise
from tpcompiler.frontend.plain_weights import drop_replaced

pt2e: Any = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e", reason="torchao is not there")
x86: Any = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")

X = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))


def quantised(is_dynamic: bool) -> ExportedProgram:
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic))
    prepared = pt2e.prepare_pt2e(export(randomise(Mlp()), (X,)).module(), quantizer)
    prepared(X)
    made = export(pt2e.convert_pt2e(prepared), (X,))
    if torch.__version__ < (2, 13) and "quantize" not in str(made.graph):
        pytest.skip("this torchao, which is for newer versions of torch, leaves everything as it was")
    return made


@pytest.mark.sample(1)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_a_pair_is_cut(is_dynamic: bool, mesh: Any, tmp_path: Path) -> None:
    """Dynamic, the range of the activations that are cut is one small collective: of the least and the greatest."""
    exported = quantised(is_dynamic)
    program = tpcompiler.parallelize(exported, mesh, {"up": "colwise", "down": "rowwise"})
    sent = [("all_reduce", 8)] * is_dynamic + [("all_reduce", 2048)]
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == sent
    program.save(tmp_path / "out")  # and checks the files
    assert tpcompiler.open(tmp_path / "out").verify((X,), original=exported).ok


def test_weights_that_nothing_uses_any_more_are_left_out() -> None:
    exported = quantised(False)
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise", "down": "rowwise"})
    assert {"up.weight", "down.weight"} == exported.state_dict.keys() - program.only.original().state_dict.keys()
    assert "weights that no op uses any more, left out:\n  up.weight: 131 kB" in program.report()
    assert torch.equal(program.only.original().module()(X), exported.module()(X))


def test_what_is_not_used_for_another_reason_stays() -> None:
    class Net(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(8, 8)

    exported = export(Net(), (X,))
    assert drop_replaced(exported) == (exported, ())
    program = tpcompiler.parallelize(exported, 2, {"up": "colwise", "down": "rowwise"})
    assert "unused.weight" in program.rank_program(0).state_dict
