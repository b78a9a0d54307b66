"""Attention in turns: every rank attends to one part of the keys after the other, and makes what a single device does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.passes.stages import Call, divided
from tpcompiler._torch import FakeTensorMode
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.text import program_text
from tpcompiler.passes.move_device import move_device
from tpcompiler.passes.regions.attend_in_turns import attend_in_turns
from tpcompiler.rules.attention import CPU_KERNEL, CUDA_KERNEL
from tpcompiler.terminal.printed import format_bytes

aten = torch.ops.aten
PLAN = {"attend": "attend_in_turns"}
SEEN = torch.rand(2, 1, 16, 32, generator=torch.Generator().manual_seed(0)) > 0.5
SEEN[0, :, 3] = False  # a query that sees no key
SEEN[1, :, 5].view(2, 2, 8)[:, 0] = False  # that sees none in the first of two turns
SEEN[1, :, 6].view(4, 4, 2)[:, 1] = False  # in the second of four


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(heads: int = 4, steps: int = 32, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """16 queries (half of the steps) of 4 heads, 2 samples of 8 features."""
    k = noise(2, heads, steps, 8, dtype=dtype)
    return noise(2, 4, steps // 2, 8, dtype=dtype), k, k.flip(-1) + 1


def three(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    q = noise(*shape, dtype=dtype)
    return q, q.flip(-1), q.flip(-2) + 1


def repeated(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's models repeat heads."""
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)


def net(attend: Callable[..., torch.Tensor]) -> nn.Module:
    return Call(lambda self, *args: self.attend(*args), attend=Call(lambda self, *args: attend(*args)))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.6)


def converted(attend: Any, args: tuple[torch.Tensor, ...], mesh: Any, **asked: Any) -> tpcompiler.ParallelProgram:
    """With queries, keys, values and the rows of masks by steps over cp, and heads over tp."""
    dynamic, plan = asked.pop("dynamic", None), asked.pop("plan", PLAN)
    steps = {"cp": "S(2)"} | ({"tp": "S(1)"} if "tp" in mesh else {})
    rows = [{"cp": f"S({mask.ndim - 2})" if mask.shape[-2] > 1 else "R"} for mask in args[3:]]
    exported = export(net(attend), args, dynamic_shapes=dynamic and (dynamic,))
    return tpcompiler.parallelize(exported, mesh, plan, inputs=[steps] * 3 + rows, outputs=[steps], **asked)


def gathers(program: tpcompiler.ParallelProgram) -> list[tuple[str, str, int, str]]:
    return [(sent.kind, sent.axis, sent.payload_bytes, sent.why) for sent in program.collectives()]


def test_the_docstring() -> None:
    program = divided(net(F.scaled_dot_product_attention), three(1, 1, 4, 8), PLAN)
    assert_expected_inline(
        program_text(attend_in_turns(program)),
        """\
args_0 = input f32[1, 1, 4, 8]
args_1 = input f32[1, 1, 4, 8]
args_2 = input f32[1, 1, 4, 8]
pin_1: S(2) = pin(args_0)
unflatten = unflatten(args_1, 2, [2, 2, -1])
select = select(unflatten, 3, 0)
flatten = flatten(select, 2, 3)
unflatten_1 = unflatten(args_2, 2, [2, 2, -1])
select_1 = select(unflatten_1, 3, 0)
flatten_1 = flatten(select_1, 2, 3)
stack = stack([flatten, flatten_1])
pin_2: S(3) = pin(stack)
pin_3: R = pin(pin_2)
select_2 = select(pin_3, 0, 0)
select_3 = select(pin_3, 0, 1)
_scaled_dot_product_flash_attention_for_cpu = _scaled_dot_product_flash_attention_for_cpu(pin_1, select_2, select_3)
getitem = getitem(_scaled_dot_product_flash_attention_for_cpu, 0)
getitem_1 = getitem(_scaled_dot_product_flash_attention_for_cpu, 1)
eq = eq(getitem_1, -inf)
masked_fill = masked_fill(getitem_1, eq, 0.0)
sub = sub(getitem_1, masked_fill)
exp = exp(sub)
unsqueeze = unsqueeze(exp, 3)
mul = mul(getitem, unsqueeze)
select_4 = select(unflatten, 3, 1)
flatten_2 = flatten(select_4, 2, 3)
select_5 = select(unflatten_1, 3, 1)
flatten_3 = flatten(select_5, 2, 3)
stack_1 = stack([flatten_2, flatten_3])
pin_4: S(3) = pin(stack_1)
pin_5: R = pin(pin_4)
select_6 = select(pin_5, 0, 0)
select_7 = select(pin_5, 0, 1)
_scaled_dot_product_flash_attention_for_cpu_1 = _scaled_dot_product_flash_attention_for_cpu(pin_1, select_6, select_7)
getitem_2 = getitem(_scaled_dot_product_flash_attention_for_cpu_1, 0)
getitem_3 = getitem(_scaled_dot_product_flash_attention_for_cpu_1, 1)
maximum = maximum(getitem_1, getitem_3)
eq_1 = eq(maximum, -inf)
masked_fill_1 = masked_fill(maximum, eq_1, 0.0)
sub_1 = sub(getitem_3, masked_fill_1)
exp_1 = exp(sub_1)
unsqueeze_1 = unsqueeze(exp_1, 3)
sub_2 = sub(getitem_1, masked_fill_1)
exp_2 = exp(sub_2)
unsqueeze_2 = unsqueeze(exp_2, 3)
addcmul = addcmul(exp_1, exp, exp_2)
mul_1 = mul(mul, unsqueeze_2)
addcmul_1 = addcmul(mul_1, getitem_2, unsqueeze_1)
eq_2 = eq(addcmul, 0)
masked_fill_2 = masked_fill(addcmul, eq_2, 1)
unsqueeze_3 = unsqueeze(masked_fill_2, 3)
div = div(addcmul_1, unsqueeze_3)
permute = permute(div, [0, 1, 2, 3])
_to_copy = _to_copy(permute, dtype=f32, memory_format=torch.contiguous_format)
scaled_dot_product_attention = permute(_to_copy, [0, 1, 2, 3])
pin: R = pin(scaled_dot_product_attention)
return pin
""",
    )


