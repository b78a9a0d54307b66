"""A rule of the user's own is proved on shards; a wrong one is named with its numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline

import tpcompiler
from tests.rules.sample import t
from tpcompiler.errors import RuleError
from tpcompiler.rules.registry import _RULES


@torch.library.custom_op("toycheck::centre", mutates_args=())
def centre(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Less the mean over the last dim, then scaled."""
    return (x - x.mean(-1, keepdim=True)) * weight


SAMPLES = [(t(4, 6), t(6)), ((t(5, 3), t(3)), {})]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(_RULES)
    yield
    _RULES.clear()
    _RULES.update(before)


def test_a_right_rule() -> None:
    tpcompiler.register_rule(centre, "b h!, h! -> b h!", shards="any", linear=[[0], [1]])
    report = tpcompiler.check_rule(centre, SAMPLES)
    assert {what.partition(": ")[2] for what in report.ran} >= {"whole", "b cut", "P through [0]", "P through [1]"}
    assert {what.partition(": ")[0] for what in report.ran} == {
        f"sample {i} over {n} ranks" for i in (0, 1) for n in (2, 3, 4)
    }
    assert report.missing == ()


def test_what_a_rule_leaves_out_is_listed() -> None:
    tpcompiler.register_rule(centre, "b! h!, h! -> b! h!", linear=[[0]])
    report = tpcompiler.check_rule(centre, SAMPLES[:1], degrees=(2,))
    assert_expected_inline(
        str(report),
        """\
2 placements hold
not offered, and sound: sample 0 over 2 ranks: R, P(sum) -> P(sum)
not offered, and sound: sample 0 over 2 ranks: S(0), R -> S(0)""",
    )


def test_a_factor_that_must_stay_whole() -> None:
    tpcompiler.register_rule(centre, "b h, h -> b h", shards="any")
    with pytest.raises(RuleError) as error:
        tpcompiler.check_rule(centre, [(torch.arange(8.0).view(2, 4) ** 2, torch.ones(4))])
    assert_expected_inline(
        str(error.value),
        """\
the rule of toycheck.centre.default is wrong: over 2 ranks, h cut (S(1), S(0) -> S(1)), output 0 is off by 11: at [1, 0] it is -4.5 by rank 0, and -15.5 on one device
  help: mark what must stay whole, as in 'h!'
  operands: [2, 4], [4]""",
    )


def test_a_sum_that_may_not_pass() -> None:
    tpcompiler.register_rule(centre, "b h!, h! -> b h!", linear=[[0, 1]])
    with pytest.raises(RuleError, match=r"P through \[0, 1\] .*by the sum of all ranks"):
        tpcompiler.check_rule(centre, SAMPLES)


def test_an_op_that_fails_on_shards() -> None:
    tpcompiler.register_rule(centre, "b h, k! -> b h")
    with pytest.raises(RuleError, match=r"h cut .*it fails on shards: RuntimeError: The size of tensor"):
        tpcompiler.check_rule(centre, SAMPLES)


def test_shapes_that_are_not_the_shards() -> None:
    tpcompiler.register_rule(centre, "b h!, h! -> h b")
    with pytest.raises(RuleError, match=r"rank 0 makes \[2, 4\] for output 0, not \[4, 2\]"):
        tpcompiler.check_rule(centre, [(t(4, 4), t(4))])


def test_float32_is_judged_by_its_own_rounding() -> None:
    """A sum in another order is right, and one of 1e-4 more is not."""

    @torch.library.custom_op("toycheck::total", mutates_args=())
    def total(x: torch.Tensor, more: float) -> torch.Tensor:
        return x.sum(0) + more

    tpcompiler.register_rule(total, "b h -> h")
    assert tpcompiler.check_rule(total, [(t(4000, 3).float(), 0.0)], degrees=(2,)).ran
    with pytest.raises(RuleError, match="b cut"):
        tpcompiler.check_rule(total, [(t(4000, 3).float(), 0.1)], degrees=(2,))


@pytest.mark.parametrize(
    ("op", "samples", "said"),
    [
        ("toycheck::none", SAMPLES, "'toycheck::none' is not an op of torch"),
        (centre, SAMPLES, "toycheck.centre.default has no rule for sample 0"),
        (
            torch.ops.aten.relu,
            [t(4)],
            "a sample of aten.relu.default is a Tensor\n  help: give a tuple of its arguments",
        ),
        (torch.ops.aten.relu, [], "no sample of aten.relu was given"),
    ],
)
def test_what_is_refused(op: object, samples: list[tuple[object, ...]], said: str) -> None:
    with pytest.raises(RuleError) as error:
        tpcompiler.check_rule(op, samples)
    assert said in str(error.value)
