"""Calls of stages on gloo processes: every dtype, and inputs that ranks compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from torch.utils._pytree import tree_leaves

import tpcompiler
from tests.launch import fork_ranks
from tests.passes.stages import Call
from tests.zoo.case import randomise

DTYPES = [
    *(torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.bfloat16, torch.complex64),
]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
SCRIPT = """
import json, sys, torch, tpcompiler, torch.distributed as dist
folder, x, texts = sys.argv[1], torch.load(sys.argv[1] + "/x"), []
for name in ("dtypes", "layers"):
    module = tpcompiler.load(f"{folder}/{name}", check_inputs=True)
    torch.save(module(x), f"{folder}/{name}.{dist.get_rank()}")
module = tpcompiler.load(f"{folder}/layers", check_inputs=True)
try:
    module(x + dist.get_rank())
except tpcompiler.LaunchError as error:
    print(json.dumps(str(error)))
dist.destroy_process_group()
"""


def in_all_dtypes(self: Any, x: torch.Tensor) -> Any:
    h = self.up(x).tanh()
    crosses = (h * 9).to(torch.int16)
    y = self.down(h + crosses)
    return y, [(y * 9).abs().to(each) for each in DTYPES], [(h * 9).abs().to(each) for each in DTYPES], crosses


@pytest.mark.slow
def test_every_dtype_and_inputs_that_differ(tmp_path: Path) -> None:
    """The second stage of the layers takes no input of the program, only what the first stage sends."""
    torch.save(X, tmp_path / "x")
    models = {}
    for name, function in {"dtypes": in_all_dtypes, "layers": lambda self, x: self.down(self.up(x).relu())}.items():
        models[name] = randomise(Call(function, up=nn.Linear(8, 12), down=nn.Linear(12, 8)))
        tpcompiler.parallelize(export(models[name], (X,)), {"pp": 2, "tp": 1}, {}).save(tmp_path / name)
    *_, last = tpcompiler.open(tmp_path / "layers").values()
    assert "x" not in [row.name for row in last.manifest().inputs]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = fork_ranks(2, script, tmp_path, timeout=90)
    assert ended.codes == (0, 0), ended.printed
    for rank, printed in enumerate(ended.printed):
        for name, model in models.items():
            results, wanted = tree_leaves(torch.load(tmp_path / f"{name}.{rank}")), tree_leaves(model(X))
            assert [each.dtype for each in results] == [each.dtype for each in wanted]
            for own, want in zip(results, wanted, strict=True):
                torch.testing.assert_close(own.to(torch.complex128), want.to(torch.complex128), rtol=1e-5, atol=1e-5)
        refusal = json.loads(printed.splitlines()[-1])
        assert "input 'x' is torch.float32 [4, 8] of content" in refusal
        assert "give all ranks the same" in refusal