ATTENTION: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.dtype], tuple[torch.Tensor, ...]]]] = {
    "all keys": (F.scaled_dot_product_attention, lambda dtype: qkv(dtype=dtype)),
    "causal, groups, a scale": (causal, lambda dtype: qkv(2, dtype=dtype)),
    "heads repeated": (
        lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v)),
        lambda dtype: qkv(2, dtype=dtype),
    ),
    "seen or not": (masked, lambda dtype: (*qkv(dtype=dtype), SEEN)),
    "seen or not, for all": (masked, lambda dtype: (*qkv(dtype=dtype), SEEN[1, 0])),
    "keys seen or not": (masked, lambda dtype: (*qkv(dtype=dtype), SEEN[1, 0, 5:6])),
    "queries that see or not": (masked, lambda dtype: (*qkv(dtype=dtype), SEEN[0, :, :, 7:8])),
    "scores added to": (
        masked,
        lambda dtype: (*qkv(dtype=dtype), noise(2, 4, 16, 32, dtype=dtype).masked_fill(~SEEN, -torch.inf)),
    ),
    "scores added to, the least number": (
        masked,
        lambda dtype: (*qkv(dtype=dtype), torch.zeros(16, 32, dtype=dtype).masked_fill(~SEEN[0], torch.finfo(dtype).min)),
    ),
}  # fmt: skip


