"""Every rule has its text, and is executed: on shards, for all placements that it offers, against the whole op."""

from __future__ import annotations

import re

import pytest
import torch

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.long import some
from tests.rules.sample import Sample, call, ids, node_of, t
from tests.rules.samples import SAMPLES, written_of
from tpcompiler._torch import OpOverload
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.judge.rules.run_on_shards import Mismatch, check, rule_from
from tpcompiler.rules.infer import Option, Refusal, follow, merge, shardings
from tpcompiler.rules.notation import RuleText, dim_size
from tpcompiler.rules.registry import _RULES, rule_of

aten = torch.ops.aten
sdpa = aten.scaled_dot_product_attention.default
RULED = [sample for sample in SAMPLES if sample.text is not None]


@pytest.mark.sample(250)
@pytest.mark.parametrize("sample", RULED, ids=str)
def test_sizes_agree_and_shards_make_the_whole(sample: Sample) -> None:
    node = node_of(sample)
    rule, written = rule_of(node), written_of(node)
    assert rule is not None
    assert written is not None
    text = re.sub(r"\s+", " ", written.text).strip().replace(" ,", ",")  # less the spaces that empty terms leave
    assert text == sample.text
    # A factor with two sizes (a dim that broadcasts and is not written 1) would be cut wrongly.
    tensors = [*(operand.meta["val"] for operand in edit.operands(node)), *edit.outputs(node)]
    for term, value in zip((*rule.pattern.inputs, *rule.pattern.outputs), tensors, strict=True):
        assert [dim_size(dim, rule.extent) for dim in term] == list(value.shape)
    torch.manual_seed(0)
    ran = {what for degree in some((2, 4, 3), 2) for what in check(node, rule, degree)}
    free = {factor for factor in rule.factors if factor not in rule.pattern.whole and rule.extent[factor] > 1}
    assert {f"{factor} cut" for factor in free} <= ran


ONES = [
    call(aten.cat.default, [t(1, 3)], text=""),
    call(aten.split.Tensor, t(1, 3), 1, text=""),
    call(aten.split_with_sizes.default, t(3, 1), [1], 1, text=""),
    call(aten.chunk.default, t(1, 3), 1, text=""),
    call(aten.convolution.default, t(1, 2, 1), t(4, 2, 1), None, [1], [0], [1], False, [0], 1, text=""),
    call(aten.convolution.default, t(1, 2, 3), t(4, 2, 3), None, [3], [0], [1], False, [0], 1, text=""),
    call(sdpa, t(2, 4, 3, 4), t(2, 1, 3, 4), t(2, 1, 3, 4), enable_gqa=True, text=""),
    call(aten.slice.Tensor, t(3, 4), 1, 0, 4, 4, text=""),
]


@pytest.mark.parametrize("sample", [*ONES, *(pytest.param(each, marks=pytest.mark.slow) for each in RULED)], ids=str)
def test_a_choice_is_read_back_from_its_shardings(sample: Sample) -> None:
    """From each value's sharding alone, as `check` does; also where a factor has one element, or none is left of it."""
    rule, mesh = rule_of(node_of(sample)), Mesh((("dp", 2), ("tp", 2)))
    assert rule is not None
    choices = [Option({factor: DimSharding.by(*axes)}) for factor in rule.factors for axes in (["tp"], ["dp", "tp"])]
    tried = 0
    for choice in choices:
        both = shardings(rule, choice, mesh)
        if isinstance(both, Refusal):
            continue
        terms = zip((*rule.pattern.inputs, *rule.pattern.outputs), (*both[0], *both[1]), strict=True)
        found = [follow(rule, term, sharding.without_partial, mesh) for term, sharding in terms]
        assert [each.text for each in found if isinstance(each, Refusal)] == []
        whole = merge([each for each in found if isinstance(each, Option)])
        assert whole is not None
        assert shardings(rule, whole, mesh) == both
        tried += 1
    assert tried or sample not in ONES


def test_calls_that_a_rule_declines() -> None:
    declined = [sample for sample in SAMPLES if sample.text is None]
    assert declined
    assert [str(sample) for sample in declined if written_of(node_of(sample)) is not None] == []


def test_rows_that_any_cpu_packs_together_stay_together() -> None:
    """A CPU without AVX-512 packs 32, so that it shows no wrong number."""
    (packed,) = (sample for sample in SAMPLES if sample.target is aten._weight_int4pack_mm_for_cpu.default)
    assert rule_of(node_of(packed)).extent["n_"] == 64


def test_every_registered_op_has_a_sample() -> None:
    """Kernels of a GPU too, which `kernels.py` runs on the CPU."""
    ruled = {str(target) for target in _RULES if isinstance(target, OpOverload)}  # a later torch may lack some
    assert ruled <= {str(sample.target) for sample in SAMPLES}


