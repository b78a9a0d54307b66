"""What our rules leave out: sound ways to run a call, found by execution, that its rule does not offer.

`left_out.txt` lists them under their reasons, and nothing else: python -m tests.rules.test_complete prints what to change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES
from tpcompiler.errors import RuleError
from tpcompiler.rules.registry import _RULES, rule_of
from tpcompiler.verify.check_rule import left_out

LIST = Path(__file__).with_name("left_out.txt")
DEGREES = (2, 3)
CORE = ("matmul", "attention", "norms", "views", "embedding")

NOT_RUN = {
    "aten._native_batch_norm_legit_functional.default": "the kernel reads beyond statistics that are cut alone",
    "aten._native_batch_norm_legit_no_training.default": "the kernel reads beyond statistics that are cut alone",
}
DRAWS = {"aten.scaled_dot_product_attention.default"}  # with dropout


def _listed() -> dict[str, str]:
    """Line -> the reason above it."""
    found: dict[str, str] = {}
    reason = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            reason = line.removeprefix("# ")
        elif line:
            assert line not in found, f"{line} stands twice"
            found[line] = reason
    return found


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
                assert str(sample.target) in DRAWS, sample
                continue
            found |= {f"{sample.target}{'' if sample.text is not None else ' without a rule'}: {way}" for way in ways}
    return found


FAMILIES = sorted(
    {_RULES[s.target].write.__module__.rpartition(".")[2] if s.target in _RULES else "tagged" for s in SAMPLES}
)


def _family(op: str) -> str:
    targets = {str(target): entry.write.__module__.rpartition(".")[2] for target, entry in _RULES.items()}
    return targets.get(op, "tagged")


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_out_but_what_is_listed(family: str) -> None:
    found = _left_out([sample for sample in SAMPLES if _family(str(sample.target)) == family])
    listed = {line for line in _listed() if _family(line.partition(":")[0].split(" ")[0]) == family}
    assert sorted(found - listed) == [], "sound, and not offered: write it into the rule, or here with its reason"
    assert sorted(listed - found) == [], "offered now, or not found any more: take it off the list"


if __name__ == "__main__":
    here, now = set(_listed()), _left_out(SAMPLES)
    print("\n".join([*(f"+ {line}" for line in sorted(now - here)), *(f"- {line}" for line in sorted(here - now))]))
