"""The saved files in real processes: what every rank gets equals the single device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.launch import torchrun
from tests.models.zoo import CASES
from tpcompiler.runtime.inputs import write_tensors
from tpcompiler.verify.compare import FLOOR, SPREAD, run_single
from tpcompiler.verify.simulate import flatten_inputs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("world", "names"), [(2, ["llama", "minilm"]), (4, ["llama"])])
def test_saved_files_run_on_gloo(world: int, names: list[str], tmp_path: Path) -> None:
    expected, limit = {}, {}
    for name in names:
        exported = CASES[name].export(True)
        program = tpcompiler.parallelize(exported, world, CASES[name].plan)
        program.save(tmp_path / name)
        inputs = CASES[name].inputs(3, 9)
        write_tensors(tmp_path / f"{name}.safetensors", inputs)
        functional, flat = exported.run_decompositions({}), flatten_inputs(exported, (), inputs)
        expected[name] = run_single(functional, flat).outputs[0]
        exact = run_single(functional, flat, torch.float64).outputs[0]
        noise = float((expected[name].double() - exact).abs().max() / exact.abs().max())
        limit[name] = max(SPREAD * noise, FLOOR * torch.finfo(torch.float32).eps)
    done = torchrun(world, Path(__file__).parent / "worker.py", tmp_path, *names)
    assert done.returncode == 0, done.stdout
    for name in names:
        for rank in range(world):
            (got,) = torch.load(tmp_path / f"{name}.{rank}.out")
            error = (got - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= limit[name], f"{name} on rank {rank}: {error}"
