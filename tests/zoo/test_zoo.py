"""Real models: equal to the single-device program, at the collectives that a person would count."""

from __future__ import annotations

import re
from itertools import cycle

import pytest
import torch

import tpcompiler
from tests.long import some
from tests.sound import findings
from tests.zoo.faults import collectives_of, without_collective
from tests.zoo.index import CASES, TESTED
from tests.zoo.measure import Measured, alone, compared, exported, is_cut, measured

PART = some(TESTED, 11)
# Every other one static on 2 ranks, the rest with dynamic sizes on 4; `make zoo` has each in both ways on both worlds.
ON_WORLDS = [(name, dynamic, 4 if dynamic else 2) for name, dynamic in zip(PART, cycle((False, True)), strict=False)]
assert all(CASES[name].dims for name, dynamic, _ in ON_WORLDS if dynamic)


@pytest.fixture(scope="module")
def on_world(request: pytest.FixtureRequest) -> Measured:
    """Of the module, so that all tests of one program run together while it is remembered."""
    name, dynamic, world = request.param
    return measured(CASES[name], dynamic, world)


def _id(chosen: tuple[str, bool, int]) -> str:
    name, dynamic, world = chosen
    return f"{name}-{'dynamic' if dynamic else 'static'}-{world}"


def of(*chosen: bool) -> pytest.MarkDecorator:
    """The programs that are dynamic or not."""
    programs = [program for program in ON_WORLDS if program[1] in chosen]
    return pytest.mark.parametrize("on_world", programs, ids=map(_id, programs), indirect=True, scope="module")


each = of(False, True)


@pytest.mark.slow
@each
def test_equal_to_the_single_device_program(on_world: Measured) -> None:
    assert on_world.equal, on_world.differences


@pytest.mark.slow
@each
def test_any_number_of_processes_gives_the_same_bits(on_world: Measured) -> None:
    case = on_world.case
    then = [((), inputs) for inputs in case.then(*case.example)] if case.then else []
    report = on_world.program.verify((), case.inputs(*case.example), then=then, same_bits=True)
    assert report.ok, report


@each
def test_collectives_are_those_counted_by_hand(on_world: Measured) -> None:
    found, by_hand = on_world.found, on_world.case.by_hand()
    assert on_world.counted, (found - by_hand, by_hand - found)


@each
def test_parameters_are_cut(on_world: Measured) -> None:
    """As many bytes and FLOPs as the case says are cut, and each rank holds its share of what is cut."""
    assert on_world.cut_enough, on_world.cut
    assert on_world.flops_enough, on_world.flops
    world = on_world.world
    cut = [row for row in on_world.program.manifest().tensors if is_cut(row)]
    held = [on_world.program.rank_program(rank).state_dict for rank in range(world)]
    assert cut
    for row in cut:
        if row.name not in held[0]:
            continue  # a buffer that no checkpoint has
        whole = torch.Size(row.shape).numel()
        shares = [state[row.name].numel() for state in held]
        if re.search(r"\dr|\bR\b", str(row.sharding)):  # parts, or heads, that several ranks hold
            assert whole < sum(shares) < whole * world
            continue
        assert sum(shares) == whole
        assert max(shares) <= whole / world + max(row.shape)  # one row more where the rows do not divide


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral_cut", *some(TESTED, 11)])
def test_what_the_search_chooses_over_two_axes_is_sound(name: str) -> None:
    """Also where only the search has a name for a placement: a block of one axis that is all that another leaves."""
    made = tpcompiler.parallelize(exported(CASES[name], False), {"dp": 2, "tp": 2}, "auto", machine="ideal")
    assert findings(made) == []


@each
def test_no_wait_stands_before_an_op_that_does_not_use_it(on_world: Measured) -> None:
    assert not on_world.early_waits


@pytest.mark.sample(1)
@of(True)
def test_check_says_nothing(on_world: Measured) -> None:
    assert not on_world.alarms


@pytest.mark.sample(1)
@of(False)
def test_every_collective_matters(on_world: Measured) -> None:
    """Negative control: with any one collective gone the comparison fails."""
    case, program = on_world.case, on_world.program
    programs = [program.rank_program(rank) for rank in range(on_world.world)]
    names = collectives_of(programs[0])
    assert len(names) == case.by_hand().total()
    for collective in names:
        damaged = [without_collective(p, collective) for p in programs]
        report = compared(alone(case, False), program, damaged, case.inputs(*case.example))
        assert not report.ok, collective


@pytest.mark.slow
def test_the_first_wrong_value_is_named() -> None:
    program = measured(CASES["llama"], False, 2).program
    programs = [without_collective(program.rank_program(rank), "all_reduce_2") for rank in range(2)]
    report = compared(alone(CASES["llama"], False), program, programs, CASES["llama"].inputs(2, 12))
    assert report.first_diverging is not None
    assert report.first_diverging.startswith("'wait_tensor_2' (_c10d_functional.wait_tensor.default, claimed R)")


@of(True)
def test_no_guard_is_added(on_world: Measured) -> None:
    """Symbolic sizes stay as general as they were."""
    before = exported(on_world.case, True)
    program = on_world.program.rank_program(0)
    assert {str(k): str(v) for k, v in program.range_constraints.items()} == {
        str(k): str(v) for k, v in before.range_constraints.items()
    }
