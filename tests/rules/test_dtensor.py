"""DTensor's rules beside ours: every disagreement over a call on 2 ranks is listed in `dtensor.txt` with its reason.

    OP: fails                   its rule raises for a call that runs
    OP: offers IN -> OUT        and our rule does not
    OP: IN -> OUT is OUT        our rule makes another placement of it
    OP: wrong, IN -> OUT        running the shards does not give the whole

Ops that DTensor has no rule for are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.dtensor import answer, knows, mesh_of, text
from tests.rules.listed import OPS, changes, samples_of
from tests.rules.sample import Sample, call, node_of, t
from tests.rules.test_complete import NOT_RUN
from tpcompiler._torch import DeviceMesh
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.judge.rules.check_rule import is_even, is_idle
from tpcompiler.judge.rules.placements import SoundWay, combinations, sound_placements
from tpcompiler.rules.infer import Refusal, options, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of

LIST = Path(__file__).with_name("dtensor.txt")
DEGREE = 2


def disagreements(samples: list[Sample], mesh: DeviceMesh) -> set[str]:
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what a rule raises
    found = set()
    for sample in samples:
        node = node_of(sample)
        operands = [operand.meta["val"] for operand in edit.operands(node)]
        if not operands or str(sample.target) in NOT_RUN:
            continue
        ways = []
        for inputs in combinations(operands, DEGREE):
            if is_even(SoundWay(inputs, ()), operands, DEGREE):
                try:
                    ways += [way] if (way := answer(sample, inputs, mesh)) else []
                except Exception:
                    found.add(f"{sample.target}: fails")
        found |= {f"{sample.target}: {what}" for what in _compared(sample, rule_of(node), ways)}
    return found


def _compared(sample: Sample, rule: Rule | None, ways: list[SoundWay]) -> set[str]:
    try:
        sound = sound_placements(sample.target, sample.args, sample.kwargs, DEGREE)
    except RuleError:  # a call that shows nothing
        return set()
    ours = _offered(rule)
    results = {(way.inputs, way.outputs) for way in ways}
    found = set()
    for way in ways:
        said = f"{text(way.inputs)} -> {text(way.outputs)}"
        if all(isinstance(placement, Replicate) for placement in way.inputs):
            continue
        if not any(each.inputs == way.inputs and _holds(way.outputs, each.outputs) for each in sound):
            found.add(f"wrong, {said}")
        elif way.inputs not in ours and not is_idle(way, results):
            found.add(f"offers {said}")
        elif way.inputs in ours and ours[way.inputs] != way.outputs:
            found.add(f"{said} is {text(ours[way.inputs])}")
    return found


def _holds(claimed: tuple[Placement, ...], found: tuple[Placement, ...]) -> bool:
    """Whether what was found says no less: equal values are their own maximum, minimum and average too."""
    own = (Partial("max"), Partial("min"), Partial("avg"))
    pairs = list(zip(claimed, found, strict=False))
    return len(claimed) == len(found) and all(a == b or (a in own and isinstance(b, Replicate)) for a, b in pairs)


def _offered(rule: Rule | None) -> dict[tuple[Placement, ...], tuple[Placement, ...]]:
    mesh = Mesh((("tp", DEGREE),))
    found = {}
    for option in options(rule, mesh) if rule is not None else ():
        both = shardings(rule, option, mesh)  # type: ignore[arg-type]
        assert not isinstance(both, Refusal)
        inputs, outputs = (tuple(each.placements(mesh)[0] for each in side) for side in both)
        if not any(dim.block or dim.parts for side in both for sharding in side for dim in sharding.dims):
            found[inputs] = outputs  # a cut in blocks is none that a placement says
    return found


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with mesh_of(DEGREE) as mesh:
        yield mesh


@pytest.mark.sample(20)
@pytest.mark.parametrize("op", [op for op in OPS if knows(samples_of(op)[0].target)])
def test_every_disagreement_is_listed(op: str, mesh: DeviceMesh) -> None:
    if change := changes(LIST, op, disagreements(samples_of(op), mesh)):
        pytest.fail(f"another answer than DTensor's: judge it, and change {LIST.name}, with the reason:\n{change}")


def test_a_disagreement_is_seen(monkeypatch: pytest.MonkeyPatch, mesh: DeviceMesh) -> None:
    """A rule of ours that offers less, and answers of DTensor that are wrong."""
    sample = call(torch.ops.aten.mm.default, t(4, 6), t(6, 8), text="")
    assert disagreements([sample], mesh) == set()
    monkeypatch.setattr("tests.rules.test_dtensor.rule_of", lambda node: None)
    assert "aten.mm.default: offers S(0), R -> S(0)" in disagreements([sample], mesh)
    monkeypatch.setattr(
        "tests.rules.test_dtensor.answer", lambda sample, inputs, mesh: SoundWay(inputs, (Replicate(),) * 1)
    )
    assert "aten.mm.default: wrong, S(0), R -> R" in disagreements([sample], mesh)
