"""Real models: equal to the single-device program, at the collectives that a person would count."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
import torch

import tpcompiler
from tests.models.faults import collectives_of, without_collective
from tests.models.zoo import CASES, Case
from tpcompiler import ParallelProgram
from tpcompiler.verify.compare import compare

pytestmark = pytest.mark.slow


@cache
def converted(name: str, dynamic: bool, world: int) -> ParallelProgram:
    return tpcompiler.parallelize(exported(name, dynamic), world, CASES[name].plan)


@cache
def exported(name: str, dynamic: bool) -> torch.export.ExportedProgram:
    return CASES[name].export(dynamic)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_single_device_program(name: str, dynamic: bool, world: int) -> None:
    case = CASES[name]
    program = converted(name, dynamic, world)
    for batch, sequence in [(2, 12), (3, 7)] if dynamic else [(2, 12)]:
        report = program.verify((), case.inputs(batch, sequence))
        assert report.ok, str(report)
        assert report.max_rel_err < 5e-6  # the float32 noise of these models; a dropped all_reduce gives about 1


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_counted_by_hand(name: str, dynamic: bool, world: int) -> None:
    case = CASES[name]
    found = converted(name, dynamic, world).collectives()
    layer = re.compile(r"\.layers?\.(\d+)\.")
    inside = Counter((m[1], c.kind) for c in found if (m := layer.search(f".{c.module}.")))
    outside = Counter(c.kind for c in found if not layer.search(f".{c.module}."))
    assert inside == {(str(i), "all_reduce"): case.per_layer for i in range(case.layers)}
    assert outside == case.outside
    assert not [c for c in found if c.why == "fallback"]


@pytest.mark.parametrize("name", CASES)
def test_planned_parameters_are_cut(name: str) -> None:
    """At least 90% of the planned parameters' bytes are cut, and each rank holds its share of what is cut."""
    program = converted(name, False, 4)
    planned = [t for t in program.manifest().tensors if _is_planned(CASES[name], t["name"])]
    sizes = {t["name"]: torch.Size(t["shape"]).numel() for t in planned}
    cut = sum(sizes[t["name"]] for t in planned if t["sharding"].startswith("S"))
    assert planned
    assert cut >= 0.9 * sum(sizes.values())
    held = program.rank_program(1).state_dict
    for t in planned:
        if t["sharding"].startswith("S"):
            assert held[t["name"]].numel() <= -(-sizes[t["name"]] // 4) + max(t["shape"])


def _is_planned(case: Case, fqn: str) -> bool:
    plan = tpcompiler.Plan.of(case.plan)
    return any(entry.matches(fqn.rpartition(".")[0]) for entry in plan.entries)


@pytest.mark.parametrize("name", CASES)
def test_every_collective_matters(name: str) -> None:
    """Negative control: with any one collective gone the comparison fails."""
    program = converted(name, False, 2)
    programs = [program.rank_program(rank) for rank in range(2)]
    inputs = CASES[name].inputs(2, 12)
    names = collectives_of(programs[0])
    assert len(names) == len(program.collectives())
    for collective in names:
        report = compare(
            program.original,
            [without_collective(p, collective) for p in programs],
            (),
            inputs,
            program.layout(),
            [node.name for node in program.resharded.user_inputs()],
            program.resharded.output_names(),
        )
        assert not report.ok, collective


def test_the_first_wrong_value_is_named() -> None:
    program = converted("llama", False, 2)
    programs = [without_collective(program.rank_program(rank), "all_reduce_2") for rank in range(2)]
    report = compare(
        program.original,
        programs,
        (),
        CASES["llama"].inputs(2, 12),
        program.layout(),
        ["input_ids"],
        program.resharded.output_names(),
        intermediate=program.resharded.source,
    )
    assert report.first_diverging is not None
    assert report.first_diverging.startswith("'wait_tensor_2' (_c10d_functional.wait_tensor.default, claimed R)")


def test_no_guard_is_added() -> None:
    """Symbolic sizes stay as general as they were."""
    before = exported("llama", True)
    program = converted("llama", True, 2).rank_program(0)
    assert {str(k): str(v) for k, v in program.range_constraints.items()} == {
        str(k): str(v) for k, v in before.range_constraints.items()
    }
