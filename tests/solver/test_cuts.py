"""What a style cuts lies as its uses take it: in parts, blocks, whole heads; so nothing is gathered."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.passes.stages import Call, placed, planned
from tests.zoo.case import randomise
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.errors import PlanError
from tpcompiler.ir.program import Program
from tpcompiler.ir.text import program_text

X = torch.randn(2, 3, 8)
PLAN = {"up": "colwise", "down": "rowwise"}


def by_split(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = self.up(x).split([8, 4, 4], -1)
    return self.down(torch.cat([q, k * v], -1))


def by_slices(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = self.up(x)
    return self.down(made[..., :8] * made[..., 8:])


def gate_and_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.up(x).chunk(2, -1)
    return self.down(F.silu(gate) * up)


def one_after_the_other(self: Any, x: torch.Tensor) -> torch.Tensor:
    """[b, s, two kinds, 4 heads, 2], the kinds apart."""
    gate, up = self.up(x).view(*x.shape[:2], 2, 4, 2).unbind(2)
    return self.down((F.silu(gate) * up).reshape(*x.shape[:2], 8))


def kinds_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = self.up(x).view(*x.shape[:2], 2, 4, 2).permute(2, 0, 3, 1, 4)
    return self.down((F.silu(made[0]) * made[1]).transpose(1, 2).reshape(*x.shape[:2], 8))


def by_split_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The weight is split itself, as torch's attention does it: one part for x, three for what x meets."""
    (own, others), (bias, biases) = self.up.weight.split([4, 12]), self.up.bias.split([4, 12])
    a, b, c = F.linear(x.relu(), others, biases).unflatten(-1, (3, 4)).unbind(-2)
    return self.down(torch.cat([F.linear(x, own, bias) * a, b * c], -1))


def head_by_head(self: Any, x: torch.Tensor) -> torch.Tensor:
    """[b, s, 4 heads, two kinds, 2]: each head's kinds lie together, so that one piece has whole heads."""
    gate, up = self.up(x).view(*x.shape[:2], 4, 2, 2).unbind(3)
    return self.down((F.silu(gate) * up).reshape(*x.shape[:2], 8))


