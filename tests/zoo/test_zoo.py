"""Real models: equal to the single-device program, at the collectives that a person would count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.zoo.case import Case
from tests.zoo.faults import collectives_of, without_collective
from tests.zoo.index import CASES, TESTED
from tests.zoo.measure import WORLDS, exported, is_cut, measured, unseen_parameters
from tpcompiler.verify.compare import compare, functional

pytestmark = pytest.mark.slow

EXPORTS = [(name, dynamic) for name in TESTED for dynamic in (False, True) if CASES[name].dims or not dynamic]


@pytest.fixture(scope="module")
def export(request: pytest.FixtureRequest) -> tuple[Case, bool]:
    """Of the module, so that all tests of one export run together while its conversions are remembered."""
    name, dynamic = request.param
    return CASES[name], dynamic


def of(*chosen: bool) -> pytest.MarkDecorator:
    """The exports that are dynamic or not."""
    exports = [(name, dynamic) for name, dynamic in EXPORTS if dynamic in chosen]
    ids = [f"{name}-{'dynamic' if dynamic else 'static'}" for name, dynamic in exports]
    return pytest.mark.parametrize("export", exports, ids=ids, indirect=True, scope="module")


@of(False, True)
@pytest.mark.parametrize("world", WORLDS)
def test_equal_to_the_single_device_program(export: tuple[Case, bool], world: int) -> None:
    result = measured(*export, world)
    assert result.equal, result.differences


@of(False, True)
@pytest.mark.parametrize("world", WORLDS)
def test_collectives_are_those_counted_by_hand(export: tuple[Case, bool], world: int) -> None:
    result = measured(*export, world)
    assert result.counted, (result.found - result.case.by_hand(), result.case.by_hand() - result.found)


@of(False)
@pytest.mark.parametrize("world", WORLDS)
def test_parameters_are_cut(export: tuple[Case, bool], world: int) -> None:
    """As many bytes as the case says are cut, and each rank holds its share of what is cut."""
    result = measured(*export, world)
    assert result.cut_enough, result.cut
    assert result.flops_enough, result.flops
    cut = [row for row in result.program.manifest().tensors if is_cut(row)]
    held = [result.program.rank_program(rank).state_dict for rank in range(world)]
    assert cut
    for row in cut:
        whole = torch.Size(row["shape"]).numel()
        shares = [state[row["name"]].numel() for state in held]
        assert sum(shares) == whole
        assert max(shares) <= whole / world + max(row["shape"])  # one row more where the rows do not divide


@of(False)
def test_every_collective_matters(export: tuple[Case, bool]) -> None:
    """Negative control: with any one collective gone the comparison fails."""
    case, _ = export
    program = measured(*export, 2).program
    programs = [program.rank_program(rank) for rank in range(2)]
    alone = functional(program.original)
    names = collectives_of(programs[0])
    assert len(names) == case.by_hand().total()
    for collective in names:
        report = compare(
            alone,
            [without_collective(p, collective) for p in programs],
            (),
            case.inputs(*case.example),
            program.layout(),
            [node.name for node in program.resharded.user_inputs()],
            program.resharded.output_names(),
        )
        assert not report.ok, collective


@pytest.mark.parametrize("name", TESTED)
def test_every_parameter_matters(name: str) -> None:
    assert not unseen_parameters(CASES[name])


def test_a_parameter_that_does_not_matter_is_named() -> None:
    """Negative control: nothing is said of the pooler, that nothing uses."""
    case = replace(CASES["minilm"], inert={"key.bias": "as there"})
    assert unseen_parameters(case) == {"inner.bert.pooler.dense.weight", "inner.bert.pooler.dense.bias"}


def test_the_first_wrong_value_is_named() -> None:
    program = measured(CASES["llama"], False, 2).program
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


@of(True)
def test_no_guard_is_added(export: tuple[Case, bool]) -> None:
    """Symbolic sizes stay as general as they were."""
    before = exported(*export)
    program = measured(*export, 2).program.rank_program(0)
    assert {str(k): str(v) for k, v in program.range_constraints.items()} == {
        str(k): str(v) for k, v in before.range_constraints.items()
    }
