"""Writes into buffers become writes in place, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import export

from tpcompiler.runtime.in_place import write_in_place

AT, ROW = torch.tensor([1]), torch.arange(3.0).reshape(1, 3)
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], object]


class Cached(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("same", torch.zeros(4, 3))
        self.step = step

    def forward(self, at: torch.Tensor, row: torch.Tensor) -> object:
        return self.step(self, at, row)


def put(module: nn.Module, at: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    cache: torch.Tensor = module.cache  # type: ignore[assignment]
    return cache.index_copy_(0, at, row)


def read_before(module: nn.Module, at: torch.Tensor, row: torch.Tensor) -> object:
    old = module.cache * 2  # type: ignore[operator]
    return put(module, at, row).sum() + old.sum()


def tied(module: nn.Module, at: torch.Tensor, row: torch.Tensor) -> object:
    return put(module, at, row).sum() + module.same.sum()  # type: ignore[operator]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("step", "in_place"),
    [
        (lambda m, at, row: put(m, at, row).sum(0), True),
        (lambda m, at, row: put(m, at, row).t() @ torch.ones(4, 2), True),
        (lambda m, at, row: m.cache.index_put_((at,), row).relu(), True),
        (lambda m, at, row: put(m, at, row), False),
        (lambda m, at, row: put(m, at, row).reshape(12), False),
        (lambda m, at, row: put(m, at, row).t()[1:], False),
        (read_before, False),
        (tied, False),
    ],
)
def test_the_same_answers_and_buffers(step: Step, in_place: bool) -> None:
    program = export(Cached(step), (AT, ROW)).run_decompositions({})
    wanted, found = program.module(), program.module()
    before = {name: value.clone() for name, value in found.named_buffers()}
    for module in (wanted, found):  # `module()` shares the program's buffers: each starts from its own
        for name in before:
            setattr(module, name, before[name].clone())
    if step is tied:
        for module in (wanted, found):
            module.same = module.cache
    write_in_place(found)
    assert ("index_copy_." in found.code or "index_put_." in found.code) is in_place
    assert ("copy_.default" in found.code.replace("index_copy_.default", "")) is not in_place
    given = []
    for at in (1, 3, 1):
        for module in (wanted, found):
            given.append(module(torch.tensor([at]), ROW + at))
        assert torch.equal(given[-2], given[-1])
        assert all(torch.equal(getattr(wanted, name), getattr(found, name)) for name in before)
    assert torch.equal(given[0], given[1]), "an answer changed afterwards"


@pytest.mark.parametrize(
    "step",
    [
        lambda cache, at: cache.index_copy(0, at, cache),
        lambda cache, at: cache.index_put((at,), cache),
        lambda cache, at: cache.scatter(0, at[:, None].expand(4, 4), cache),
        lambda cache, at: cache.index_put((cache[:, 0].clone(),), cache.flip(0)),
        lambda cache, at: cache.index_put((cache, cache), cache),
    ],
)
def test_a_buffer_that_is_written_from_itself(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Beams change places: the rows that are written are the buffer's own."""

    class Reordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.tensor([[2, 1, 3, 0], [0, 3, 1, 2], [3, 2, 0, 1], [1, 0, 2, 3]]))

        def forward(self, at: torch.Tensor) -> torch.Tensor:
            self.cache.copy_(step(self.cache, at))
            return self.cache.sum(1)

    model, order = Reordered(), torch.tensor([2, 0, 3, 1])
    module = write_in_place(export(Reordered(), (order,)).run_decompositions({}).module())
    for at in (order, order.flip(0)):
        assert torch.equal(module(at), model(at))
        assert torch.equal(module.cache, model.cache)
