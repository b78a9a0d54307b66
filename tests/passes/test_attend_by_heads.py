"""Attention over a cut sequence by heads: all_to_all there and back, or heads over one axis and steps over another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export

import tpcompiler
from tests.passes.stages import Call
from tpcompiler.solver import strategies
from tpcompiler.terminal.tables import text_of

STEPS, FEATURES = 32, 4


def qkv(heads: int, groups: int = 1, steps: int = STEPS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(heads + groups + steps)
    return tuple(torch.randn(1, each, steps, FEATURES) for each in (heads, heads // groups, heads // groups))


def attend(**how: Any) -> nn.Module:
    inner = Call(lambda self, q, k, v, mask=None: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **how))
    return Call(lambda self, *args: self.attention(*args), attention=inner)


def converted(
    model: nn.Module, args: tuple[torch.Tensor, ...], mesh: Any, plan: Any = None, dim: int = 2, **more: Any
) -> tpcompiler.ParallelProgram:
    """With the sequence of inputs and output cut over all axes, on a machine that counts bytes and FLOPs alone."""
    names, dynamic = (["tp"] if isinstance(mesh, int) else list(mesh)), more.pop("dynamic", None)
    cut = dict.fromkeys(names, f"S({dim})")
    exported = export(model, args, dynamic_shapes=dynamic)
    given = {"inputs": [cut] * min(3, len(args)), "outputs": [cut], "machine": "ideal"} | more
    return tpcompiler.parallelize(exported, mesh, {} if plan is None else plan, **given)


def sent(program: tpcompiler.ParallelProgram) -> Counter[tuple[str, int]]:
    return Counter((each.kind, each.wire_bytes) for each in program.collectives())


def exchanged(heads: int, ranks: int) -> int:
    """Bytes that a rank sends in an all_to_all of its share: all but its own part."""
    return heads * STEPS * FEATURES * 4 // ranks * (ranks - 1) // ranks


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, "auto"], ids=["planned", "auto"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_heads_instead_of_keys(ranks: int, is_causal: bool, plan: Any) -> None:
    """An all_to_all of a share for each of queries, keys, values and result; keys and values whole are more."""
    args = qkv(8)
    program = converted(attend(is_causal=is_causal), args, ranks, plan)
    assert sent(program) == {("all_to_all", exchanged(8, ranks)): 4}
    assert 4 * exchanged(8, ranks) < 2 * (8 * STEPS * FEATURES * 4) * (ranks - 1) // ranks or ranks == 2
    assert program.verify(args).ok


def test_other_dims_are_what_makes_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the others: keys and values are gathered."""
    monkeypatch.setattr(strategies, "_other_dims", lambda *_: iter(()))
    gathered = 8 * STEPS * FEATURES * 4 * 3 // 4
    assert sent(converted(attend(), qkv(8), 4)) == {("all_gather", gathered): 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(1, 1, STEPS, STEPS), (1, 8, STEPS, STEPS), (STEPS, STEPS)], ids=str)
def test_masks(shape: tuple[int, ...]) -> None:
    """A mask that is whole is read as it is; its heads are sliced."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[..., 0] = True
    args = (*qkv(8), mask)
    cut = {"tp": "S(2)"}
    program = converted(attend(), args, 4, inputs=[cut] * 3 + ["R"])
    assert sent(program) == {("all_to_all", exchanged(8, 4)): 4}
    assert program.verify(args).ok


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, "auto"], ids=["planned", "auto"])
@pytest.mark.parametrize("heads", [8, 4])
def test_two_axes(heads: int, plan: Any) -> None:
    """One all_to_all over both axes at once where they have as many heads; 4 heads over tp, keys gathered over cp."""
    steps = STEPS if heads == 8 else 2048  # enough to pay for bytes, so that no rank is idle
    args = qkv(heads, steps=steps)
    program = converted(attend(), args, {"cp": 2, "tp": 4}, plan)
    whole = heads * steps * FEATURES * 4
    assert sent(program) == (
        {("all_to_all", exchanged(8, 8)): 4}
        if heads == 8
        else {("all_to_all", whole // 8 * 3 // 4): 4, ("all_gather", whole // 4 // 2): 2}
    )
    assert program.verify(args).ok


def test_explained() -> None:
    """What heads, keys and turns would take: why not the others."""
    program = converted(attend(), qkv(8), 4)
    rows = program.explain("scaled_dot_product_attention").alternatives
    ways_of = [(each.makes, each.sends, each.wire_bytes, each.form) for each in rows]
    whole = 8 * STEPS * FEATURES * 4
    more = 2 * whole * 3 // 4 - 4 * exchanged(8, 4)
    assert ways_of[0] == (("S(1)",), ("4 all_to_all",), 0, "")
    assert rows[0].is_chosen
    assert (("S(2)",), ("2 all_gather",), more, "") in ways_of
    assert (("S(2)",), ("4 all_gather",), more, "attend_in_turns") in ways_of
    assert all(each.seconds is not None and each.seconds > 0 for each in rows[1:])
    assert " 4 all_to_all " in text_of(program.explain("scaled_dot_product_attention").parts())
