"""Compile random programs, run all ranks and compare; say what the programs were."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.export import ExportedProgram

import tpcompiler
from tests.machines import WIRE
from tests.property.processes import judge_processes
from tests.property.programs import Case, cases, resized
from tests.property.steps import ROWS
from tpcompiler import errors
from tpcompiler._torch import sym_multiple, symbols_of
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, placement_of
from tpcompiler.ir.program import check_invariants, reshard
from tpcompiler.ir.text import op_name
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.passes.canonicalize import canonicalize

REFUSALS = (
    errors.PlanError,
    errors.MeshError,
    errors.ShardingError,
    errors.UnsupportedError,
    errors.ProgramError,
)
# What a free size is made in turn: all degrees divide the first; the second is odd, where no cut asks for a multiple.
SIZES = (24, 13)
ROUNDED = 1e-2  # a tolerance above this: one rounding of float32 is already seen, and says nothing about the ranks
BATCH = 25  # programs of one seed
IN_PROCESSES = 12  # one in so many programs is run by gloo processes too
SHORT, STEPS = 5, 8  # long ones take twice the time


@dataclass(frozen=True)
class Outcome:
    """What came of one program.

    `kind`: "counted" (a value was cut, one resharded, and all ranks are equal to the single device), "whole" (equal, but
    nothing was cut or resharded), "refused", "discarded" (no program, or one that rounding alone decides) or "failed".
    """

    kind: str
    why: str = ""
    case: str = ""  # of what failed
    mesh: str = ""
    dialect: str = ""
    dynamic: int = 0  # free sizes
    calls: int = 0  # compared
    sharded: tuple[str, ...] = ()  # ops that ran on shares
    collectives: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    boundary: tuple[str, ...] = ()
    strange: bool = False  # with NaN or infinities
    processes: int = 0  # that ran it


def tried(case: Case, processes: bool = False) -> Outcome:
    """Export, compile and judge one program; with `processes` also as gloo processes run it."""
    try:
        program = case.exported()
    except Exception as error:  # torch's own: there is no program
        return Outcome("discarded", f"torch.export: {type(error).__name__}")
    try:
        made = tpcompiler.parallelize(
            program, case.mesh, case.plan, inputs=case.inputs, outputs=case.outputs, machine=WIRE
        )
    except REFUSALS as refusal:
        return Outcome("refused", f"{type(refusal).__name__}: {_kind_of(refusal)}")
    except Exception as error:
        return _failed(error, case)
    try:
        calls, wrong = judge(made, case.args)
        processes = processes and _divides(made, case.args)
        if processes and not wrong:
            wrong = judge_processes(made, [case.args, others_like(case.args)])
    except Undecided as reason:
        return Outcome("discarded", str(reason))
    except Exception as error:
        return _failed(error, case)
    if wrong:
        return Outcome("failed", wrong.splitlines()[0], f"{case}\n{wrong}")
    facts = _facts(case, made)
    ran = made.world_size if processes else 0
    return Outcome("counted" if facts.pop("counts") else "whole", calls=calls, processes=ran, **facts)


class Undecided(Exception):
    """No comparison of a program says anything."""


def judge(made: tpcompiler.ParallelProgram, args: tuple[torch.Tensor, ...]) -> tuple[int, str]:
    """How many calls were compared on all ranks, and what is wrong, or nothing.

    Two calls on the first sizes that the cuts take, so that what the first has written is read; one each on others.

    Raises:
        Undecided: the single device's own rounding is as large as what is looked for, or no sizes suit.
    """
    check_invariants(made.converted.resharded)
    ranks = read_ranks(made.only)
    model = canonicalize(made.only.original())
    if not (report := check_programs(ranks, made.manifest(), made.only.original(), model=model)).ok:
        return 0, str(report)
    calls = 0
    for taken in (args, *(resized(made.only.original(), args, size) for size in SIZES)):
        if taken is None or not _divides(made, taken) or not (taken is args or _takes(made.only.original(), taken)):
            continue
        try:
            compared = made.verify(taken, then=[] if calls else [(others_like(taken), {})])
        except errors.InputsError as error:
            if "no finite number" in str(error):
                raise Undecided("nothing is finite") from error
            raise
        if any(d.tolerance > ROUNDED for d in compared.outputs):
            raise Undecided("rounding decides")
        if not compared.ok:
            return calls, f"{compared}\n  of sizes {[list(a.shape) for a in taken]}"
        if not calls and (wrong := _wrong_beyond(made, taken)):
            return calls, wrong
        calls += 1 if calls else 2
    if not calls:
        raise Undecided("no sizes suit both the program and its cuts")
    return calls, ""


def _wrong_beyond(made: tpcompiler.ParallelProgram, args: tuple[torch.Tensor, ...]) -> str:
    """What is wrong where an id is beyond the rows: all ranks must raise where the single device does."""
    for beyond in (ROWS, -1):
        given = [a.clone() for a in args]
        for value in given:
            if not value.is_floating_point() and value.numel():
                value.view(-1)[-1] = beyond
        try:
            report = made.verify(given)
        except errors.InputsError as error:
            if "a rank's program" in str(error):
                return f"{error}\n  with the id {beyond}"
        else:
            if not report.ok:
                return f"{report}\n  with the id {beyond}"
    return ""


def others_like(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Other numbers of the same shapes."""
    return tuple(torch.randn_like(a) if a.is_floating_point() else a.flip(0) for a in args)


