"""What our rules leave out: sound ways to run a call, found by execution, that its rule does not offer.

`left_out.txt` lists them under their reasons ("? " before what random numbers may or may not show), and nothing else:
python -m tests.rules.test_complete prints what to change.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES
from tpcompiler.errors import RuleError
from tpcompiler.judge.rules.check_rule import left_out
from tpcompiler.rules.registry import _RULES, rule_of

pytestmark = pytest.mark.slow

LIST = Path(__file__).with_name("left_out.txt")
DEGREES = (2, 3)

NOT_RUN = {  # a kernel that does not check its operands takes the process down
    "aten._embedding_bag_forward_only.default",  # it reads up to a last offset, behind ids that are cut
    "aten._native_batch_norm_legit_functional.default",  # it reads beyond statistics that are cut alone
    "aten._native_batch_norm_legit_no_training.default",  # likewise
    "aten._scaled_dot_product_flash_attention_for_cpu.default",  # it divides by a number of heads of 0
    "aten.lstm.input",  # it reads beyond gates that are cut
    "aten.lu_unpack.default",  # it swaps the rows that pivots of another matrix name
}
SILENT = {  # calls that show nothing
    "aten.scaled_dot_product_attention.default",  # one draws
    "aten.index.Tensor",  # a mask may pick nothing
    "aten.rrelu_with_noise_functional.default",  # it draws where a number is negative
}


def read_list(path: Path) -> tuple[set[str], set[str]]:
    """(what must be found, what may be found)."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("# ")]
    assert len(lines) == len(set(lines)), "a line stands twice"
    return {line for line in lines if line[0] != "?"}, {line[2:] for line in lines if line[0] == "?"}


def _left_out(samples: list[Sample]) -> set[str]:
    found = set()
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
            found |= {f"{sample.target}{'' if sample.text is not None else ' without a rule'}: {way}" for way in ways}
    return found


def _family(op: str) -> str:
    """The file of the op's rule."""
    return _HOME.get(op, "tagged pointwise")


_HOME = {str(target): entry.write.__module__.rpartition(".")[2] for target, entry in _RULES.items()}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", sorted({_family(str(sample.target)) for sample in SAMPLES}))
def test_nothing_is_left_out_but_what_is_listed(family: str) -> None:
    found = _left_out([sample for sample in SAMPLES if _family(str(sample.target)) == family])
    must, may = ({line for line in each if _family(re.split("[: ]", line)[0]) == family} for each in read_list(LIST))
    assert sorted(found - must - may) == [], "sound, and not offered: write it into the rule, or here with its reason"
    assert sorted(must - found) == [], "offered now, or not found any more: take it off the list"


def test_every_line_is_of_an_op_with_a_sample() -> None:
    ops = {str(sample.target) for sample in SAMPLES}
    assert {re.split("[: ]", line)[0] for each in read_list(LIST) for line in each} <= ops


def test_a_rule_that_leaves_out_a_factor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = torch.ops.aten.mm.default
    (sample,) = (sample for sample in SAMPLES if sample.target is mm)
    monkeypatch.setitem(_RULES, mm, replace(_RULES[mm], write=lambda node: "m! k, k n -> m! n"))
    assert _left_out([sample]) == {
        "aten.mm.default: S(0), R -> S(0)",
        "aten.mm.default: P(sum), R -> P(sum)",
        "aten.mm.default: R, P(sum) -> P(sum)",
    }


if __name__ == "__main__":
    must, may = read_list(LIST)
    now = _left_out(SAMPLES)
    print(
        "\n".join([*(f"+ {line}" for line in sorted(now - must - may)), *(f"- {line}" for line in sorted(must - now))])
    )