def judge(what: str, mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> None:
    """As many gathers as ranks, each of one turn's keys and values: 2 samples of 32 / cp steps and 8 features."""
    attend, given = ATTENTION[what]
    args = given(dtype)
    program = converted(attend, args, mesh)
    heads, ranks = args[1].shape[1] // mesh.get("tp", 1), mesh["cp"]
    payload = 2 * 2 * heads * (32 // ranks) * 8 * dtype.itemsize
    assert gathers(program) == [("all_gather", "cp", payload, "plan-demanded")] * ranks
    at_once = payload * ranks  # all keys and values
    assert sum(sent.wire_bytes for sent in program.collectives()) == at_once * (ranks - 1) // ranks
    assert program.verify(args).ok


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("what", ATTENTION)
def test_what_the_single_device_makes(what: str, mesh: dict[str, int]) -> None:
    judge(what, mesh)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    judge("scores added to", {"cp": 4}, dtype)
    judge("scores added to, the least number", {"cp": 2}, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attend", "mesh"), [(causal, {"cp": 4}), (masked, {"cp": 2, "tp": 2})], ids=["causal", "masked"]
)
def test_any_length_that_the_turns_divide(attend: Any, mesh: dict[str, int]) -> None:
    samples, length = Dim("samples"), Dim("length", max=4096)

    def given(count: int, steps: int) -> tuple[torch.Tensor, ...]:
        q, k = noise(count, 4, steps, 8), noise(count, 2 if attend is causal else 4, steps, 8)
        return (q, k, k + 1, *([torch.rand(count, 1, steps, steps) > 0.4] if attend is masked else []))

    args = given(2, 16)
    steps = {0: samples, 2: length}
    program = converted(attend, args, mesh, dynamic=(steps, steps, steps, {**steps, 3: length})[: len(args)])
    assert f"dim 2 of input 'args_0' must be a multiple of {mesh['cp'] ** 2}" in program.report()
    assert len(gathers(program)) == mesh["cp"]
    assert all(program.verify(given(*each)).ok for each in ((1, 16), (3, 48)))


@pytest.mark.slow
def test_whole_keys_are_not_gathered() -> None:
    program = tpcompiler.parallelize(export(net(F.scaled_dot_product_attention), qkv()), {"cp": 2}, PLAN)
    assert gathers(program) == [
        ("all_gather", "cp", 2 * 4 * 16 * 8 * 4, "plan-demanded")
    ]  # the result, at the boundary
    assert program.verify(qkv()).ok


def test_the_axis_that_splits_layers_where_there_is_no_cp() -> None:
    program = tpcompiler.parallelize(export(net(causal), qkv(2)), 2, PLAN, inputs=["S(2)"] * 3, outputs=["S(2)"])
    assert [axis for _, axis, *_ in gathers(program)] == ["tp", "tp"]
    assert program.verify(qkv(2)).ok


def _no_rescale(before: tuple[torch.Tensor, ...], made: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    ones = torch.ones_like(scores)
    return (scores, before[1] + ones, before[2] + made) if before else (scores, ones, made)


def _first_part_again(self: Any, value: torch.Tensor, dim: int) -> Iterator[torch.Tensor]:
    dealt = aten.unflatten.int(value, dim, [self.ranks, self.ranks, -1])
    for _ in range(self.ranks):
        yield dealt.select(dim + 1, 0).flatten(dim, dim + 1)


def _blind_as_others(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> list[torch.Tensor]:
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return [*CPU_KERNEL(q, k, v, attn_mask=bias.expand(*q.shape[:3], k.shape[2]))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"), [("_merge", _no_rescale), ("_Turns.parts", _first_part_again), ("_attend", _blind_as_others)]
)
def test_a_wrong_merge_is_noticed(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the others: what was made before is not rescaled; one part is attended to again and
    again; a query that sees no key in a turn counts as if its scores were 0.
    """
    args = (*qkv(), SEEN)
    assert converted(masked, args, {"cp": 2}).verify(args).ok
    monkeypatch.setattr(f"tpcompiler.passes.regions.attend_in_turns.{name}", wrong)
    assert not converted(masked, args, {"cp": 2}).verify(args).ok


@pytest.mark.slow
def test_what_a_rank_holds() -> None:
    """Of 4 ranks, 1,024 steps and 64 features in bfloat16, a share of queries, keys or values is 32,768 bytes: of one
    head, for several would be exchanged for steps.

    At once: the shares, all keys and values (8 shares), and the result. In turns: the shares, one share of keys and one
    of values, what is made of them, and the sum so far in float32 (2), with three numbers for each query and head; and,
    for it goes with the numbers that its kernel gives, what the first turn made.
    """
    args = three(1, 1, 1024, 64, dtype=torch.bfloat16)
    share, numbers = 1024 // 4 * 64 * 2, 1024 // 4 * 4
    at_once, in_turns = (
        converted(F.scaled_dot_product_attention, args, {"cp": 4}, memory=10**9, plan=plan) for plan in ({}, PLAN)
    )
    assert f"activations {format_bytes(12 * share)} at the peak" in at_once.report()
    assert f"activations {format_bytes(9 * share + 3 * numbers)} at the peak" in in_turns.report()


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [None, ({2: Dim("length", max=4096)},) * 3], ids=["static", "dynamic"])
def test_the_kernel_of_a_gpu(dynamic: Any, tmp_path: Path) -> None:
    """It is there in the program for one, and on a CPU the CPU's stands for it; files of it are sound."""
    args = (noise(1, 4, 128, 16), noise(1, 2, 128, 16), noise(1, 2, 128, 16) + 1)
    program = converted(causal, args, {"cp": 2}, device_type="cuda", dynamic=dynamic)
    rank = program.rank_program(0)
    assert attention_of(rank) == [CUDA_KERNEL] * 2
    assert attention_of(move_device(rank, "cpu")) == [CPU_KERNEL] * 2
    assert program.verify(args).ok
    program.save(tmp_path / "out")  # and checks the files


def test_a_gpu_kernel_that_was_there_before_stays() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = CUDA_KERNEL(q, q, q, None, True)[0]
        return made

    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 16, device="cuda")
    exported = export(Call(lambda self, q: attend(q)), (q,))
    assert attention_of(move_device(exported, "cpu")) == [CUDA_KERNEL]


def attention_of(program: ExportedProgram) -> list[Any]:
    return [node.target for node in edit.calls(program.graph) if "attention" in str(node.target)]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 4, 96, 16), "96 steps of queries are no multiple of 64, as that many ranks on cuda need"),
        ((1, 4, 64, 12), "12 features are no multiple of 8, as that many ranks on cuda need"),
    ],
)
def test_sizes_that_the_kernel_of_a_gpu_does_not_take(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        converted(F.scaled_dot_product_attention, three(*shape), {"cp": 2}, device_type="cuda")


X = noise(2, 4, 16, 8)
REFUSED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "it takes [4, 16, 8], [4, 16, 8], [4, 16, 8], and must take [batch, heads, steps, features] of as many samples and features": (
        lambda q: F.scaled_dot_product_attention(q, q, q),
        (X[0].clone(),),
    ),
    "14 steps of queries are no multiple of 4": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        (X[:, :, :14].clone(), X),
    ),
    "24 steps of keys are no multiple of 16": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        (X, noise(2, 4, 24, 8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_in_turns(why: str) -> None:
    attend, args = REFUSED[why]
    with pytest.raises(PlanError) as caught:
        tpcompiler.parallelize(export(net(attend), args), {"cp": 4}, PLAN)
    first, *_, asked = str(caught.value).splitlines()
    assert first.startswith(f"'scaled_dot_product_attention' cannot attend in turns over cp=4: {why}")
    assert asked == '  asked by: the plan ("attend": "attend_in_turns")'
