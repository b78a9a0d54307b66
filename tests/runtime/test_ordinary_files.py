"""Files of ordinary programs are read without trust, whatever their sizes are computed of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, export

import tpcompiler
from tpcompiler.runtime.model_file import read_model

randn, auto = torch.randn, Dim.AUTO


def windows(x: Tensor) -> Tensor:
    """As Swin cuts an image into windows of 7, padded where they do not divide it."""
    batch, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % 7, 0, -height % 7))
    x = x.view(batch, x.shape[1] // 7, 7, x.shape[2] // 7, 7, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, channels)


def boxes(*levels: Tensor) -> Tensor:
    """As a detector joins the boxes of all levels."""
    return torch.cat([x.permute(0, 2, 3, 1).reshape(-1, 4) for x in levels])


def evens(x: Tensor) -> Tensor:
    for _ in range(3):
        x = F.pad(x, (0, 0, 0, x.shape[0] % 2)).reshape(-1, 2, 3).sum(1)
    return x


def twice_resized(x: Tensor) -> Tensor:
    x = F.interpolate(x, scale_factor=0.7, mode="bilinear", recompute_scale_factor=True)
    return F.interpolate(x, scale_factor=1.6, mode="bicubic", recompute_scale_factor=True)


def longest(*parts: Tensor) -> Tensor:
    length = max(part.shape[0] for part in parts)
    return torch.stack([F.pad(part, (0, 0, 0, length - part.shape[0])) for part in parts])


def rotary(x: Tensor) -> Tensor:
    """Whose base grows with the length."""
    base = 10_000.0 * (2.0 * x.shape[0] / 4 - 1.0) ** (8 / 6)
    return x * base ** -torch.arange(4.0)


def squared(scale: Tensor, x: Tensor) -> Tensor:
    return x * scale.item() ** 2


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "boxes": (boxes, tuple(randn(2, 4, n, n + 1) for n in (5, 4, 3)), (({0: auto, 2: auto, 3: auto},) * 3,)),
    "windows": (windows, (randn(2, 15, 18, 4),), ({0: auto, 1: auto, 2: auto},)),
    "unshuffled": (
        lambda x: F.pixel_unshuffle(x, 2),
        (randn(2, 3, 8, 6),),
        ({0: auto, 2: 2 * Dim("h", max=64), 3: 2 * Dim("w", max=64)},),
    ),
    "flat": (
        lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
        (randn(2, 3, 4, 5), randn(3, 4, 5, 6)),
        (dict.fromkeys(range(4), auto),) * 2,
    ),
    "evens": (evens, (randn(21, 3),), ({0: auto},)),
    "resized": (twice_resized, (randn(2, 3, 20, 30),), ({0: auto, 2: auto, 3: auto},)),
    "longest": (longest, tuple(randn(n + 3, 2) for n in range(10)), (({0: auto},) * 10,)),
    "from start to end": (lambda x, start, end: x[start:end] * 2, (randn(9, 3), 2, 7), ({0: auto}, auto, auto)),
    "product of numbers": (lambda x, n, m: x.sum() + torch.ones(n * m), (randn(3), 4, 5), (None, auto, auto)),
    "squared number": (lambda x, n: x * n**2 + torch.ones(n**2).sum(), (randn(3), 4), (None, auto)),
    "numbers in a list": (
        lambda x, sizes: x.sum() + torch.ones(sizes[0] * sizes[1] - sizes[2]),
        (randn(3), [4, 5, 6]),
        (None, [auto, auto, auto]),
    ),
    "numbers in a dict": (
        lambda x, size: x.sum() + torch.ones(size["height"] * size["width"]),
        (randn(3), {"height": 4, "width": 5}),
        (None, {"height": auto, "width": auto}),
    ),
    "a number beside a text": (
        lambda x, n, mode: x.sum() * torch.ones(n * 2 - 3) if mode == "fast" else x,
        (randn(3), 4, "fast"),
        (None, auto, None),
    ),
    "a float that is read": (squared, (torch.tensor(2.0), randn(3)), (None, {0: auto})),
    "rotary": (rotary, (randn(6, 4),), ({0: auto},)),
    "decay": (lambda x: x * (1 - 0.9 ** x.shape[0]) + 2 ** x.shape[0], (randn(6, 4),), ({0: auto},)),
    "a key that is None": (lambda given: given[None] + given["a"], ({None: randn(3), "a": randn(3)},), None),
}


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_read(name: str, tmp_path: Path) -> None:
    function, args, sizes = PROGRAMS[name]
    module = nn.Module()
    module.forward = function  # type: ignore[method-assign]
    torch.export.save(export(module, args, dynamic_shapes=sizes), tmp_path / "model.pt2")
    program = read_model(tmp_path / "model.pt2")
    torch.testing.assert_close(program.module()(*args), function(*args))


class Counting(nn.Module):
    """Counts its inputs in a block without gradients, which returns nothing."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        with torch.no_grad():
            self.count.add_(x.sum(0))
        return result


@pytest.mark.slow
def test_block_that_returns_nothing(tmp_path: Path) -> None:
    program = export(Counting(), (x := randn(2, 3),))
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(Exception, match="missing val field"):
        torch.export.load(tmp_path / "model.pt2")
    made = tpcompiler.parallelize(read_model(tmp_path / "model.pt2"), 2, {"layer": "colwise"})
    made.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").verify((x,), then=[(x,)]).ok
