"""A change of sharding moves values and reduces them; what does more is refused, though no number tried shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, export

import tpcompiler
from tests.trust.damage import Artifact, inserted
from tpcompiler.ir import edit
from tpcompiler.judge.sound.changes import MANY, _numbers
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.drawn import LEAST, SPREAD, DrawnSizes

aten = torch.ops.aten
SAME_SHAPE: dict[str, Callable[[fx.Node], tuple[Any, tuple[Any, ...]]]] = {
    "fix": lambda x: (aten.fix.default, (x,)),
    "special_round": lambda x: (aten.special_round.default, (x,)),
    "msort": lambda x: (aten.msort.default, (x,)),
    "flip": lambda x: (aten.flip.default, (x, [0])),
    "roll": lambda x: (aten.roll.default, (x, [24 * 25 * 33 * 34], [0])),
    "tril": lambda x: (aten.tril.default, (x, 1000)),
    "logcumsumexp": lambda x: (aten.logcumsumexp.default, (x, 0)),
    "a slice with an end": lambda x: (aten.slice.Tensor, (x, 0, 0, 1000)),
    "a slice from the end": lambda x: (aten.slice.Tensor, (x, 0, -1000)),
    "every second": lambda x: (aten.slice.Tensor, (x, 0, 0, 2**63 - 1, 1)),
    "a quotient": lambda x: (aten.div.Tensor, (x, 1.0000001)),
    "a quotient by 1": lambda x: (aten.div.Tensor, (x, 1)),
    "a fill": lambda x: (aten.full_like.default, (x, 1e-30)),
    "a cast": lambda x: (aten._to_copy.default, (x,)),
    "an expansion": lambda x: (aten.expand.default, (x, [-1, -1])),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


@pytest.fixture(scope="module")
def sound() -> Artifact:
    exported = export(Net(), (torch.randn(6, 8),), dynamic_shapes=({0: Dim("rows", max=2000)},))
    plan = {"up": "colwise", "down": "rowwise"}
    return Artifact.of(tpcompiler.parallelize(exported, 2, plan, outputs=["S(1)"]))


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", SAME_SHAPE)
def test_what_leaves_the_shape_is_refused(sound: Artifact, name: str) -> None:
    damaged = sound.copied()
    for program in damaged.ranks:
        wait = next(node for node in edit.calls(program.graph) if edit.is_wait(node))
        users = list(wait.users)
        new = inserted(wait.next, *SAME_SHAPE[name](wait), wait)
        for user in users:
            user.replace_input_with(wait, new)
    findings = check_programs(damaged.written(), damaged.manifest).findings
    if name == "every second":  # the negative control: all of it, one by one
        assert findings == []
    else:
        assert "a change moves and reduces values" in findings[0] or "no fixed part of it" in findings[0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("world", [2, 3, 4, 6, 37, 64])
@pytest.mark.parametrize("count", [1, 7, 4096, MANY + 1])
def test_numbers_of_which_sums_are_exact(count: int, world: int) -> None:
    """No integers, in no order, of both signs, alike only where there are more than two bytes can tell apart."""
    numbers = _numbers((count,), world)
    kept = numbers.to(torch.float64)
    assert (numbers != 0).all()
    if count > 1:
        assert not torch.equal(numbers, numbers.sort().values)
        assert numbers.min() < 0 < numbers.max()
        assert (numbers != numbers.round()).sum() > 0
    if count <= MANY:
        assert len(numbers.unique()) == count
    total, share = torch.zeros_like(numbers), numbers / world
    for _ in range(world):
        total += numbers
    assert torch.equal(total.to(torch.float64), kept * world)
    assert torch.equal(share.to(torch.float64) * world, kept)


def test_sizes_are_drawn_anew() -> None:
    """Not those of the trial before."""
    symbols = [f"s{i}" for i in range(40)]
    first, second = DrawnSizes(), DrawnSizes()
    drawn = [sizes.of(symbol, None) for sizes in (first, second) for symbol in symbols]
    assert len(set(drawn)) > 10
    assert all(LEAST <= size <= LEAST + SPREAD for size in drawn)
    assert [DrawnSizes(first.chosen).of(symbol, None) != first.chosen[symbol] for symbol in symbols] == [True] * 40