def put_together(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A row-wise layer's input of two layers' outputs in a row."""
    return self.down(torch.cat([self.a(x), self.b(x)], -1))


def through_a_convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Channel by channel: groups of one channel, of two kinds."""
    mixed = F.conv1d(self.up(x).mT, self.taps, padding=1, groups=16).mT
    first, second = mixed.split([8, 8], -1)
    return self.down(first * second)


def shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Four heads of 2 that meet the one head beside them, made whole on every rank."""
    q, k = self.up(x).split([8, 2], -1)
    scores = q.view(*x.shape[:2], 4, 2) * k[:, :, None].expand(*x.shape[:2], 4, 2)
    return self.down(scores.softmax(-1).reshape(*x.shape[:2], 8))


def module(forward: Callable[..., torch.Tensor]) -> nn.Module:
    """`up` makes 16 features (10 for `shared`), `down` takes what the function makes of them."""
    inner = 12 if forward in (by_split, put_together) else 8
    parts: dict[str, Any] = {"up": nn.Linear(8, 10 if forward is shared else 16), "down": nn.Linear(inner, 8)}
    if forward is put_together:
        parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "down": parts["down"]}
    if forward is through_a_convolution:
        parts["taps"] = (16, 1, 3)
    return randomise(Call(forward, **parts))


def plan_of(forward: Callable[..., torch.Tensor]) -> Mapping[str, str]:
    return {"a": "colwise", "b": "colwise", "down": "rowwise"} if forward is put_together else PLAN


FORWARDS = (
    by_split,
    by_slices,
    gate_and_up,
    one_after_the_other,
    kinds_first,
    by_split_weight,
    head_by_head,
    put_together,
    through_a_convolution,
    shared,
)


def cuts(forward: Callable[..., torch.Tensor], degree: int = 2, plan: Mapping[str, str] | None = None) -> str:
    return lines_of(placed(module(forward), (X,), plan or plan_of(forward), degree=degree))


def lines_of(program: Program) -> str:
    """The weights that are cut, one per line."""
    lines = [line.partition(" = ") for line in program_text(program).splitlines()]
    return "\n".join(
        f"{what.split()[0]}: {left.partition(': ')[2]}" for left, _, what in lines if re.match(r"p_\w+: S", left)
    )


def test_where_the_cuts_lie() -> None:
    assert_expected_inline(
        "\n".join(f"{forward.__name__}\n{cuts(forward)}" for forward in FORWARDS),
        """\
by_split
up.weight: S(0, parts 8 8b4)
up.bias: S(0, parts 8 8b4)
down.weight: S(1, parts 8 4)
by_slices
up.weight: S(0, block 8)
up.bias: S(0, block 8)
down.weight: S(1)
gate_and_up
up.weight: S(0, block 8)
up.bias: S(0, block 8)
down.weight: S(1)
one_after_the_other
up.weight: S(0, block 8)
up.bias: S(0, block 8)
down.weight: S(1)
kinds_first
up.weight: S(0, block 8)
up.bias: S(0, block 8)
down.weight: S(1)
by_split_weight
up.weight: S(0, block 4)
up.bias: S(0, block 4)
down.weight: S(1, block 4)
head_by_head
up.weight: S(0)
up.bias: S(0)
down.weight: S(1)
put_together
a.weight: S(0)
a.bias: S(0)
b.weight: S(0)
b.bias: S(0)
down.weight: S(1, parts 8 4)
through_a_convolution
taps: S(0, block 8)
up.weight: S(0, block 8)
up.bias: S(0, block 8)
down.weight: S(1)
shared
up.weight: S(0, parts 8 2r)
up.bias: S(0, parts 8 2r)
down.weight: S(1)""",
    )


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("world", "dynamic"), [(2, False), (4, True)])
def test_one_sum_and_no_gather(forward: Callable[..., torch.Tensor], world: int, dynamic: bool) -> None:
    """The executed side; cut in one piece there are gathers (`test_placements_as_they_are_printed`)."""
    sizes = {"x": {0: Dim("batch", max=64), 1: Dim("sequence", max=64)}} if dynamic else None
    made = tpcompiler.parallelize(export(module(forward), (X,), dynamic_shapes=sizes), world, plan_of(forward))
    assert made.verify((X,)).ok
    if dynamic:
        assert made.verify((torch.randn(5, 1, 8),)).ok
    assert [(c.kind, c.why) for c in made.collectives()] == [("all_reduce", "inherent")]


def test_explicit_placements_stay() -> None:
    plan = {"up.weight": "S(0)", "up.bias": "S(0)", "down": "rowwise"}
    assert cuts(gate_and_up, plan=plan) == "up.weight: S(0)\nup.bias: S(0)\ndown.weight: S(1)"


@pytest.mark.slow
def test_placements_as_they_are_printed() -> None:
    """What the search finds for styles may be written into a plan, and is the same program."""
    plan = {"up.weight": "S(0, parts 8 8b4)", "up.bias": "S(0, parts 8 4 4)", "down.weight": "S(1, parts 8 4)"}
    assert cuts(by_split, plan=plan) == cuts(by_split)
    program = export(module(by_split), (X,))
    by_hand = tpcompiler.parallelize(program, 2, plan)
    assert by_hand.verify((X,)).ok
    assert [(c.kind, c.why) for c in by_hand.collectives()] == [("all_reduce", "inherent")]
    in_one_piece = tpcompiler.parallelize(program, 2, {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"})
    assert [c.why for c in in_one_piece.collectives()] == ["fallback", "inherent"]


STYLES = {  # style -> where the cut lies by the plan, and by the uses
    "packed_colwise": (by_split, "S(0)", "S(0, parts 8 8b4)"),
    "packed_colwise:2": (gate_and_up, "S(0, block 8)", "S(0, block 8)"),
    "packed_colwise:8,4,4": (by_split, "S(0, parts 8 8b4)", "S(0, parts 8 8b4)"),
    "packed_colwise:12,4": (head_by_head, "S(0, parts 12 4)", "S(0)"),  # the uses have the last word
}


@pytest.mark.slow
@pytest.mark.parametrize(("style", "forward", "seed", "cut"), [(style, *made) for style, made in STYLES.items()])
def test_a_packed_style(style: str, forward: Callable[..., torch.Tensor], seed: str, cut: str) -> None:
    """Weight and bias alike."""
    plan = {"up": style, "down": "rowwise"}
    before = lines_of(planned(module(forward), (X,), plan))
    assert before.splitlines()[:2] == [f"up.weight: {seed}", f"up.bias: {seed}"]
    assert cuts(forward, plan=plan).splitlines()[:2] == [f"up.weight: {cut}", f"up.bias: {cut}"]
    made = tpcompiler.parallelize(export(module(forward), (X,)), 2, {"up": style, "down": "rowwise"})
    assert made.verify((X,)).ok


def refusal(forward: Callable[..., torch.Tensor], style: str) -> str:
    with pytest.raises(PlanError) as caught:
        tpcompiler.parallelize(export(module(forward), (X,)), 2, {"up": style})
    return str(caught.value)


def test_sizes_that_do_not_add_up() -> None:
    assert_expected_inline(
        refusal(by_split, "packed_colwise:8,4,2"),
        """\
style 'packed_colwise:8,4,2' does not fit dim 0 of 'up.weight': 8 + 4 + 2 = 14, and not 16
  help: give sizes that add up to 16, or write 'packed_colwise', which reads them off the uses
  asked by: the plan ("up": "packed_colwise:8,4,2")""",
    )
    assert_expected_inline(
        refusal(by_split, "packed_colwise:3"),
        """\
style 'packed_colwise:3' does not fit dim 0 of 'up.weight': 16 is no multiple of 3
  help: give sizes that add up to 16, or write 'packed_colwise', which reads them off the uses
  asked by: the plan ("up": "packed_colwise:3")""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("second", ["colwise", "replicate"])
def test_a_planned_cut_is_not_given_up_for_fewer_bytes(second: str) -> None:
    """To run the first layer on every rank would spare the gather, and is not what the plan says."""
    module = randomise(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)))
    x = torch.randn(3, 8)
    made = tpcompiler.parallelize(torch.export.export(module, (x,)), 2, {"0": "colwise", "2": second, "2.bias": "S(0)"})
    assert placed_shardings(made.only.manifest)["0.weight"].text(made.mesh) == "S(0)"
    assert made.verify((x,)).ok
