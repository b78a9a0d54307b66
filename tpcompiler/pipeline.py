"""The passes in order, for one program or for several that share their weights."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import basename
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch.export import ExportedProgram

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tpcompiler._torch import FakeTensor
from tpcompiler.cost.collective import Collectives
from tpcompiler.cost.timeline import duration
from tpcompiler.errors import ProgramError, ShardingError, TpCompilerError
from tpcompiler.frontend.plain_weights import drop_replaced, unwrap_subclasses
from tpcompiler.ir.devices import device_type_for
from tpcompiler.ir.invariants import check_invariants
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers
from tpcompiler.ir.placements import format_spec, parse_placement
from tpcompiler.ir.program import CanonicalProgram, MarkedProgram, Note, PlannedProgram, Program
from tpcompiler.ir.shares import same_bits
from tpcompiler.ir.symm_mem import refuse_symm_mem
from tpcompiler.ir.text import program_text
from tpcompiler.parallel.advice import Adviser
from tpcompiler.parallel.parallel_program import ParallelProgram
from tpcompiler.parallel.partition import Partition
from tpcompiler.passes._forms import FINDERS, Base
from tpcompiler.passes.apply_plan import Boundary, apply_plan, names_of
from tpcompiler.passes.attend_in_turns import attend_in_turns
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.passes.choose_paths import choose_paths
from tpcompiler.passes.divide_sizes import divide_sizes
from tpcompiler.passes.flatten_branches import flatten_branches
from tpcompiler.passes.fold_reshards import fold_reshards
from tpcompiler.passes.insert_reshards import insert_reshards
from tpcompiler.passes.join_branches import join_branches
from tpcompiler.passes.mark_placements import mark_placements
from tpcompiler.passes.spread_experts import spread_experts
from tpcompiler.plan import Plan, join_plans, share_plan
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.solver.memory import measure_memory
from tpcompiler.solver.place import Aim, TooLarge, place
from tpcompiler.solver.remarks import Remarks
from tpcompiler.solver.search import search
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.stage import Known
from tpcompiler.solver.step_time import collectives_of, measure_step_time
from tpcompiler.terminal.printed import format_bytes

P = TypeVar("P", bound=Program)


class After(Protocol):
    """What is done with the program that a pass has made; it is handed on."""

    def __call__(self, program: P, name: str) -> P: ...


@dataclass(frozen=True)
class Conversion:
    """One exported program on its way, its plan and boundary known."""

    exported: ExportedProgram
    program: CanonicalProgram
    mesh: Mesh
    plan: Plan
    boundary: tuple[Boundary, Boundary]
    device: str
    after: After
    collectives: Collectives
    check_indices: bool = True
    dropped: tuple[Note, ...] = ()

    @classmethod
    def of(
        cls,
        exported: ExportedProgram,
        mesh: Mesh,
        plan: Plan,
        boundary: tuple[Boundary, Boundary],
        device_type: str | None,
        dump: str | os.PathLike[str] | None,
        collectives: Collectives,
        check_indices: bool = True,
    ) -> Conversion:
        after = Dump(dump)
        exported, dropped = drop_replaced(unwrap_subclasses(exported))
        program = after(canonicalize(exported), "canonicalize")
        device, plan = device_type_for(program, device_type), plan.fitted(names_of(program))
        if collectives != "nccl":
            refuse_symm_mem(device)
        return cls(exported, program, mesh, plan, boundary, device, after, collectives, check_indices, dropped)

    def with_styles(self, styles: Mapping[str, str]) -> Conversion:
        """With these in the plan for the names that it has none for."""
        names = names_of(self.program) if styles else []
        own = {name: styles[name] for name in names if name in styles}
        return replace(self, plan=self.plan.completed(own, names)) if own else self

    def planned(self, plan: Plan, after: After) -> PlannedProgram:
        plan = plan.as_found() if plan.searches else plan
        with no_new_guards(self.program.graph):
            flat = flatten_branches(self.program, plan, self.mesh)
            if flat is not self.program:
                flat = after(flat, "flatten_branches")
            planned = after(apply_plan(flat, plan, self.mesh, *self.boundary), "apply_plan")
            planned = replace(planned, notes=(*planned.notes, *self.dropped))
            joined = after(join_branches(planned), "join_branches")
            spread = after(spread_experts(joined), "spread_experts")
            divided = after(divide_sizes(spread, self.device), "divide_sizes")
            return after(attend_in_turns(divided, self.device), "attend_in_turns")

    def finished(
        self,
        marked: MarkedProgram,
        plan: Plan,
        adviser: Adviser,
        aim: Aim,
        remarks: Callable[[ParallelProgram], Iterable[Note]],
    ) -> ParallelProgram:
        """All passes from a marked program up to the program for all ranks. `plan`: with what the search found."""
        with no_new_guards(marked.graph):
            resharded = self.after(insert_reshards(marked), "insert_reshards")
            folded = self.after(fold_reshards(resharded), "fold_reshards")
            routed = self.after(choose_paths(folded, aim.machine), "choose_paths")
        inputs, outputs = map(_said, self.boundary)
        asked = {
            "mesh": dict(self.mesh.axes),
            "inputs": inputs,
            "outputs": outputs,
            "machine": basename(aim.machine.name),
        }
        if self.collectives != "nccl":
            asked["collectives"] = self.collectives
        if not self.check_indices:
            asked["check_indices"] = False
        if aim.gathers:
            asked["plan"] = "auto:free"
        elif self.plan.searches and len(self.plan.entries) > 1 and self.plan.to_data() != plan.to_data():
            asked["plan"] = self.plan.to_data()
        made = ParallelProgram(
            self.exported,
            Partition(routed, self.device, self.collectives, aim.machine),
            plan,
            asked,
            lambda value: "" if plan.searches else adviser.advise_gather(value, marked),
            remarks,
        )
        self.after(made.partition.local_program(0), "lowered_rank_0")
        return made


def share_conversions(conversions: Mapping[str, Conversion]) -> dict[str, Conversion]:
    """Several programs, each with the entries of the plan that it uses.

    Raises:
        PlanError: an entry matches in none of them.
    """
    programs = [own.program for own in conversions.values()]
    held, used = [names_of(each) for each in programs], [names_of(each, used=True) for each in programs]
    plans = share_plan([own.plan for own in conversions.values()], held, used)
    return {name: replace(own, plan=plan) for (name, own), plan in zip(conversions.items(), plans, strict=True)}


def finished_together(conversions: Mapping[str, Conversion], aim: Aim | None = None) -> dict[str, ParallelProgram]:
    """The programs, with every leaf that several have placed alike.

    Raises:
        ProgramError: a leaf of one name that is not one tensor.
        ShardingError: no placement suits all programs.
    """
    return solved_together(conversions, aim)[1]


def solved_together(
    conversions: Mapping[str, Conversion], aim: Aim | None = None
) -> tuple[Solution, dict[str, ParallelProgram]]:
    """As `finished_together`, with what the search found."""
    aim = aim or Aim()
    if len(conversions) > 1:
        _same_leaves(conversions)

    def adviser_of(at: int, name: str) -> Adviser:
        def planned(plan: Plan) -> list[PlannedProgram]:
            return [c.planned(plan if other == name else c.plan, _unseen) for other, c in conversions.items()]

        return Adviser(conversions[name].plan, planned, at, Aim(aim.machine))

    advisers = {name: adviser_of(at, name) for at, name in enumerate(conversions)}
    try:
        planned, found, marked, plans = _marked(conversions, aim)
    except ShardingError as error:
        if next(iter(conversions.values())).plan.searches:
            raise
        advised = (adviser.advise_error(error) for adviser in advisers.values())
        raise next((each for each in advised if each is not error), error) from None
    remarks = Remarks(planned, found, aim)

    def remarks_on(at: int, program: ParallelProgram) -> Iterable[Note]:
        return remarks.notes(at, program.predict(aim.machine).total) if program.plan.searches else ()

    made = {
        name: own.finished(marked[name], plans[name], advisers[name], aim, partial(remarks_on, at))
        for at, (name, own) in enumerate(conversions.items())
    }
    return found, made


def plan_found(conversions: Mapping[str, Conversion], aim: Aim | None = None) -> Plan:
    """The plan with what the search finds for the layers of all programs that it does not name.

    Raises:
        ShardingError, ProgramError: as `finished_together`.
    """
    if len(conversions) > 1:
        _same_leaves(conversions)
    conversions, _, _, found = _placed(conversions, aim or Aim())
    plan = join_plans([own.plan for own in conversions.values()])
    return plan.completed(found.styles, (n for own in conversions.values() for n in names_of(own.program)))


def find_placements(conversions: Sequence[Conversion], aim: Aim) -> Solution:
    """What the search finds for programs that are converted together.

    Raises:
        ShardingError: no placement suits all programs.
    """
    return _placed({str(at): conversion for at, conversion in enumerate(conversions)}, aim)[3]


def _marked(
    conversions: Mapping[str, Conversion], aim: Aim
) -> tuple[Sequence[PlannedProgram], Solution, dict[str, MarkedProgram], dict[str, Plan]]:
    """The programs before the search, what it found, every program marked, and its plan with what was found."""
    conversions, planned, programs, found = _placed(conversions, aim)
    marked, plans = dict[str, MarkedProgram](), dict[str, Plan]()
    with no_new_guards(*(program.graph for program in programs)):
        for (name, conversion), program in zip(conversions.items(), programs, strict=True):
            placed, plan = mark_placements(program, found, check_indices=conversion.check_indices), conversion.plan
            marked[name] = conversion.after(placed, "mark_placements")
            names = names_of(conversion.program)
            plans[name] = Plan() if aim.gathers else plan.completed(found.styles, names) if plan.searches else plan
    return planned, found, marked, plans


def _placed(
    conversions: Mapping[str, Conversion], aim: Aim
) -> tuple[Mapping[str, Conversion], Sequence[PlannedProgram], list[PlannedProgram], Solution]:
    """What is converted, with the forms that the search took in the plans; the programs before they are placed, and
    placed; and what was found.

    Raises:
        TooLarge, ShardingError: as `place`.
    """
    read = Known()
    best = _attempted(conversions, aim, read)
    if not best.searches or aim.gathers or not aim.forms:
        return best.placed()
    for find in FINDERS:
        base = Base(best.planned, best.found, aim.machine, next(iter(conversions.values())).device, best.is_tight)
        with contextlib.suppress(TpCompilerError):  # what a form cannot have
            formed = {name: own.with_styles(dict(find(base))) for name, own in best.conversions.items()}
            if any(own.plan != best.conversions[name].plan for name, own in formed.items()):
                best = min(best, _attempted(formed, aim, read), key=lambda each: each.rank)
    used, planned, kept, found = best.placed()
    notes = [Note("search", text) for text in _without_forms(used, found, aim, read)]
    return used, planned, [replace(program, notes=(*program.notes, *notes)) for program in kept], found


class _Attempt(NamedTuple):
    """Programs in one form, and what the search finds for them. `error`: where nothing fits, and `kept` is empty."""

    conversions: Mapping[str, Conversion]
    planned: Sequence[PlannedProgram]
    kept: list[PlannedProgram]
    found: Solution
    error: TooLarge | None

    @property
    def searches(self) -> bool:
        return next(iter(self.conversions.values())).plan.searches

    @property
    def is_tight(self) -> bool:
        return self.error is not None or self.found.is_tight

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: the fastest call that fits, or what holds least."""
        return (0, self.found.seconds) if self.error is None else (1, self.error.least.total)

    def placed(self) -> tuple[Mapping[str, Conversion], Sequence[PlannedProgram], list[PlannedProgram], Solution]:
        if self.error is not None:
            raise self.error
        return self.conversions, self.planned, self.kept, self.found


