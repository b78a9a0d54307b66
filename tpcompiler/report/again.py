"""The search for an artifact's placements, posed again from its own files, and what other choices would cost."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import fx

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.artifact.summary import SearchedPlan, summarize, summary_parts
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.errors import TpCompilerError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Constraint, Dims
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of
from tpcompiler.ir.program import PlannedProgram, relax
from tpcompiler.ir.sharding import Sharding
from tpcompiler.parallel.advice import MOST_WHOLE
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.converted_program import ConvertedProgram, convert_programs
from tpcompiler.parallel.pipeline import find_placements, make_task, solve_task
from tpcompiler.passes.place import refuse_misfits
from tpcompiler.passes.regions.attend_in_turns import ATTENTION
from tpcompiler.plan.plan import Plan
from tpcompiler.plan.styles import STYLES
from tpcompiler.runtime.artifact import families, is_single
from tpcompiler.solver.estimate import measure_leaves, measure_priced, sends_of
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Task
from tpcompiler.solver.what_if import Otherwise, price_otherwise
from tpcompiler.terminal.tables import Part


class Price(NamedTuple):
    """A choice over the last of `axes`, and the totals of the whole program with it.

    `wire_bytes` of a call and `held_bytes` of weights are of one rank, `seconds` as in docs/search.md: None if no
    placement has the choice, or if the one that the search finds cannot be used; `failed` is the reason. `sends`: the
    collectives of values that the call reads or makes, by kind. `form`: the style that it needs.
    """

    axes: tuple[str, ...]
    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    wire_bytes: int | None
    held_bytes: int | None
    seconds: float | None
    failed: str = ""
    sends: tuple[str, ...] = ()
    form: str = ""


@dataclass(frozen=True)
class Again:
    """The search's result for an artifact, together with the programs that share its weights.

    Attributes:
        at: which of the programs the artifact's is.
        task: the input of the search, with the problems that it solved.
        forms: styles of forms that the search took, by the wording of their entries in the artifact's plan.
    """

    found: Solution
    task: Task
    at: int
    machine: Machine
    conversions: Sequence[Conversion]
    forms: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> PlannedProgram:
        return self.found.programs[self.at]

    def pinned_by(self, leaf: fx.Node) -> str:
        """The entry of the plan, or the form that the search took, that places a leaf; empty if none does."""
        constraint = self.program.planned.get(leaf.name)
        return self._pinned_by(constraint.asked_by) if constraint else ""

    def layer_pinned_by(self, name: str) -> str:
        """The entries of the plan that place leaves of the same layer as `name`; empty if none does."""
        planned = [own for own in self.program.planned.values() if layer_of(own.leaf) == layer_of(name)]
        return " and ".join(dict.fromkeys(self._pinned_by(own.asked_by) for own in planned))

    def _pinned_by(self, asked_by: str) -> str:
        form = self.forms.get(asked_by)
        return f"the search: {form}" if form else f"pinned by {asked_by}"

    def prices(self, value: fx.Node, layers: Collection[str]) -> list[Price]:
        """Price every choice of a call or a leaf, with all else free to follow, and without a plan for `layers`."""
        programs = [
            relax(program, lambda own: layer_of(own.leaf) in layers, partial(_relaxed, program, self.found.model))
            for program in self.found.programs
        ]
        task = self.task
        if programs != [*self.found.programs]:  # no other question has these: what is found for them goes with them
            task = replace(task, known=Memo(task.known), kept=Memo())
        with no_new_guards(*(program.graph for program in programs)):
            around = [value] if value.op == "call_function" else []
            choices = price_otherwise(replace(self.found, programs=programs), value, task)
            return [self._price(each, around) for each in choices]

    def price_turns(self, call: fx.Node, axes: tuple[str, ...]) -> Price | None:
        """Price attention in turns, a form of the program; None if the call does not attend to sharded steps.

        Args:
            axes: those of the other choices of the call, next to which this one is listed.
        """
        module, style = edit.module_path(call), "attend_in_turns"
        axis, qkv = STYLES[style].axis_on(self.found.mesh), edit.operands(call)[:3] if call.target is ATTENTION else []
        if not module or not any(axis in self.found.seen(operand).dims[-2].axes for operand in qkv):
            return None
        try:
            formed = [each.with_styles({module: style}) for each in self.conversions]
            found = find_placements(formed, forms=False)
        except TpCompilerError as error:
            return Price(axes, (), (), None, None, None, failed=error.message, form=style)
        inside = {node.name: node for node in edit.calls(found.programs[self.at].graph)}
        made = (found.seen(inside[call.name]),)
        around = [node for node in inside.values() if edit.module_path(node) == module]
        return self._price(Otherwise(axes, (), made, found), around)._replace(form=style)

    def _price(self, choice: Otherwise, around: Sequence[fx.Node]) -> Price:
        own, found = (choice.axes, choice.wants, choice.made), choice.solution
        if math.isinf(found.seconds):
            return Price(*own, None, None, None)
        try:
            refuse_misfits(found.programs[self.at], found)
        except TpCompilerError as error:  # such as a packed style whose uses show no parts then
            return Price(*own, None, None, None, failed=error.message)
        alone = replace(found, programs=[found.programs[self.at]])
        sends = list(sends_of(alone))
        near = {value for call in around for value in (*edit.operands(call), *(made for made, _ in edit.results(call)))}
        return Price(
            *own,
            sum(wire_bytes for _, (*_, wire_bytes) in sends),
            sum(measure_leaves(alone).values()),
            found.seconds - self.task.objective.storage_seconds(measure_priced(found)),
            sends=count_kinds(kind for value, (kind, *_) in sends if value in near),
        )


def count_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the number of each kind, as in `4 all_to_all`."""
    return tuple(f"{count} {kind}" for kind, count in Counter(kinds).items())


