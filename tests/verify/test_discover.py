"""What is found by running shards: sound placements, and the rules that they make."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.tensor import Partial, Placement, Shard

import tpcompiler
import tpcompiler.rules  # registers the rules
from tests.long import some
from tests.rules.sample import Sample, node_of, t
from tests.rules.samples import SAMPLES
from tests.rules.test_complete import NOT_RUN
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.judge.rules.check_rule import offered
from tpcompiler.judge.rules.discover_rule import DiscoveredRule, discover_rule
from tpcompiler.judge.rules.placements import sound_placements
from tpcompiler.judge.rules.run_on_shards import rule_from
from tpcompiler.rules.notation import Rule, RuleText, parse
from tpcompiler.rules.registry import _RULES, rule_of

aten = torch.ops.aten


def ways(op: Any, *args: Any, degree: int = 2, **kwargs: Any) -> str:
    return "\n".join(map(str, sound_placements(op, args, kwargs, degree)))


def test_a_product_with_a_bias() -> None:
    assert_expected_inline(
        ways(aten.linear.default, t(4, 6), t(8, 6), t(8)),
        """\
R, R, R -> R
R, S(0), S(0) -> S(1)
R, P(sum), P(sum) -> P(sum)
S(0), R, R -> S(0)
S(1), S(1), P(sum) -> P(sum)
P(sum), R, P(sum) -> P(sum)""",
    )


def test_a_reduction_leaves_its_own_kind_of_pending_value() -> None:
    assert_expected_inline(
        ways(aten.amax.default, t(4, 6), [0]),
        """\
R -> R
S(0) -> P(max)
S(1) -> S(0)""",
    )
    assert_expected_inline(
        ways(aten.mean.dim, t(4, 6), [0]),
        """\
R -> R
S(0) -> P(avg)
S(1) -> S(0)
P(sum) -> P(sum)""",
    )


def test_shares_of_two_operands_of_one_shape_differ() -> None:
    """Else they cancel in the difference, and every function of it seems to take pending sums."""
    assert "P(sum), P(sum)" not in ways(lambda x, y: (x - y).abs(), t(4, 6), t(4, 6))


def test_size_arguments() -> None:
    assert_expected_inline(
        ways(aten.view.default, t(4, 6), [4, 2, 3]),
        """\
R -> R
S(0) -> S(0) (size[0] local)
S(1) -> S(1) (size[1] local)
P(sum) -> P(sum)""",
    )
    assert_expected_inline(
        ways(aten.expand.default, t(4, 1), [4, 6]),
        """\
