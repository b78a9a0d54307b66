"""Random programs under random plans on random meshes: all ranks are equal to the single device, or refuse politely."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.long import some
from tests.property.processes import judge_processes
from tests.property.programs import Case, Net, Step
from tests.property.run import REFUSALS, SHORT, Outcome, Tally, Undecided, batch, drawn, judge, long_run, tried
from tests.property.steps import ROWS
from tests.zoo.faults import collectives_of, without_collective

pytestmark = pytest.mark.slow

SEEDS = some(range(2), 2)  # of each some 17 programs count; `make trust` runs 10,000


@cache
def outcomes(seed: int) -> list[Outcome]:
    return batch(seed, SHORT)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_are_the_single_device(seed: int) -> None:
    wrong = [outcome for outcome in outcomes(seed) if outcome.kind == "failed"]
    assert not wrong, "\n".join(f"{outcome.why}\n{outcome.case}" for outcome in wrong)


@pytest.mark.timeout(1800)  # alone it runs all seeds
def test_the_programs_are_many_kinds_of_programs() -> None:
    """What is drawn by chance must not become poor unseen."""
    tally = Tally()
    for seed in SEEDS:
        for outcome in outcomes(seed):
            tally.add(outcome)
    print(tally)
    counted = tally.kinds["counted"]
    assert counted >= 15 * len(SEEDS)
    assert counted > 4 * (tally.kinds["refused"] + tally.kinds["discarded"])
    assert len(tally.of["sharded"]) > 15
    assert set(tally.of["collectives"]) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    assert {"tp=2", "tp=3", "tp=4", "dp=2,tp=2"} <= set(tally.of["mesh"])
    assert tally.of["programs"]["with collectives"] > 0.9 * counted
    assert tally.of["free sizes"]["0"] < 0.9 * counted
    assert {"colwise", "rowwise", "colwise_gather_output"} <= set(tally.of["plan"])
    assert 0.1 * counted < tally.of["numbers"]["with NaN or inf"] < 0.7 * counted
    assert tally.of["judged by"]["gloo processes"]


def _noticed(made: tpcompiler.ParallelProgram, args: tuple[torch.Tensor, ...]) -> bool | None:
    """Whether the judge objects; None where it has nothing to say."""
    try:
        return bool(judge(made, args)[1])
    except Undecided:
        return None
    except tpcompiler.InputsError:  # shapes that do not fit any more
        return True


def _damaged(seed: int, damage: str) -> list[bool]:
    """Whether each of a seed's programs, damaged so, is objected to."""
    noticed = []

    def use(case: Case) -> None:
        try:
            made = tpcompiler.parallelize(case.exported(), case.mesh, case.plan, inputs=case.inputs)
        except REFUSALS:
            return
        right = made.partition.rank_program
        names = collectives_of(right(0))
        held = any(value.is_floating_point() and value.numel() for value in right(1).state_dict.values())
        if not (names and held) or _noticed(made, case.args) is not False:
            return

        def wrong(rank: int) -> ExportedProgram:
            program = right(rank)
            if damage == "collective":
                return without_collective(program, names[-1])
            if rank == 1:
                for fqn, value in program.state_dict.items():
                    program.state_dict[fqn] = torch.randn_like(value) if value.is_floating_point() else value
            return program

        made.partition.rank_program = wrong  # type: ignore[method-assign]
        noticed.append(_noticed(made, case.args) is not False)

    drawn(seed, 12, use, steps=SHORT)
    return noticed


@pytest.mark.sweep(2)
@pytest.mark.parametrize("damage", ["collective", "weights"])
def test_damaged_programs_are_noticed(damage: str) -> None:
    noticed = _damaged(100, damage)
    assert len(noticed) >= 6
    assert noticed.count(False) <= 1, "what is damaged may be seen by nobody, but not often"


def test_ranks_that_answer_for_ids_beyond_are_noticed() -> None:
    net = Net()
    net.add(Step("table", (), (4,)), (2, 3))
    net.returned = (2,)
    args = torch.randn(2, 3), torch.randn(2, 3), torch.randint(ROWS, (2, 3))
    for check in (True, False):
        program = torch.export.export(net, args)
        made = tpcompiler.parallelize(program, 2, {"table0": "S(0)"}, check_indices=check)
        assert ("and no rank does" in judge(made, args)[1]) is not check


def test_processes_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with a wrong weight on one rank, which nobody has looked at."""
    net, x = torch.nn.Linear(4, 6), torch.randn(3, 4)
    made = tpcompiler.parallelize(torch.export.export(net, (x,)), 2, {"weight": "S(0)"})
    assert judge_processes(made, [(x,), (x + 1,)]) == ""
    right = made.partition.rank_program

    def wrong(rank: int) -> ExportedProgram:
        program = right(rank)
        if rank == 1:
            program.state_dict["weight"] = torch.nn.Parameter(torch.full_like(program.state_dict["weight"], torch.nan))
        return program

    monkeypatch.setattr(made.partition, "rank_program", wrong)
    monkeypatch.setattr(tpcompiler.ParallelProgram, "inspect", lambda *_: None)
    assert "in processes: NOT EQUAL" in judge_processes(made, [(x,)])


def test_what_torch_itself_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise tpcompiler.InternalError("a promise is broken")

    monkeypatch.setattr("tests.property.run.tpcompiler.parallelize", broken)
    outcomes: list[Outcome] = []
    drawn(0, 3, lambda case: outcomes.append(tried(case)))
    assert {outcome.kind for outcome in outcomes} == {"failed"}
    assert outcomes[0].why == "InternalError: a promise is broken"


def test_a_long_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that the file holds are not run again, and what they gave counts."""
    ran: list[int] = []

    def two(seed: int) -> list[Outcome]:
        ran.append(seed)
        return [Outcome("counted", mesh="tp=2"), Outcome("failed", f"wrong at {seed}")]

    monkeypatch.setattr("tests.property.run.batch", two)
    path = tmp_path / "programs.jsonl"
    with ThreadPoolExecutor(1) as pool:
        first, again, more = (long_run(number, path, pool, 1) for number in (2, 2, 3))
    assert ran == [0, 1, 2]
    assert [tally.kinds["counted"] for tally in (first, again, more)] == [2, 2, 3]
    assert [failure.why for failure in more.failures] == ["wrong at 0", "wrong at 1", "wrong at 2"]
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [0, 0, 1, 1, 2, 2]
