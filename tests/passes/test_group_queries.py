"""Attention on repeated heads of keys and values reads each of them once, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.export import Dim, export

import tpcompiler
from tests.passes.stages import Call
from tests.zoo.case import randomise
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.text import program_text
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.regions import group_queries as pass_module
from tpcompiler.passes.regions.group_queries import group_queries
from tpcompiler.plan.plan import Plan

FEW, TIMES, STEPS, KEYS, FEATURES = 2, 4, 3, 24, 4
HEADS = FEW * TIMES
WIDE = 16
POSITIONS = torch.arange(HEADS) // TIMES


def expanded(k: Tensor) -> Tensor:
    b, few, keys, features = k.shape
    return k[:, :, None].expand(b, few, HEADS // few, keys, features).reshape(b, HEADS, keys, features)


def rotated(k: Tensor) -> Tensor:
    many = expanded(k)
    return many * 0.5 + torch.cat([-many[..., 2:], many[..., :2]], -1)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "expand": expanded,
    "repeat_interleave": lambda k: k.repeat_interleave(TIMES, 1),
    "in two steps": lambda k: k.repeat_interleave(2, 1).repeat_interleave(2, 1),
    "repeat": lambda k: k[:, :, None].repeat(1, 1, TIMES, 1, 1).flatten(1, 2),
    "stack": lambda k: torch.stack([k] * TIMES, 2).flatten(1, 2),
    "index by a list": lambda k: k[:, POSITIONS.tolist()],
    "index by a constant": lambda k: k[:, POSITIONS],
    "index_select": lambda k: k.index_select(1, torch.arange(HEADS) // TIMES),
    "last but one": lambda k: (
        k.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, TIMES, -1).flatten(2, 3).transpose(1, 2)
    ),
    "before rope": rotated,
    "before a norm": lambda k: F.layer_norm(expanded(k), (FEATURES,)),
    "before a cat": lambda k: torch.cat([expanded(k[:, :, :9]), expanded(k[:, :, 9:]) * 2], 2),
    "before a slice": lambda k: expanded(k)[:, :, 2:],
    "with a cast": lambda k: expanded(k).double().to(k.dtype),
    "merged with the batch": lambda k: expanded(k).flatten(0, 1).unflatten(0, (k.shape[0], HEADS)),
    "cat of one head": lambda k: torch.cat([k[:, :1]] * HEADS, 1),
    "one head": lambda k: k[:, :1].expand(-1, HEADS, -1, -1),
    "repeat of one head": lambda k: k[:, :1].repeat(1, HEADS, 1, 1),
}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **how)


def write_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def write_out_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (q.shape[0], q.shape[1]))


def qkv(steps: int = STEPS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(steps)
    shapes = (2, HEADS, steps, FEATURES), (2, FEW, KEYS, FEATURES), (2, FEW, KEYS, FEATURES)
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def grouped(function: Callable[..., Any], args: Any, device: str = "cpu", dynamic: Any = None) -> PlannedProgram:
    exported = export(Call(lambda self, *args: function(*args)), args, dynamic_shapes=dynamic)
    return group_queries(apply_plan(canonicalize(exported), Plan(), Mesh.of(2), None, None), device)


def run(program: PlannedProgram, args: Any) -> Any:
    """Run the graph of a planned program, whose pins do nothing."""
    constants = [program.source.constants[spec.target] for _, spec in program.inputs() if spec.target is not None]
    return fx.GraphModule(program.source.graph_module, program.graph)(*constants, *args)[0]


def is_repeated(program: PlannedProgram) -> bool:
    """Return True if a value that is no view has as many numbers as keys with all heads."""
    return any(
        edit.is_tensor(node) and edit.fake(node).ndim > 2 and edit.fake(node).untyped_storage().nbytes() >= LARGE
        for node in edit.calls(program.graph)
    )


LARGE = 2 * HEADS * (KEYS - 2) * FEATURES * 4


def check(function: Callable[..., Any], args: Any, atol: float = 1e-6, **how: Any) -> PlannedProgram:
    """Compare the rewritten graph with the function."""
    program = grouped(function, args, **how)
    torch.testing.assert_close(run(program, args), function(*args), atol=atol, rtol=1e-5, equal_nan=True)
    assert [note.kind for note in program.notes] == ["attention"]
    assert not is_repeated(program)
    return program


@pytest.mark.sample(3)
@pytest.mark.parametrize("attention", [attend, write_out, write_out_merged])
@pytest.mark.parametrize("form", FORMS)
def test_heads_that_are_repeated_in_any_way(form: str, attention: Callable[..., Tensor]) -> None:
    repeated = FORMS[form]
    check(lambda q, k, v: attention(q, repeated(k), repeated(v)), qkv(1))


def test_before_and_after() -> None:
    q, k, v = qkv(1)
    program = check(
        lambda q, k, v, mask: attend(q, expanded(k), expanded(v), mask), (q, k, v, torch.zeros(2, 1, 1, KEYS))
    )
    assert_expected_inline(
        program_text(program),
        """\
