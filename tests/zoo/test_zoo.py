"""Real models: equal to the single-device program, at the collectives that a person would count."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.case import Case
from tests.zoo.faults import collectives_of, without_collective
from tests.zoo.index import CASES
from tests.zoo.measure import WORLDS, exported, is_cut, measured
from tpcompiler.verify.compare import compare, functional

pytestmark = pytest.mark.slow

EXPORTS = [(name, dynamic) for name, case in CASES.items() for dynamic in (False, True) if case.dims or not dynamic]


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


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_matters(name: str) -> None:
    """Negative control: halves of a parameter that are swapped along a dim, as wrong shards would be, show."""
    case = CASES[name]
    model, inputs = case.build(), case.inputs(*case.example)
    with torch.no_grad():
        expected = _tensors(model(**inputs))
        unseen = set()
        for fqn, parameter in model.named_parameters():
            kept = parameter.clone()
            for dim in (d for d in range(min(2, parameter.ndim)) if parameter.shape[d] > 1):
                parameter.copy_(kept.roll(parameter.shape[dim] // 2, dim))
                got = _tensors(model(**inputs))
                pairs = zip(got, expected, strict=True)
                # A hundred times what the judge may allow.
                if not any((a - b).abs().max() > 2e-3 * b.abs().max() for a, b in pairs):
                    unseen.add(fqn)
            parameter.copy_(kept)
    assert unseen == {fqn for fqn, _ in model.named_parameters() if fqn.endswith(tuple(case.inert))}


def _tensors(result: object) -> list[torch.Tensor]:
    values = result.values() if isinstance(result, dict) else [result]
    return [value for value in values if isinstance(value, torch.Tensor)]


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
