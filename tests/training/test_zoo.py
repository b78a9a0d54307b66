"""A dozen models of the zoo: files, gloo processes, `loss.backward()`, and three steps of AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.launch import run_ranks
from tests.training.zoo_steps import train
from tests.zoo.index import CASES
from tests.zoo.training import WithLoss
from tpcompiler.ir.shares import cut, row_sharding

# Models that compute in float32 within, such as gemma2 and mamba2, leave differences of its rounding.
NAMES = "llama", "gpt2", "bert", "vit", "t5", "qwen3", "gptj", "opt", "falcon_rw", "resnet", "whisper", "cohere"
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.slow
@pytest.mark.sweep(7)
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_from_files(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    inputs = {key: converted(value, dtype) for key, value in case.inputs(*case.example).items()}
    model = WithLoss(case.build().to(dtype).eval())
    plan = {f"model.{pattern}": style for pattern, style in case.asked().items()}
    program = tpcompiler.parallelize(tpcompiler.export_training(model, kwargs=inputs), 2, plan)
    program.save(tmp_path / "out")
    torch.save(inputs, tmp_path / "inputs")
    run_ranks(2, Path(__file__).parent / "zoo_worker.py", tmp_path)
    before = {each: value.detach().clone() for each, value in model.named_parameters()}
    losses = train(model, inputs)
    whole = dict(model.named_parameters())
    assert losses[0] > losses[-1]
    assert sum(not torch.equal(whole[each], value) for each, value in before.items()) > len(before) / 2
    rows = [row for row in program.manifest().tensors if row.name in whole]
    assert {row.name for row in rows} == whole.keys()
    for rank in range(2):
        own_losses, shares = torch.load(tmp_path / f"{rank}.made")
        torch.testing.assert_close(own_losses, losses, rtol=WITHIN[dtype], atol=WITHIN[dtype])
        wanted = {
            row.name: cut(whole[row.name].detach(), row_sharding(row, program.mesh), program.mesh, rank) for row in rows
        }
        torch.testing.assert_close(shares, wanted, rtol=WITHIN[dtype], atol=WITHIN[dtype])


def converted(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
