"""What is read of a buffer is of before the program writes it, whatever else it is written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn.functional import dropout
from torch.utils._pytree import tree_flatten

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.errors import ArtifactError, ShardingError
from tpcompiler.frontend.written_back import find_overwritten
from tpcompiler.runtime.in_place import write_in_place

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
        self.register_buffer("narrow", torch.zeros(4, 16, dtype=torch.float16))
        self.kept = nn.Parameter(torch.zeros(4, 16), requires_grad=False)
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


def turned_by_einsum(self: Net, h: torch.Tensor) -> torch.Tensor:
    torch.einsum("ij->ji", h).mul_(0.5)
    return h * 1


def diagonal_of_einsum(self: Net, h: torch.Tensor) -> None:
    torch.einsum("ii->i", self.square).add_(h[0, :4])


def idle_dropout_is_written(self: Net, h: torch.Tensor) -> None:
    dropout(self.now, 0.5, training=False).add_(h)


def idle_dropout_is_read(self: Net, h: torch.Tensor) -> torch.Tensor:
    idle = dropout(self.now, 0.0, training=True)
    self.now.add_(h)
    return idle


def of_the_same_type(self: Net, h: torch.Tensor) -> None:
    self.now.type_as(h).add_(h)
    self.before.sum_to_size(4, 16).mul_(0.5)
    torch.broadcast_tensors(self.now, h)[0].add_(1)


def in_half_precision(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.narrow.copy_(h)
    return self.narrow.float()


def half_of_it(self: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.narrow[:2].copy_(h[:2])
        self.narrow.add_(h)
    return self.narrow.float()


def of_one_row(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.now.copy_(h[:1])
    return self.now * 2


def of_what_is_turned(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.square.copy_(h[:, 3:7].t())
    return self.square.view(2, 8) + self.square[0, 0]


def of_a_parameter(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.kept.mul_(0.9).add_(h)
    return self.kept * 2


def beside_hidden_chunks(self: Net, h: torch.Tensor) -> torch.Tensor:
    first, second = torch.unsafe_chunk(h, 2, 1)
    h.mul_(2.0)
    return first + second


def to_a_hidden_part(self: Net, h: torch.Tensor) -> torch.Tensor:
    first, second = torch.unsafe_split(self.now, 8, 1)
    second.add_(h[:, :8])
    return self.now + first.sum()


def beside_hidden_sizes(self: Net, h: torch.Tensor) -> torch.Tensor:
    first, second = torch.unsafe_split_with_sizes(self.now, [4, 12], 1)
    self.now.copy_(h)
    return second * first.sum()


CASES = [
    *(beside_hidden_chunks, to_a_hidden_part, beside_hidden_sizes),
    *(history, last_row, swapped, turned, old_value),
    *(turned_by_einsum, diagonal_of_einsum, idle_dropout_is_written, idle_dropout_is_read, of_the_same_type),
    *(in_half_precision, half_of_it, of_one_row, of_what_is_turned, of_a_parameter),
]


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("then", CASES)
@pytest.mark.parametrize("cut", [{}, {"now": "S(1)", "before": "S(1)"}])
def test_calls_in_a_row(then: Callable[[Net, torch.Tensor], object], cut: dict[str, str], tmp_path: Path) -> None:
    """In torch's own modules of the rank programs, against the model itself."""
    model = randomise(Net(then))
    exported = export(copy.deepcopy(model), (X,))
    if cut and then is to_a_hidden_part:
        with pytest.raises(
            ShardingError, match=r"cannot shard 'now' .* aten.split.Tensor: it needs the dim of 2 whole"
        ):
            tpcompiler.parallelize(exported, 2, {**PLAN, **cut})
        return
    made = tpcompiler.parallelize(exported, 2, {**PLAN, **cut})
    assert made.verify((X,), then=[(X + 1,), (X * 2,)]).ok
    made.save(tmp_path / "out")  # and checks the files
    single = tpcompiler.parallelize(exported, 1, {}).rank_program(0).module()
    for step in range(3):
        want, got = model(X + step), single(X + step)
        torch.testing.assert_close(got, want)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


@pytest.mark.slow
@pytest.mark.parametrize("then", [history, turned_by_einsum, diagonal_of_einsum])
def test_torchs_functional_form_is_wrong(then: Callable[[Net, torch.Tensor], object]) -> None:
    """There is something to do: else this can go."""
    model = Net(then)
    functional = copy.deepcopy(export(model, (X,)).run_decompositions({}))
    assert [name for *_, name in find_overwritten(functional)] == ["now"] * (then is history)
    alone = functional.module()
    for step in range(3):
        want, got = model(X + step), alone(X + step)
    same = [
        torch.allclose(a, b)
        for a, b in zip((*want, *model.buffers()), (*got, *alone.buffers()), strict=True)
        if a is not None
    ]
    assert not all(same)


def written_and_returned(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.now.copy_(h)
    return h


def the_buffer(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.now.copy_(h)
    return self.now


def one_value_in_two(self: Net, h: torch.Tensor) -> object:
    self.now.add_(h)
    self.before.copy_(self.now)
    return self.before, h


def two_buffers_change_places(self: Net, h: torch.Tensor) -> object:
    now = self.now.clone()
    self.now.copy_(self.before)
    self.before.copy_(now + h)
    return now, self.now, self.before


def a_parameter_and_a_buffer(self: Net, h: torch.Tensor) -> object:
    self.now.copy_(self.kept)
    return h, self.kept


def one_row_and_the_cache(self: Net, h: torch.Tensor) -> object:
    cache = self.now.index_copy(0, torch.tensor([1]), h[:1])
    self.now.copy_(cache)
    return h, cache.contiguous()


KEPT = [
    *(written_and_returned, the_buffer, one_value_in_two, two_buffers_change_places),
    *(a_parameter_and_a_buffer, one_row_and_the_cache),
]


@pytest.mark.parametrize("then", KEPT)
def test_results_that_a_caller_keeps_and_changes(then: Callable[[Net, torch.Tensor], object]) -> None:
    """A result is the buffer only where the model returns the buffer."""
    model = randomise(Net(then))
    exported = export(copy.deepcopy(model), (X,))
    assert tpcompiler.parallelize(exported, 2, PLAN).verify((X,), then=[(X + 1,)]).ok
    single = write_in_place(tpcompiler.parallelize(exported, 1, {}).rank_program(0).module())
    kept = []
    with torch.no_grad():
        for step in range(3):
            kept.append((model(X + step), single(X + step)))
            torch.testing.assert_close(*map(list, zip(*kept, strict=True)))
        for results in kept[-1]:
            for result in tree_flatten(results[1])[0]:
                result.add_(1)
        torch.testing.assert_close(single(X), model(X))
    for name, value in single.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_a_returned_input_that_a_buffer_is_set_to() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_(x)
            return x

    single = tpcompiler.parallelize(export(Net(), (X,)), 1, {}).rank_program(0).module()
    x = X.clone()
    assert single(x).data_ptr() == x.data_ptr()
    assert single.last.data_ptr() != x.data_ptr()


def test_a_rank_that_returns_what_it_writes(tmp_path: Path) -> None:
    """As if somebody had taken the clone out of the files."""
    exported = export(randomise(Net(old_value)), (X,))
    made = tpcompiler.parallelize(exported, 2, {})
    right = made.converted.partition.rank_program

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
    made.converted.partition.rank_program = wrong  # type: ignore[method-assign]
    assert not made.verify((X,), then=[(X,)]).ok
    with pytest.raises((ArtifactError, tpcompiler.InternalError), match="shares the memory of 'now'"):
        made.save(tmp_path / "out")