def _attempted(conversions: Mapping[str, Conversion], aim: Aim, read: Known) -> _Attempt:
    planned = [own.planned(own.plan, own.after) for own in conversions.values()]
    with no_new_guards(*(program.graph for program in planned)):
        try:
            kept, found = place(planned, next(iter(conversions.values())).plan.searches, aim, read)
        except TooLarge as error:
            return _Attempt(conversions, planned, [], error.found, error)
    return _Attempt(conversions, planned, kept, found, None)


def _without_forms(conversions: Mapping[str, Conversion], found: Solution, aim: Aim, read: Known) -> Iterator[str]:
    """What a call would take, and a rank would hold, without each of the forms, with all else as it was found."""
    plans = [own.plan.completed(found.styles, names_of(own.program)) for own in conversions.values()]
    for style in dict.fromkeys(entry.style.name for plan in plans for entry in plan.forms.entries):
        ruled = (plan.assign(names_of(own.program)) for own, plan in zip(conversions.values(), plans, strict=True))
        named = dict.fromkeys(name for own in ruled for name, entry in own.items() if entry.style.name == style)
        alike = Counter(map(fold_layers, named))
        others = (replace(plan, entries=tuple(e for e in plan.entries if e.style.name != style)) for plan in plans)
        planned = [own.planned(plan, _unseen) for own, plan in zip(conversions.values(), others, strict=True)]
        with no_new_guards(*(program.graph for program in planned)):
            other = search(planned, aim.objective, True, read=read)
        if not math.isinf(other.seconds):
            call = duration(measure_step_time(other, collectives_of(other), aim.machine).total)
            held = format_bytes(measure_memory(other).total)
            said = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in alike.items())
            yield f"{style}: {said}; without it a call would take {call} and a rank would hold about {held}"