def _takes(program: ExportedProgram, args: tuple[torch.Tensor, ...]) -> bool:
    """Whether the single-device program holds for these sizes."""
    try:
        copy.deepcopy(program).module()(*args)
    except Exception:  # whatever a guard or an op raises
        return False
    return True


def _divides(made: tpcompiler.ParallelProgram, args: tuple[torch.Tensor, ...]) -> bool:
    """Whether the sizes are multiples where cuts ask for them."""
    for node, value in zip(made.converted.resharded.user_inputs(), args, strict=True):
        for size, got in zip(node.meta["val"].shape, value.shape, strict=True):
            found = None if isinstance(size, int) else sym_multiple(size)
            if found is not None and got % found[1]:
                return False
    return True


def _kind_of(refusal: Exception) -> str:
    """The first line without names and numbers."""
    words = str(refusal).splitlines()[0].split()
    return " ".join("_" if any(c in word for c in "'\"0123456789[](){}") else word for word in words)


def _failed(error: Exception, case: Case) -> Outcome:
    return Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", str(case))


def _facts(case: Case, made: tpcompiler.ParallelProgram) -> dict[str, Any]:
    calls = [node for node in edit.calls(made.converted.resharded.graph) if PLACEMENT in node.meta]
    ran = {
        op_name(node)
        for node in calls
        if node.target is not reshard
        and any(dim.axes for s in (*placement_of(node).wants, *placement_of(node).shardings) for dim in s.dims)
    }
    free = symbols_of(node.meta["val"] for node in made.converted.resharded.user_inputs())
    return {
        "counts": bool(ran) and any(node.target is reshard for node in calls),
        "mesh": str(made.mesh),
        "dialect": case.dialect,
        "dynamic": len(free),
        "sharded": tuple(sorted(ran)),
        "collectives": tuple(collective.kind for collective in made.collectives()),
        "plan": tuple(sorted({_named(style) for style in case.plan.values()})),
        "boundary": tuple(sorted({_named(spec) for spec in (*case.inputs, *case.outputs)})),
        "strange": bool(case.strange),
    }


def _named(style: Any) -> str:
    """A style or placement without its dims."""
    if isinstance(style, dict):
        return " ".join(f"{key} {_named(value)}" for key, value in style.items())
    if isinstance(style, list):
        return _named(style[0])
    return str(style) if str(style).startswith("P") else str(style).split("(")[0]


