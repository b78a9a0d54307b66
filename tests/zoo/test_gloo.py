"""The saved files in real processes: what every rank gets equals the single device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpcompiler
from tests.launch import run_ranks
from tests.long import in_long_runs, some
from tests.zoo.case import Case
from tests.zoo.index import CASES
from tests.zoo.measure import exported
from tpcompiler.judge.compare.judge import FLOOR, SPREAD
from tpcompiler.judge.compare.reference import run_single
from tpcompiler.runtime.inputs import flatten_inputs, write_tensors

pytestmark = pytest.mark.slow


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
        expected, allowed = _single(CASES[name])
        for rank in range(world):
            results = torch.load(tmp_path / f"{name}.{rank}.out")
            for got, want, limit in zip(results, expected, allowed, strict=True):
                error = (got - want).abs().max() / want.abs().max()
                assert error <= limit, f"{name} on rank {rank}: {error}"


def _single(case: Case) -> tuple[list[torch.Tensor], list[float]]:
    """What one device gives, and what the judge allows beside each output."""
    program = exported(case, True)
    flat = flatten_inputs(program, (), case.inputs(*case.others[0]))
    expected = [v for v in run_single(program, flat).outputs if isinstance(v, torch.Tensor)]
    exact = [v for v in run_single(program, flat, torch.float64).outputs if isinstance(v, torch.Tensor)]
    noise = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(expected, exact, strict=True)]
    return expected, [max(SPREAD * n, FLOOR * torch.finfo(torch.float32).eps) for n in noise]
