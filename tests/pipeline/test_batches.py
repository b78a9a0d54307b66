"""Micro-batches: the same as one call with all samples, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.launch import fork_ranks, run_ranks
from tests.passes.stages import Call
from tests.zoo.case import randomise
from tpcompiler.parallel.batches import find_batches
from tpcompiler.passes.canonicalize import canonicalize

LAYERS: dict[str, Callable[[], Any]] = {
    "up": lambda: nn.Linear(8, 12),
    "down": lambda: nn.Linear(12, 8),
    "table": lambda: torch.randn(4, 8),
}
X, TOKENS = torch.randn(4, 8), torch.randn(4, 6, 8)
WRITER = Path(__file__).parent / "worker.py"


def model(function: Callable[..., Any]) -> nn.Module:
    return randomise(Call(function, **{name: make() for name, make in LAYERS.items()}))


def mlp(self: Any, x: torch.Tensor) -> Any:
    return self.down(self.up(x).relu())


def total(self: Any, x: torch.Tensor) -> Any:
    self.table.add_(x.sum(0))
    return mlp(self, x) + self.table[0]


BATCH, LENGTH, MEMORY = (Dim(name, min=2, max=64) for name in ("batch", "length", "memory"))
KEPT: dict[str, tuple[Any, ...]] = {  # function, example, dynamic dims, inputs and outputs of the batch
    "layers": (mlp, (X,), ({0: BATCH},), ["x"], ["output"]),
    "mask": (lambda self, x, m: mlp(self, m @ x), (TOKENS, torch.randn(6, 6)), None, ["x"], ["output"]),
    "positions": (
        lambda self, x, p: mlp(self, x + p[:, None]),
        (TOKENS, torch.randn(6)),
        ({0: BATCH, 1: LENGTH}, {0: LENGTH}),
        ["x"],
        ["output"],
    ),
    "memory": (
        lambda self, x, m: mlp(self, (x @ m.T).softmax(-1) @ m),
        (X, torch.randn(6, 8)),
        ({0: BATCH}, {0: MEMORY}),
        ["x"],
        ["output"],
    ),
    "scalar": (lambda self, x, s: mlp(self, x) * s, (X, torch.tensor(2.0)), None, ["x"], ["output"]),
    "two": (lambda self, x, y: mlp(self, x * y), (X, X + 1), None, ["x", "y"], ["output"]),
    "table": (lambda self, x: (mlp(self, x), self.table + 1), (X,), None, ["x"], ["0"]),
    "merged": (lambda self, x: mlp(self, x.reshape(-1, 8)).view(4, 6, 8), (TOKENS,), None, ["x"], ["output"]),
    "one": (
        lambda self, x, m: mlp(self, (m @ x).reshape(-1, 8)).view(1, 6, 8),
        (TOKENS[:1], torch.randn(6, 6)),
        None,
        ["x"],
        ["output"],
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KEPT)
def test_inputs_and_outputs_of_the_batch(name: str) -> None:
    function, example, dynamic, inputs, outputs = KEPT[name]
    program = canonicalize(export(model(function), example, dynamic_shapes=dynamic))
    found = find_batches({"": program})[""]
    assert (found.obstacle, [*found.inputs], [*found.outputs]) == ("", inputs, outputs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize(
    ("function", "obstacle"),
    [
        (lambda self, x: mlp(self, x).sum(), "is computed from all samples"),
        (lambda self, x: mlp(self, x).mean(0), "is computed from all samples"),
        (lambda self, x: mlp(self, x).amax(0, keepdim=True), "is computed from all samples"),
        (lambda self, x: mlp(self, x)[:1], "is computed from all samples"),
        (lambda self, x: mlp(self, x).T, "does not have the batch along dim 0 alone"),
        (lambda self, x: (lambda y: y @ y.T)(mlp(self, x)), "does not have the batch along dim 0 alone"),
        (lambda self, x: torch.cat([mlp(self, x), self.table]), ""),
        (total, "buffer 'table' is computed from all samples"),
    ],
    ids=["sum", "mean", "amax", "slice", "transposed", "gram", "appended", "total"],
)
def test_programs_that_are_not_joined(function: Any, obstacle: str, is_dynamic: bool) -> None:
    program = canonicalize(export(model(function), (X,), dynamic_shapes=({0: BATCH},) if is_dynamic else None))
    found = find_batches({"": program})[""]
    assert found.obstacle
    assert obstacle in found.obstacle
    assert not found.inputs


def both(other: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, x: (mlp(self, x), other(mlp(self, x), x))


ORDER, MADE = "does not have the samples of the batch in their order", "is made with the size of the batch"
NUMBER, ALONG = "is computed with the number of samples", "does not have the batch along dim 0 alone"
DYNAMIC, ONE = ({0: BATCH},), X[:1]
BIAS = torch.arange(64.0).view(64, 1)


@pytest.mark.parametrize(
    ("other", "example", "dynamic", "obstacle"),
    [
        (lambda y, x: torch.arange(x.shape[0]), X, DYNAMIC, ORDER),
        (lambda y, x: torch.cat([y, x], 0), X, DYNAMIC, ORDER),
        (lambda y, x: y.repeat(2, 1), X, DYNAMIC, ORDER),
        (lambda y, x: torch.arange(x.shape[0]), X, None, MADE),
        (lambda y, x: torch.ones(x.shape[0]), X, None, MADE),
        (lambda y, x: y.mean(0, keepdim=True), ONE, None, "is computed from all samples"),
        (lambda y, x: BIAS[:1].expand(x.shape[0], 3), X, None, MADE),
        (lambda y, x: BIAS[: x.shape[0]] * 2, X, None, MADE),
        (lambda y, x: BIAS[: x.shape[0]] * 2, X, DYNAMIC, NUMBER),
        (lambda y, x: y + BIAS[x.shape[0] - 1], X, DYNAMIC, NUMBER),
        (lambda y, x: torch.tensor(1.0) * x.shape[0], X, DYNAMIC, NUMBER),
        (lambda y, x: torch.full((), x.shape[0] * 2.0), X, DYNAMIC, NUMBER),
        (lambda y, x: (y / x.shape[0]).relu(), X, DYNAMIC, NUMBER),
        (lambda y, x: y * x.shape[0] ** 0.5, X, DYNAMIC, NUMBER),
        (lambda y, x: y.roll(x.shape[0] // 2, 1), X, DYNAMIC, NUMBER),
        (lambda y, x: torch.ones(x.shape[0]).cumsum(0), X, DYNAMIC, NUMBER),
        (lambda y, x: y[None], ONE, None, ALONG),
        (lambda y, x: y @ y.T, ONE, None, ALONG),
        (lambda y, x: torch.einsum("ij,kj->ik", y, y), ONE, None, ALONG),
        (lambda y, x: y[None, :, None].squeeze(0).squeeze(1), ONE, None, ""),
        (lambda y, x: BIAS[:1].expand(x.shape[0], 8) + y, X, DYNAMIC, ""),
        (lambda y, x: y.view(x.shape[0], 2, -1).sum(1), X, DYNAMIC, ""),
        (lambda y, x: torch.ones(x.shape[0], 3), X, DYNAMIC, ""),
        (lambda y, x: y.repeat_interleave(2, 0), X, DYNAMIC, ""),
        (lambda y, x: y.view(x.shape[0], 1, -1).transpose(1, 2), X, DYNAMIC, ""),
        (lambda y, x: y[:, :1].mean(1, keepdim=True), ONE, None, ""),
        (lambda y, x: y[:, None].softmax(-1), ONE, None, ""),
    ],
)
def test_outputs_that_have_the_samples_in_their_order(other: Any, example: Any, dynamic: Any, obstacle: str) -> None:
    program = canonicalize(export(model(both(other)), (example,), dynamic_shapes=dynamic))
    found = find_batches({"": program})[""]
    assert obstacle in found.obstacle
    assert bool(obstacle) == bool(found.obstacle), found.obstacle
    assert [*found.outputs] == ([] if obstacle else ["0", "1"])


def test_buffers_that_another_program_writes() -> None:
    """What was written for a batch is a part of the batch also where it is only read."""

    def write(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table.copy_(x)
        return mlp(self, x)

    writer = canonicalize(export(model(write), (X,)))
    reader = canonicalize(export(model(lambda self, x: mlp(self, x + self.table.sum(0))), (X,)))
    other = canonicalize(export(model(lambda self, x: (mlp(self, x), self.table.sum(0))), (X,)))
    found = find_batches({"reader": reader, "other": other, "writer": writer})
    assert not found["writer"].obstacle
    assert not found["reader"].obstacle
    assert "is computed from all samples" in found["other"].obstacle
    assert not find_batches({"other": other})["other"].obstacle


@pytest.mark.slow
def test_calls_are_the_single_devices(tmp_path: Path) -> None:
    """A mask and a table, once; and a mask that was given twice is refused on all ranks, which wait for none."""
    module = model(lambda self, x, mask: (mlp(self, mask @ x), self.table + mask[:4, :1]))
    program = export(module, (TOKENS, torch.randn(6, 6)), dynamic_shapes=({0: BATCH}, None))
    x, mask = torch.randn(8, 6, 8), torch.randn(6, 6)
    tpcompiler.parallelize(program, {"pp": 2, "tp": 1}, {}).save(tmp_path / "out")
    torch.save(([("", (x, mask), {})], {"microbatches": 2}), tmp_path / "out.calls")
    run_ranks(2, WRITER, tmp_path, "out")
    for rank in range(2):
        (made,) = torch.load(tmp_path / f"out.{rank}.made")
        for got, want in zip(made, module(x, mask), strict=True):
            torch.testing.assert_close(got, want)
    script = tmp_path / "twice.py"
    script.write_text(
        "import sys, torch, tpcompiler\n"
        "from tpcompiler.errors import InputsError\n"
        "module = tpcompiler.load(sys.argv[1], microbatches=2)\n"
        "try:\n    module(torch.ones(8, 6, 8), torch.ones(12, 6))\n"
        "except InputsError as error:\n    print('refused:', error)\n"
    )
    ended = fork_ranks(2, script, tmp_path / "out", timeout=60)
    assert all("input 'mask' is torch.float32 [12, 6], the program takes" in printed for printed in ended.printed)


@pytest.mark.slow
def test_micro_batches_of_a_mean_are_refused_at_load(tmp_path: Path) -> None:
    program = export(model(lambda self, x: mlp(self, x).mean(0)), (X,))
    tpcompiler.parallelize(program, {"pp": 2, "tp": 1}, {}).save(tmp_path / "out")
    script = tmp_path / "load.py"
    script.write_text(
        "import sys, tpcompiler\n"
        "from tpcompiler.errors import InputsError\n"
        "try:\n    tpcompiler.load(sys.argv[1], microbatches=2)\n"
        "except InputsError as error:\n    print('refused:', error)\n"
    )
    ended = fork_ranks(2, script, tmp_path / "out", timeout=60)
    assert all("of shape [8] is computed from all samples" in printed for printed in ended.printed)