@dataclass
class Tally:
    """What the programs were."""

    kinds: Counter[str] = field(default_factory=Counter)
    why: dict[str, Counter[str]] = field(default_factory=dict)
    of: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.kind == "failed":
            self.failures.append(outcome)
        elif outcome.why:
            self.why.setdefault(outcome.kind, Counter())[outcome.why] += 1
        if outcome.kind != "counted":
            return
        for name in ("sharded", "collectives", "plan", "boundary"):
            self.of.setdefault(name, Counter()).update(getattr(outcome, name))
        self.of.setdefault("mesh", Counter())[outcome.mesh] += 1
        self.of.setdefault("dialect", Counter())[outcome.dialect] += 1
        self.of.setdefault("free sizes", Counter())[str(outcome.dynamic)] += 1
        self.of.setdefault("calls", Counter())[str(outcome.calls)] += 1
        self.of.setdefault("numbers", Counter())["with NaN or inf" if outcome.strange else "finite"] += 1
        self.of.setdefault("judged by", Counter()).update(["verify"] + ["gloo processes"] * bool(outcome.processes))
        communicates = "with collectives" if outcome.collectives else "without"
        self.of.setdefault("programs", Counter())[communicates] += 1

    def __str__(self) -> str:
        lines = [_counted(self.kinds)]
        lines += [f"  {kind}: {_counted(why, '; ')}" for kind, why in self.why.items()]
        lines += [f"  {name}: {_counted(values)}" for name, values in self.of.items()]
        lines += [f"FAILED {outcome.why}\n{outcome.case}" for outcome in self.failures]
        return "\n".join(lines)


def _counted(values: Counter[str], between: str = ", ") -> str:
    return between.join(f"{name} {number}" for name, number in values.most_common())


def drawn(seed: int, number: int, use: Callable[[Case], None], *, steps: int = STEPS, shrink: bool = False) -> None:
    """Give `use` the cases that hypothesis draws with this seed; with `shrink` it may raise, and gets smaller ones."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @hypothesis.seed(seed)
    @settings(max_examples=number, phases=phases, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases(steps))
    def run(case: Case) -> None:
        use(case)

    run()


def batch(seed: int, steps: int | None = None) -> list[Outcome]:
    """What came of the programs of one seed: one in four has long ones, unless `steps` says how long."""
    outcomes: list[Outcome] = []

    def use(case: Case) -> None:
        outcomes.append(tried(case, processes=len(outcomes) % IN_PROCESSES == 0))

    drawn(seed, BATCH, use, steps=steps or (SHORT if seed % 4 else STEPS))
    return outcomes


def shrunk(seed: int) -> None:
    """Raise for the smallest program that fails like one of this seed's.

    Raises:
        AssertionError: with the program.
    """

    def use(case: Case) -> None:
        outcome = tried(case)
        assert outcome.kind != "failed", f"{outcome.why}\n{outcome.case}"

    drawn(seed, BATCH, use, shrink=True)


def long_run(number: int, path: Path, pool: Executor, workers: int) -> Tally:
    """Try programs until so many are counted, going on from what the file holds: one line of JSON per program.

    The programs of a seed are written together, so that an interrupted run loses no more than one seed per worker.
    """
    tally, done = Tally(), set()
    for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        done.add(row.pop("seed"))
        tally.add(Outcome(**row))
    seeds = (seed for seed in count() if seed not in done)
    lacking = workers if tally.kinds["counted"] < number else 0
    with path.open("a") as file:
        running = {pool.submit(batch, seed): seed for seed in islice(seeds, lacking)}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                seed = running.pop(future)
                for outcome in future.result():
                    tally.add(outcome)
                    file.write(json.dumps({"seed": seed, **asdict(outcome)}) + "\n")
                file.flush()
                print(f"seed {seed}: {_counted(tally.kinds)}", flush=True)
                if tally.kinds["counted"] < number:
                    again = next(seeds)
                    running[pool.submit(batch, again)] = again
    return tally