args_0 = input f32[2, 8, 1, 4]
args_1 = input f32[2, 2, 24, 4]
args_2 = input f32[2, 2, 24, 4]
args_3 = input f32[2, 1, 1, 24]
unsqueeze = unsqueeze(args_1, 2)
unsqueeze_1 = unsqueeze(args_2, 2)
reshape = reshape(unsqueeze, [2, 2, 24, 4])
reshape_1 = reshape(unsqueeze_1, [2, 2, 24, 4])
unflatten = unflatten(args_0, -3, [2, -1])
transpose = transpose(unflatten, -3, -2)
flatten = flatten(transpose, -3, -2)
scaled_dot_product_attention_1 = scaled_dot_product_attention(flatten, reshape, reshape_1, args_3)
unflatten_1 = unflatten(scaled_dot_product_attention_1, -2, [-1, 4])
transpose_1 = transpose(unflatten_1, -3, -2)
scaled_dot_product_attention = flatten(transpose_1, -4, -3)
pin: R = pin(scaled_dot_product_attention)
return pin
""",
    )


MASKS: Mapping[str, tuple[int, ...]] = {
    "of all": (2, HEADS, STEPS, KEYS),
    "of heads": (1, HEADS, 1, KEYS),
    "of heads, without samples": (HEADS, STEPS, KEYS),
    "of samples": (2, 1, 1, KEYS),
    "of steps": (1, 1, STEPS, KEYS),
    "of steps alone": (STEPS, KEYS),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("is_bool", [False, True], ids=["added", "bool"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks(shape: tuple[int, ...], is_bool: bool, device: str) -> None:
    torch.manual_seed(len(shape))
    mask = torch.rand(shape) > 0.3 if is_bool else torch.randn(shape)
    check(lambda q, k, v, m: attend(q, expanded(k), expanded(v), m, scale=0.3), (*qkv(), mask), device=device)


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_groups_with_a_mask_on_a_gpu(shape: tuple[int, ...]) -> None:
    """torch repeats the heads if a mask is given with `enable_gqa`, because no kernel on GPUs takes both."""
    function = lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True)  # noqa: E731
    program = check(function, (*qkv(), torch.randn(shape)), device="cuda")
    (call,) = (node for node in edit.calls(program.graph) if node.target is pass_module.ATTENTION)
    assert not edit.arguments(call).enable_gqa


def test_rows_that_see_no_key_and_keys_that_are_not_numbers() -> None:
    q, k, v = qkv()
    mask = torch.zeros(2, 1, STEPS, KEYS)
    mask[0, 0, 1], mask[1, :, :, 5:] = -torch.inf, -torch.inf
    k[0, 0, 20], mask[..., 20] = torch.nan, -torch.inf
    check(lambda q, k, v, m: attend(q, expanded(k), expanded(v), m), (q, k, v, mask))


def test_causal_attention_takes_groups() -> None:
    program = check(lambda q, k, v: attend(q, expanded(k), expanded(v), is_causal=True), qkv())
    (call,) = (node for node in edit.calls(program.graph) if node.target is pass_module.ATTENTION)
    assert edit.arguments(call).enable_gqa


KEPT: dict[str, Callable[..., Any]] = {
    "used again": lambda q, k, v: (lambda many: attend(q, many, expanded(v)).sum() + many.sum())(expanded(k)),
    "returned": lambda q, k, v: (lambda many: (attend(q, many, expanded(v)), many))(expanded(k)),
    "tiled": lambda q, k, v: attend(q, k.repeat(1, TIMES, 1, 1), v.repeat(1, TIMES, 1, 1)),
    "only keys": lambda q, k, v: attend(q, expanded(k), torch.cat([v * i for i in range(TIMES)], 1)),
    "not equal": lambda q, k, v: attend(q, expanded(k) + torch.arange(8.0).view(8, 1, 1), expanded(v)),
    "in another order": lambda q, k, v: attend(q, k[:, [0, 0, 0, 1, 0, 1, 1, 1]], expanded(v)),
    "of as many heads": lambda q, k, v: attend(q, q, q),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name: str) -> None:
    args = qkv()
    program = grouped(KEPT[name], args)
    assert not program.notes
    first = KEPT[name](*args)
    torch.testing.assert_close(run(program, args), first[0] if isinstance(first, tuple) else first)


def test_a_mask_of_many_queries_is_not_copied_for_few_keys() -> None:
    """A mask of 512 rows, repeated, would be larger than the keys; on a CPU a kernel takes groups and a mask."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, HEADS, 512, 4), torch.randn(1, FEW, 64, 4), torch.randn(1, FEW, 64, 4)
    args = q, k, v, torch.randn(1, 1, 512, 64)
    function = lambda q, k, v, m: attend(q, expanded(k), expanded(v), m)  # noqa: E731
    assert not grouped(function, args, "cuda").notes
    program = grouped(function, args)
    assert program.notes
    torch.testing.assert_close(run(program, args), function(*args))


