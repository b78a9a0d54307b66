"""The saved files in real processes: what every rank gets equals the single device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.compared import single_device
from tests.launch import run_ranks
from tests.long import in_long_runs, some
from tests.zoo.index import CASES
from tests.zoo.measure import exported
from tpcompiler.runtime.inputs import write_tensors


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "names"), [(2, some(["resnet", "llama", "whisper"], 3)), pytest.param(4, ["dlrm"], marks=in_long_runs)]
)
def test_saved_files_run_on_gloo(world: int, names: list[str], tmp_path: Path) -> None:
    for name in names:
        case = CASES[name]
        tpcompiler.parallelize(exported(case, True), world, case.asked()).save(tmp_path / name)
        write_tensors(tmp_path / f"{name}.safetensors", case.inputs(*case.others[0]))
    run_ranks(world, Path(__file__).parent / "worker.py", tmp_path, *names)
    for name in names:
        expected, allowed = single_device(exported(CASES[name], True), CASES[name].inputs(*CASES[name].others[0]))
        for rank in range(world):
            results = torch.load(tmp_path / f"{name}.{rank}.out")
            for got, want, limit in zip(results, expected, allowed, strict=True):
                error = (got - want).abs().max() / want.abs().max()
                assert error <= limit, f"{name} on rank {rank}: {error}"