def search_again(program: ArtifactProgram, machine: Machine) -> Again:
    """Convert a program, and those that share its weights, up to the placements.

    Raises:
        ArtifactError: the single-device program is missing, damaged or, without trust, could run code.
    """

    def find() -> Again:
        conversions, at, forms = _conversions(program, machine)
        task = replace(make_task(conversions, forms=False), kept=Memo())
        return Again(solve_task(task), task, at, machine, conversions, forms)

    return program.known.once(("again", machine), find)


def advise(program: ArtifactProgram, machine: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Search for the change of the plan that leaves out each fallback, by the name of its reshard.

    Nothing for a program without fallbacks, for one whose placements the search has chosen, and for one that cannot be
    converted again.

    Raises:
        MachineError: the description of the machine cannot be read.
    """
    described = machine_of(program.manifest.asked, machine)
    if not any(record.why == "fallback" for record in program.manifest.collectives):
        return {}
    if isinstance(program, ConvertedProgram) and machine is None:
        return program.advice()
    with contextlib.suppress(TpCompilerError):
        if (again := _convert_again(program, described)) is not None:
            return again.advice()
    return {}


def report_parts(programs: Mapping[str, ArtifactProgram]) -> Iterator[Part]:
    """Report each program of an artifact, and the plan of the search if theirs leaves much whole."""
    for at, (name, program) in enumerate(programs.items()):
        if not is_single(programs):
            yield from ([""] if at else [])
            yield name
        yield from summary_parts(summarize(program.describe()), advise(program))
        if isinstance(program, ConvertedProgram) and program.searches:
            yield program.searches
    searched = find_searched_plan(programs)
    yield from [searched.text] if searched is not None else []


def find_searched_plan(programs: Mapping[str, ArtifactProgram]) -> SearchedPlan | None:
    """Search for a plan for the programs of one model, if theirs leaves much whole without naming it.

    None for several models: a plan for one says nothing of the others.

    Raises:
        MachineError: the description of the machine cannot be read.
    """
    program, *others = (next(iter(own.values())) for own in families(programs, lambda each: each.manifest.family))
    if others:
        return None
    if isinstance(program, ConvertedProgram):
        return program.searched_plan()
    summaries = [summarize(each.manifest) for each in program.together()]
    rows = {row.name: row for each in summaries for row in each.tensors if row.tied_to is None}.values()
    whole = sum(row.bytes for row in rows if min(row.bytes_per_rank) == row.bytes)
    if whole <= MOST_WHOLE * sum(row.bytes for row in rows):
        return None
    with contextlib.suppress(TpCompilerError):
        if (again := _convert_again(program, machine_of(program.manifest.asked))) is not None:
            return again.searched_plan()
    return None


def _convert_again(program: ArtifactProgram, machine: Machine) -> ConvertedProgram | None:
    """Convert a program and those that share its weights; None if the search has chosen its placements."""

    def convert() -> ConvertedProgram | None:
        conversions, at, _ = _conversions(program, machine)
        named = {str(number): conversion for number, conversion in enumerate(conversions)}
        return None if conversions[at].plan.searches else convert_programs(named)[1][str(at)]

    return program.known.once(("converted", machine), convert)


def _conversions(program: ArtifactProgram, machine: Machine) -> tuple[list[Conversion], int, dict[str, str]]:
    """Return the conversions of the programs that share a program's weights, its own index, and the search's forms."""
    together = program.together()
    conversions, taken = list[Conversion](), dict[str, str]()
    for each in together:
        manifest = each.manifest
        plan, said = Plan.of(manifest.plan), manifest.asked.plan
        gathers = said == "auto:free"
        if gathers or plan.searches:  # in the manifest a plan is with what the search found
            found = Plan.of(said if isinstance(said, dict) else {}).with_search()
            named = {entry.pattern for entry in found.entries}
            forms = [entry for entry in plan.forms.as_found().entries if entry.pattern not in named]
            taken |= {entry.where: entry.style.name for entry in forms}
            plan = replace(found, entries=(*found.entries, *forms), gathers=gathers)
        mesh = Mesh.of(manifest.mesh)
        conversions.append(Conversion.of(each.original(), mesh, plan, manifest.asked, machine, manifest.device_type))
    return conversions, together.index(program), taken


def _relaxed(program: PlannedProgram, model: tuple[str, ...], constraint: Constraint) -> Constraint | None:
    """Leave a weight to the search; with a plan, let it be cut along any dim, or whole, and let other leaves follow."""
    ndim = constraint.sharding.ndim
    if program.is_searched or ndim < 2:
        return None
    cut, whole = DimSharding.by(*model), Sharding.replicated(ndim)
    each = (whole.with_dim(dim, cut) for dim in range(ndim))
    return replace(constraint, allowed=Dims((constraint.sharding, *each, whole)))
