"""bfloat16 and float16 in two real processes on gloo, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tpcompiler
from tests.half import PLAN, export_decoder, token_ids
from tests.launch import run_ranks
from tpcompiler import cli
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.runtime.inputs import write_tensors


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_processes_answer_as_the_simulation(dtype: torch.dtype, tmp_path: Path) -> None:
    """gloo sums halves as the simulator does, but for a rounding; without the sums the answer is off by 0.3 or more."""
    program = tpcompiler.parallelize(export_decoder(dtype, dynamic=True), 2, PLAN)
    program.save(tmp_path / "out")
    ids = token_ids(3, 9)
    write_tensors(tmp_path / "in", {"ids": ids})
    words = ("--inputs", tmp_path / "in", "--outputs", tmp_path / "answer")
    run_ranks(2, Path(cli.__file__).with_name("__main__.py"), "run", tmp_path / "out", *words)
    (answer,) = load_file(tmp_path / "answer").values()
    (expected,) = simulate([program.rank_program(rank) for rank in range(2)], [[ids], [ids]])[0].outputs
    assert answer.dtype is dtype
    error = (answer.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= 4 * torch.finfo(dtype).eps