WRONG = {
    "layer norm over a cut dim": (
        call(aten.layer_norm.default, t(4, 6), [6], t(6), text=""),
        RuleText("d0 h, h -> d0 h", sizes={"normalized_shape": (("h",),)}),
    ),
    "softmax over a cut dim": (call(aten.softmax.int, t(4, 6), 1, text=""), RuleText("d0 d1 -> d0 d1")),
    "a bias once per rank": (
        call(aten.linear.default, t(3, 6), t(5, 6), t(5), text=""),
        RuleText("b k, n k, n -> b n"),
    ),
    "a bias beside a Partial": (
        call(aten.addmm.default, t(5), t(4, 6), t(6, 5), text=""),
        RuleText("n, m k, k n -> m n", linear=((1,),)),
    ),
    "add with one operand pending": (
        call(aten.add.Tensor, t(4), t(4), text=""),
        RuleText("d0, d0 -> d0", linear=((0,),)),
    ),
    "a number added to a Partial": (call(aten.add.Tensor, t(4), 1.0, text=""), RuleText("d0 -> d0", linear=((0,),))),
    "a product of two Partials": (
        call(aten.mul.Tensor, t(4), t(4), text=""),
        RuleText("d0, d0 -> d0", linear=((0, 1),)),
    ),
    "a mean of means": (call(aten.mean.dim, t(5, 4), [0], text=""), RuleText("d0 d1 -> d1", reduce="avg")),
    "a sum of means": (call(aten.mean.dim, t(6, 4), [0], text=""), RuleText("d0 d1 -> d1")),
    "a sum of maxima": (call(aten.amax.default, t(6, 4), [0], text=""), RuleText("d0 d1 -> d1")),
    "a sum of distances": (
        call(aten.dist.default, t(6, 4), t(6, 4), text=""),
        RuleText("d0 d1, d0 d1 ->"),
    ),
    "a vocabulary without its offset": (
        call(aten.embedding.default, t(6, 4), ids(3, below=6), text=""),
        RuleText("v d, i0 -> i0 d"),
    ),
    "sizes left global": (
        call(aten.view.default, t(6, 4), [6, 2, 2], text=""),
        RuleText("a (b c) -> a b c", factors={"c": 2}),
    ),
    "merged dims cut inside": (
        call(aten.view.default, t(4, 6), [24], text=""),
        RuleText("a b -> (b a)", sizes={"size": (("b", "a"),)}),
    ),
    "query heads beside the wrong keys": (
        call(sdpa, t(1, 8, 3, 4), t(1, 4, 3, 4), t(1, 4, 3, 4), enable_gqa=True, text=""),
        RuleText("b (g h) s d!, b h t! d!, b h t! e -> b (g h) s e"),
    ),
    "queries cut under is_causal": (
        call(sdpa, t(2, 4, 3), t(2, 4, 3), t(2, 4, 3), None, 0.0, True, text=""),
        RuleText("h s d!, h t! d!, h t! e -> h s e"),
    ),
    "a slice of a cut dim": (
        call(aten.slice.Tensor, t(6, 4), 0, 0, 3, text=""),
        RuleText("d0 d1 -> d0 d1", factors={"d0": 6}),
    ),
    "pooling over a cut space": (
        call(aten.max_pool2d_with_indices.default, t(1, 2, 4, 3), [3], [1], [1], text=""),
        RuleText("n c h w! -> n c h w!, n c h w!"),
    ),
    "ids of bags cut as the bags": (
        call(aten._embedding_bag.default, t(5, 4), ids(4, below=5), torch.tensor([0, 1, 1, 3]), text=""),
        RuleText("v! d, b, b -> b d, x!, b, b"),
    ),
    "a sum of shares cut to integers": (
        call(aten.sum.dim_IntList, 9 * t(4, 6), [1], dtype=torch.int64, text=""),
        RuleText("d0 d1 -> d0", linear=((0,),)),
    ),
    "the last value put, summed": (
        call(aten.index_put.default, t(4, 5), [torch.tensor([0, 0, 1, 1, 0, 1])], t(6, 5), text=""),
        RuleText("+d0! d1, i, i d1 -> d0! d1"),
    ),
    "a diagonal moved the wrong way": (
        call(aten.tril.default, t(6, 6), text=""),
        RuleText("d0 d1! -> d0 d1!", local={"d0": lambda x, *, shard: aten.tril.default(x, -shard.offset)}),
    ),
    "an index that counts in a shard": (
        call(aten.max_pool2d_with_indices.default, t(2, 3, 4, 2), [2], text=""),
        RuleText("n c (o k!) w! -> n c o v, n c o v"),
    ),
    "one branch pending beside a whole one": (
        call(aten.where.self, torch.tensor([True, False, True, False]), t(4), t(4), text=""),
        RuleText("d0, d0, d0 -> d0", linear=((1,),)),
    ),
    "dims in the wrong order": (call(aten.t.default, t(4, 4), text=""), RuleText("d0 d1 -> d0 d1")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    sample, written = WRONG[name]
    node = node_of(sample)
    torch.manual_seed(0)
    rule = rule_from(written, node)
    with pytest.raises(Mismatch):
        assert [check(node, rule, degree) for degree in (2, 3, 4)]
