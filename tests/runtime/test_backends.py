"""What gloo cannot send is said at the start, and not by a collective in the middle of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tpcompiler
from tests.launch import fork_ranks
from tpcompiler.checkpoint.load import refuse_unsendable
from tpcompiler.errors import UnsupportedError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
LOAD = """
import tpcompiler
try:
    tpcompiler.load("out")
except tpcompiler.TpCompilerError as error:
    print(type(error).__name__, error.message)
"""


class Net(nn.Module):
    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.end = nn.Linear(8, 16), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.up(x))


def converted(end: Callable[[torch.Tensor], torch.Tensor]) -> tpcompiler.ParallelProgram:
    return tpcompiler.parallelize(torch.export.export(Net(end), (X,)), 2, {"up": "colwise"})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda h: (h * 5).to(torch.int16), "sends int16, for which gloo has no all_gather_into_tensor"),
        (lambda h: (h * 9).to(torch.int16).sum(-1, dtype=torch.int16), "sends int16, .* no all_reduce by sum"),
        (lambda h: torch.polar(h.abs(), h).prod(-1), "sends complex64, for which gloo has no all_reduce by product"),
        (lambda h: h.to(torch.float8_e4m3fn), "sends float8_e4m3fn, for which gloo has no all_gather"),
        (lambda h: torch.polar(h.abs(), h).sum(-1), ""),
        (lambda h: (h * 5).to(torch.int32), ""),
    ],
)
def test_dtypes_that_gloo_has_not(end: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    made = converted(end)
    assert made.verify((X,)).ok
    refuse_unsendable(made.rank_program(0), "nccl")
    if not said:
        refuse_unsendable(made.rank_program(0), "gloo")
        return
    with pytest.raises(UnsupportedError, match=said):
        refuse_unsendable(made.rank_program(0), "gloo")


@pytest.mark.slow
def test_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(lambda h: (h * 5).to(torch.int16)).save(tmp_path / "out")
    (tmp_path / "serve.py").write_text(LOAD)
    monkeypatch.chdir(tmp_path)
    ended = fork_ranks(2, tmp_path / "serve.py", together=False)
    assert ended.codes == (0, 0)
    assert all("sends int16, for which gloo has no all_gather_into_tensor" in text for text in ended.printed)