def _unseen(program: P, name: str) -> P:
    return program


def _said(boundary: Boundary) -> Any:
    """The placements that a caller gave, as plain data."""
    if boundary is None:
        return None
    if isinstance(boundary, Mapping):
        return {name: format_spec(spec) for name, spec in boundary.items()}
    return [spec and format_spec(spec) for spec in boundary]


def asked_boundary(manifest: Manifest, at: Literal["inputs", "outputs"]) -> Any:
    """The placements of inputs or outputs that an artifact was asked for, as `parallelize` takes them."""
    said = manifest.asked.get(at)
    if isinstance(said, dict):
        return {name: _spec(spec) for name, spec in said.items()}
    return said and [spec and _spec(spec) for spec in said]


def _spec(said: Any) -> Any:
    if isinstance(said, dict):
        return {axis: parse_placement(each) for axis, each in said.items()}
    return parse_placement(said)


def _same_leaves(conversions: Mapping[str, Conversion]) -> None:
    first: dict[str, tuple[str, CanonicalProgram]] = {}
    for name, conversion in conversions.items():
        for _, fqn in conversion.program.leaves():
            known, program = first.setdefault(fqn, (name, conversion.program))
            ours, theirs = conversion.program.state(fqn), program.state(fqn)
            # Of weights without values a checkpoint says, by name, what they are.
            unknown = isinstance(ours, FakeTensor) and isinstance(theirs, FakeTensor)
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype or not (unknown or same_bits(ours, theirs)):
                raise ProgramError(
                    f"'{fqn}' is {list(theirs.shape)} of {theirs.dtype} in program '{known}' and {list(ours.shape)} of "
                    f"{ours.dtype} in '{name}', or its values differ",
                    help="export all programs from one model, one after the other, with nothing run in between",
                )


class Dump:
    """Checks each stage, and writes its text where a directory was given."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.count = 0

    def __call__(self, program: P, name: str) -> P:
        if self.directory is not None:
            check_invariants(program)
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{self.count:02}_{name}.txt").write_text(program_text(program), encoding="utf-8")
            self.count += 1
        return program
