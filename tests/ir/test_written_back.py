"""What is read of a buffer is of before the program writes it, whatever else it is written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.errors import ArtifactError
from tpcompiler.ir.written_back import find_overwritten, memory_of

PLAN = {"up": "colwise", "down": "rowwise"}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """`then` writes the buffers and says what else is returned."""

    def __init__(self, then: Callable[[Net, torch.Tensor], object]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("now", torch.zeros(4, 16))
        self.register_buffer("before", torch.zeros(4, 16))
        self.register_buffer("square", torch.arange(16.0).view(4, 4))
        self.then = then

    def forward(self, x: torch.Tensor) -> tuple[object, ...]:
        h = self.up(x) + self.before
        return self.down(h), self.then(self, h)


def history(self: Net, h: torch.Tensor) -> None:
    self.before.copy_(self.now)
    self.now.copy_(h)


def last_row(self: Net, h: torch.Tensor) -> None:
    self.before[0].copy_(self.now[-1])
    self.now.copy_(h)


def swapped(self: Net, h: torch.Tensor) -> None:
    now = self.now.clone()
    self.now.copy_(self.before + h)
    self.before.copy_(now)


def turned(self: Net, h: torch.Tensor) -> None:
    self.square.copy_(self.square.t().clone())
    history(self, h)


def old_value(self: Net, h: torch.Tensor) -> torch.Tensor:
    old = self.now.clone()
    self.now.add_(h)
    return old


CASES = [history, last_row, swapped, turned, old_value]


@pytest.mark.parametrize("then", CASES)
@pytest.mark.parametrize("cut", [{}, {"now": "S(1)", "before": "S(1)"}])
def test_calls_in_a_row(then: Callable[[Net, torch.Tensor], object], cut: dict[str, str], tmp_path: Path) -> None:
    """In torch's own modules of the rank programs, against the model itself."""
    model = randomise(Net(then))
    exported = export(copy.deepcopy(model), (X,))
    made = tpcompiler.parallelize(exported, 2, {**PLAN, **cut})
    assert made.verify((X,), then=[(X + 1,), (X * 2,)]).ok
    made.save(tmp_path / "out")
    assert tpcompiler.check(tmp_path / "out", exported).ok
    single = tpcompiler.parallelize(exported, 1, {}).rank_program(0).module()
    for step in range(3):
        want, got = model(X + step), single(X + step)
        torch.testing.assert_close(got, want)
    for name in ("now", "before", "square"):
        torch.testing.assert_close(single.get_buffer(name), model.get_buffer(name))


def test_torchs_functional_form_is_wrong() -> None:
    """There is something to do: else this can go."""
    model = Net(history)
    functional = copy.deepcopy(export(model, (X,)).run_decompositions({}))
    assert [name for *_, name in find_overwritten(functional)] == ["now"]
    alone = functional.module()
    for step in range(3):
        model(X + step), alone(X + step)
    assert not torch.allclose(alone.before, model.before)


def test_a_rank_that_returns_what_it_writes(tmp_path: Path) -> None:
    """As if somebody had taken the clone out of the files."""
    exported = export(randomise(Net(old_value)), (X,))
    made = tpcompiler.parallelize(exported, 2, PLAN)
    right = made.rank_program

    def wrong(rank: int) -> torch.export.ExportedProgram:
        program = right(rank)
        output = program.graph.output_node()
        (clone,) = (node for node in output.args[0] if "clone" in str(node.target))
        (buffer,) = clone.args
        clone.replace_all_uses_with(buffer)
        program.graph.erase_node(clone)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == clone.name:
                spec.arg.name = buffer.name
        program.graph_module.recompile()
        return program

    assert made.verify((X,), then=[(X,)]).ok
    made.rank_program = wrong  # type: ignore[method-assign]
    assert not made.verify((X,), then=[(X,)]).ok
    with pytest.raises((ArtifactError, tpcompiler.InternalError), match="lies in the memory of 'now'"):
        made.save(tmp_path / "out")


def test_the_memory_of_a_view() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.t()[1:].split(2)[0].reshape(-1), x.t() + 1, x

    graph = export(Views(), (X,)).run_decompositions({}).graph
    first, second, third = graph.output_node().args[0]  # type: ignore[misc]
    (x,) = graph.find_nodes(op="placeholder")
    assert memory_of(third) is x
    assert memory_of(second) is second
    assert memory_of(first).name in ("x", "clone", "reshape", "view")
