"""What our rules leave out: sound ways to run a call, found by execution, that its rule does not offer.

`left_out.txt` lists them under their reasons ("? " before what random numbers may or may not show), and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.backward_samples import UNCHECKED
from tests.rules.listed import OPS, changes, samples_of
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES
from tpcompiler.errors import RuleError
from tpcompiler.judge.rules.check_rule import left_out
from tpcompiler.rules.registry import _RULES, rule_of

LIST = Path(__file__).with_name("left_out.txt")
DEGREES = (2, 3)

KERNELS = [
    f"aten._scaled_dot_product_{kind}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
]
NOT_RUN = {  # a kernel that does not check its operands takes the process down
    "aten._embedding_bag_forward_only.default",  # it reads up to a last offset, behind ids that are cut
    "aten._native_batch_norm_legit_functional.default",  # it reads beyond statistics that are cut alone
    "aten._native_batch_norm_legit_no_training.default",  # likewise
    *map(str, UNCHECKED),
    *(f"{op}{backward}.default" for op in KERNELS for backward in ("", "_backward")),  # so many operands take hours
    "aten.lstm.input",  # it reads beyond gates that are cut
    "aten.gru.input",  # likewise
    "aten.lu_unpack.default",  # it swaps the rows that pivots of another matrix name
}
SILENT = {  # calls that show nothing
    "aten.scaled_dot_product_attention.default",  # one draws
    "aten.index.Tensor",  # a mask may pick nothing
    "aten.rrelu_with_noise_functional.default",  # it draws where a number is negative
}


def _left_out(samples: list[Sample]) -> dict[str, list[str]]:
    """Lines for the list, each with the calls that show it."""
    found = defaultdict(list)
    for sample in samples:
        if str(sample.target) in NOT_RUN:
            continue
        node = node_of(sample)
        for degree in DEGREES:
            try:
                ways = left_out(node, rule_of(node), degree, sample.args, sample.kwargs)
            except RuleError:
                assert str(sample.target) in SILENT, sample
                continue
            for way in ways:
                line = f"{sample.target}{'' if sample.text is not None else ' without a rule'}: {way}"
                found[line].append(f"{sample} over {degree}")
    return found


@pytest.mark.sample(20)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", OPS)
def test_nothing_is_left_out_but_what_is_listed(op: str) -> None:
    found = _left_out(samples_of(op))
    if change := changes(LIST, op, found):
        shown = "\n".join(f"{line}\n    of {'; '.join(found.get(line[2:], ()))}" for line in change.splitlines())
        pytest.fail(f"the rule omits sound placements: offer them, or change {LIST.name}, with the reason:\n{shown}")


def test_a_rule_that_leaves_out_a_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = torch.ops.aten.mm.default
    (sample,) = (sample for sample in SAMPLES if sample.target is mm)
    monkeypatch.setitem(_RULES, mm, replace(_RULES[mm], write=lambda node: "m! k, k n -> m! n"))
    assert _left_out([sample]).keys() == {
        "aten.mm.default: S(0), R -> S(0)",
        "aten.mm.default: P(sum), R -> P(sum)",
        "aten.mm.default: R, P(sum) -> P(sum)",
    }