R -> R
R -> S(1) (size[1] local)
S(0) -> S(0) (size[0] local)
P(sum) -> P(sum)""",
    )


def test_uneven_shards_count_and_empty_ones_do_not() -> None:
    assert "S(0) -> S(0)" in ways(aten.relu.default, t(5), degree=3)
    assert "S(0)" not in ways(aten.relu.default, t(4), degree=3)  # 2, 2, 0


def test_a_coincidence_of_the_values_does_not_count() -> None:
    ascending = torch.arange(6.0, dtype=torch.float64)
    assert "S(0)" not in ways(aten.msort.default, ascending)  # sorted shards of what is sorted already


def test_many_operands_of_one_size() -> None:
    """More combinations than can be tried: those that cut all alike are among the tried."""
    said = ways(aten.stack.default, [t(4, 6) for _ in range(9)])
    assert f"{', '.join(['S(1)'] * 9)} -> S(2)" in said
    assert f"{', '.join(['P(sum)'] * 9)} -> P(sum)" in said


def test_an_op_that_draws_or_gives_nothing_is_refused() -> None:
    with pytest.raises(RuleError, match="gives another result each time"):
        sound_placements(aten.rand_like.default, (t(4),))
    with pytest.raises(RuleError, match=r"gives no numbers for \[4\]"):
        sound_placements(aten.log.default, (-t(4).abs(),))


ENOUGH = 30  # ops


def _even(rule: Rule, sample: Sample, degree: int) -> set[tuple[Placement, ...]]:
    """What a rule offers, but for uneven cuts, pending integers, and factors with a body or an argument of their own."""
    operands = [operand.meta["val"] for operand in edit.operands(node_of(sample))]
    named = {*rule.local} | {factor for groups in rule.counts.values() for group in groups for factor in group}
    own = {(i, d) for i, term in enumerate(rule.pattern.inputs) for d, dim in enumerate(term) if {*dim} & named}

    def fits(index: int, placement: Placement) -> bool:
        if isinstance(placement, Partial):
            return operands[index].is_floating_point()
        if not isinstance(placement, Shard):
            return True
        return operands[index].shape[placement.dim] % degree == 0 and (index, placement.dim) not in own

    return {inputs for inputs in offered(rule, degree) if all(fits(i, p) for i, p in enumerate(inputs))}


def _proposed(found: DiscoveredRule, sample: Sample) -> Rule:
    sizes = {name: parse(f"{term} ->").inputs[0] for name, term in found.sizes.items()}
    text = RuleText(found.text, sizes, reduce=found.reduce, linear=found.linear)
    return rule_from(text, node_of(sample), found.shards)


@pytest.mark.slow
def test_what_is_discovered_offers_what_our_rules_offer() -> None:
    compared: dict[str, int] = defaultdict(int)
    short = {}
    by_op = {sample.target: sample for sample in reversed(SAMPLES) if sample.text is not None}
    for sample in some(by_op.values(), 5):
        name = str(sample.target)
        if sample.target not in _RULES or name in NOT_TRIED | NOT_RUN:
            continue
        rule = rule_of(node_of(sample))
        assert rule is not None
        proposed = _proposed(discover_rule(sample.target, [(sample.args, sample.kwargs)]), sample)
        for degree in (2, 3, 5):
            if missing := _even(rule, sample, degree) - offered(proposed, degree):
                short[f"{sample} over {degree}"] = missing
            compared[name] += len(_even(rule, sample, degree))
    assert short == {}
    assert len([name for name, count in compared.items() if count > 1]) >= ENOUGH / 5


NOT_TRIED = {
    "aten._grouped_mm.default",  # the kernel takes rows of whole 16 bytes, so it is cut in units that are not tried here
    "aten._weight_int4pack_mm_for_cpu.default",  # likewise, of 64 rows
    "tpcompiler.grouped_mm_by_block.default",  # likewise
    "aten.zeros_like.default",  # it reads no numbers, so none of a trial's show that they may be pending
    "aten._cdist_backward.default",  # with p = 1 it does not read the distances, so none of theirs show how they are cut
    "aten.rrelu_with_noise_backward.default",  # likewise the noise, but in training
    "aten.squeeze.default",  # a shard of one row loses its dim: a text alone is no rule for it
    "aten.squeeze.dims",  # likewise
    "aten.slice_scatter.default",  # of a part that covers all: what is under it may be pending or not
}


@torch.library.custom_op("toyfind::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(1, keepdim=True)) @ weight.T + bias


def test_a_rule_for_a_custom_op() -> None:
    found = discover_rule(mix, [(t(4, 6, 10), t(8, 10), t(8)), (t(2, 5, 6), t(9, 6), t(9))])
    assert_expected_inline(
        str(found),
        """\
register_rule('toyfind::mix.default', 'a b! c, d c, +d -> a e! d', shards='any', linear=((1,),))
# holds for [4, 6, 10], [8, 10], [8]
# holds for [2, 5, 6], [9, 6], [9]""",
    )
    before = dict(_RULES)
    try:
        tpcompiler.register_rule(mix, found.text, **found.options)
        report = tpcompiler.check_rule(mix, [(t(4, 6, 10), t(8, 10), t(8))])
    finally:
        _RULES.clear()
        _RULES.update(before)
    assert report.missing == ()


def test_shared_heads_are_one_factor() -> None:
    q, k, v = t(2, 8, 5, 3), t(2, 4, 7, 3), t(2, 4, 7, 6)
    found = discover_rule("aten::scaled_dot_product_attention", [((q, k, v), {"enable_gqa": True})])
    assert_expected_inline(
        str(found),
        """\
register_rule('aten::scaled_dot_product_attention.default', 'a (b c!) d e!, a b f! g!, a b h! i -> a (b j!) d i', shards='any', linear=((2,),))
# holds for [2, 8, 5, 3], [2, 4, 7, 3], [2, 4, 7, 6]""",
    )


@pytest.mark.parametrize(
    ("op", "samples", "said"),
    [
        ("aten::softmax.int", [(t(4, 6), 0), (t(4, 6), 1)], "S(1) -> S(1) holds for sample 0 and not for sample 1"),
        ("aten::relu", [(t(4, 6),), (t(6),)], "sample 0 has the shapes [4, 6], [4, 6], sample 1 [6], [6]"),
        ("aten::add.Tensor", [(t(4), t(4)), (t(4), t(1))], "disagree: sample 0 has the shapes [4], [4], [4], sample 1 [4], [1], [4]"),
        ("aten::squeeze", [(t(1, 4),)], "what was found does not make a rule: the rule of aten.squeeze.default is wrong"),
        ("aten::relu", [], "no sample of aten::relu was given"),
        ("toyfind::none", [], "'toyfind::none' is not an op of torch"),
    ],
)  # fmt: skip
def test_what_is_refused(op: str, samples: list[tuple[Any, ...]], said: str) -> None:
    with pytest.raises(RuleError) as error:
        discover_rule(op, samples)
    assert said in str(error.value)