@pytest.mark.parametrize("part", ["_rows_of_mask", "unflatten"])
def test_the_comparison_notices_another_order(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all others: rows of a mask that belong to other queries."""
    if part == "_rows_of_mask":
        swapped = pass_module._rows_of_mask
        monkeypatch.setattr(pass_module, part, lambda mask, *sizes: swapped(mask.flip(-2), *sizes))
    else:
        rows = pass_module._Attention.attend_in_rows
        monkeypatch.setattr(
            pass_module._Attention, "attend_in_rows", lambda self, k, v, q, mask=None: rows(self, k, v, q.flip(1), mask)
        )
    mask = torch.randn(2, 1, STEPS, KEYS)
    with pytest.raises(AssertionError, match="not close"):
        check(lambda q, k, v, m: attend(q, expanded(k), expanded(v), m), (*qkv(), mask), device="cuda")


class Decoder(nn.Module):
    """Attention over a cache, of which a call writes some steps."""

    def __init__(self, heads: int, few: int, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.few, self.attention = heads, few, attention
        self.q, self.o = nn.Linear(16, heads * WIDE), nn.Linear(heads * WIDE, 16)
        self.k, self.v = nn.Linear(16, few * WIDE), nn.Linear(16, few * WIDE)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(2, few, KEYS, WIDE))

    def forward(self, x: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (count, WIDE)).transpose(1, 2)
            for layer, count in ((self.q, self.heads), (self.k, self.few), (self.v, self.few))
        )
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        times = self.heads // self.few
        keys, values = (
            each[:, :, None].expand(2, self.few, times, KEYS, WIDE).reshape(2, self.heads, KEYS, WIDE)
            for each in (self.keys, self.values)
        )
        made: Tensor = self.o(self.attention(q, keys, values, mask).transpose(1, 2).flatten(2))
        return made


PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize("attention", [attend, write_out])
@pytest.mark.parametrize(("ranks", "heads", "few"), [(2, 8, 2), (3, 8, 1), (4, 8, 2), (4, 6, 2), (8, 8, 2)])
def test_ranks_send_no_more(ranks: int, heads: int, few: int, attention: Callable[..., Tensor]) -> None:
    """Ranks that share heads, and ranks that have more than others, too."""
    torch.manual_seed(ranks)
    args = torch.randn(2, STEPS, 16), torch.randn(2, 1, STEPS, KEYS), torch.arange(4, 4 + STEPS)
    exported = export(randomise(Decoder(heads, few, attention)), args)
    made = {keep: tpcompiler.parallelize(exported, ranks, PLAN, keep_repeats=keep) for keep in (False, True)}
    sent = {keep: sum(each.wire_bytes for each in program.collectives()) for keep, program in made.items()}
    assert sent[False] <= sent[True]
    assert made[False].verify(args).ok
    kinds = {keep: [note.kind for note in program.manifest().notes] for keep, program in made.items()}
    assert "attention" in kinds[False]
    assert "attention" not in kinds[True]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["auto", PLAN], ids=["auto", "plan"])
def test_steps_that_are_cut(plan: Any) -> None:
    """Rows of steps and groups stay a cut of the steps: as many bytes are sent as with repeated heads."""
    args = torch.randn(2, 8, 16), torch.randn(2, 1, 8, KEYS), torch.arange(8)
    exported = export(randomise(Decoder(8, 4, attend)), args)
    cut = {"inputs": [{"cp": "S(1)"}, {"cp": "S(2)"}, None], "outputs": [{"cp": "S(1)"}]}
    made = [
        tpcompiler.parallelize(exported, {"cp": 2, "tp": 2}, plan, keep_repeats=keep, **cut) for keep in (False, True)
    ]
    grouped_sent, repeated_sent = ([(each.kind, each.wire_bytes) for each in one.collectives()] for one in made)
    assert grouped_sent == repeated_sent
    assert made[0].verify(args).ok


@pytest.mark.slow
def test_dynamic_steps_that_are_cut() -> None:
    """The mesh divides them, so that sizes become multiples."""
    q, k, v = qkv(8)
    steps, keys = Dim("steps", min=2, max=64), Dim("keys", min=2, max=64)
    module = Call(lambda self, *args: attend(args[0], expanded(args[1]), expanded(args[2])))
    exported = export(module, (q, k, v), dynamic_shapes=(({2: steps}, {2: keys}, {2: keys}),))
    cut = {"inputs": ["S(2)"] * 3, "outputs": ["S(2)"]}
    program = tpcompiler.parallelize(exported, 2, {}, **cut)
    assert program.verify((q, k, v)).ok
    assert "attention" in [note.kind for note in program.manifest().notes]
