"""Find forms of a program that the search may try although no style requests them.

The forms are experts that tokens are sent to, dealt-out experts, norms on shares of the sequence, attention in turns,
and parameters in shards. Each finder is a cheap necessary condition on the solution without the form; the search
decides if the form pays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from tpcompiler.cost.fusion import factors_of_product, is_attention
from tpcompiler.cost.objective import local_bytes
from tpcompiler.cost.timeline import duration
from tpcompiler.ir import edit
from tpcompiler.ir.leaf_values import computed_from_leaves
from tpcompiler.ir.local import no_new_guards
from tpcompiler.ir.names import fold_layers
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import are_equal, sym_quotient
from tpcompiler.passes._expert_rows import ExpertRows, find_matmuls, find_routes, find_tables, leaf_behind
from tpcompiler.passes.regions.attend_in_turns import ATTENTION, STEPS, misfit
from tpcompiler.plan.plan import Plan
from tpcompiler.plan.styles import STYLES
from tpcompiler.rules.registry import rule_of
from tpcompiler.solver.estimate import measure_memory, measure_step_time, seconds_of_ops, sends_of
from tpcompiler.solver.search import PLACING, solve
from tpcompiler.solver.solution import Solution
from tpcompiler.solver.task import Finder, Task
from tpcompiler.terminal.printed import format_bytes


class _Placed(NamedTuple):
    """A program, and the nodes of the same names in the solution, where some ops may be replaced by simpler ones."""

    program: PlannedProgram
    found: Solution
    at: int  # its number among the programs
    nodes: Mapping[str, fx.Node]

    @classmethod
    def all(cls, found: Solution) -> Iterator[_Placed]:
        for at, (program, placed) in enumerate(zip(found.given, found.programs, strict=True)):
            yield cls(program, found, at, {node.name: node for node in placed.graph.nodes})

    def sharding(self, value: fx.Node) -> Sharding | None:
        """Return the sharding that users see of a value of the program."""
        own = self.nodes.get(value.name)
        return None if own is None else self.found.seen(own)

    def is_changed_for(self, node: fx.Node, operands: set[str]) -> bool:
        """Return True if an op runs as simpler ones, or needs some of these operands resharded."""
        own = self.nodes.get(node.name)
        if own is None or (self.at, node.name) in self.found.simpler:
            return True
        wants = self.found.choices[own].wants if own in self.found.choices else ()
        pairs = zip(edit.operands(own), wants, strict=False)
        return any(operand.name in operands and self.sharding(operand) != want for operand, want in pairs)


def find_experts(found: Solution) -> Iterator[tuple[str, str]]:
    """Yield the weights of experts that could be dealt out.

    If experts are sharded evenly inside, and nothing is sent between their matmuls, dealing them out saves nothing.
    """
    for placed in _Placed.all(found):
        program, style = placed.program, STYLES["grouped_gemm"]
        mesh, fqns = program.mesh, dict(program.leaves())
        axis = style.axis_on(mesh)
        ranks = mesh.degree(axis)
        for own in find_matmuls(program.graph) if ranks > 1 and not mesh.is_unequal([axis]) else ():
            matrices = [leaf_behind(edit.operands(call)[1]) for call in own.calls]
            tables = [leaf_behind(table.value) for _, table in find_tables(own)]
            weights = [leaf for leaf in matrices if leaf is not None and leaf in fqns]
            if len(weights) < len(matrices) or any(edit.shape(leaf)[0] % ranks for leaf in weights):
                continue
            if _is_paid_inside(own, weights, placed, mesh.size(tuple({axis, mesh.model_axis}))):
                experts = edit.shape(weights[0])[0]
                by_expert = [leaf for leaf in tables if leaf in fqns and edit.shape(leaf)[0] == experts]
                yield from ((fqns[leaf], style.name) for leaf in (*weights, *by_expert))


def _is_paid_inside(rows: ExpertRows, weights: Sequence[fx.Node], placed: _Placed, ranks: int) -> bool:
    inner = {node.name for node in rows.steps}
    shares = ((edit.fake(leaf), placed.sharding(leaf)) for leaf in weights)
    held = sum(local_bytes(value, own, placed.found.mesh) for value, own in shares if own is not None)
    is_uneven = held * ranks > sum(edit.fake(leaf).numel() * edit.fake(leaf).element_size() for leaf in weights)
    return is_uneven or any(placed.is_changed_for(node, inner) for node in rows.steps)


def find_dispatch(found: Solution) -> Iterator[tuple[str, str]]:
    """Yield the weights of experts that sharded tokens could be sent to.

    A rank has as many slots for a token as experts, so it gains only if a token has more rows than a rank has experts.
    """
    style = STYLES["dispatch_experts"]
    for placed in _Placed.all(found):
        program, mesh = placed.program, placed.program.mesh
        axis, fqns = style.axis_on(mesh), dict(program.leaves())
        inputs = (program.constraints[node.name].sharding for node in program.user_inputs())
        is_cut = (
            not mesh.is_unequal([axis]) and mesh.degree(axis) > 1 and any(axis in sharding.axes for sharding in inputs)
        )
        for route in find_routes(program.graph) if is_cut else ():
            tokens = (placed.nodes.get(source.value.name) for source in route.rows.sources.values() if source.repeats)
            each, left = divmod(route.experts, mesh.degree(axis))
            if left or route.chosen <= each or not any(own and axis in found.sharding(own).axes for own in tokens):
                continue
            values = [edit.operands(call)[1] for call in route.rows.calls]
            values += [source.value for source in route.rows.sources.values() if not source.repeats]
            leaves = [leaf_behind(value) for value in values]
            if all(leaf in fqns for leaf in leaves):
                yield from ((fqns[leaf], style.name) for leaf in leaves if leaf is not None)


def find_norms(found: Solution) -> Iterator[tuple[str, str]]:
    """Yield the norms between products that could work on shares of dim 1, and leave shares to the sums before them.

    If memory suffices, a norm is yielded only if the ranks' duplicate work and traffic inside norms takes longer than a
    reduce_scatter and an all_gather instead of each all_reduce.
    """
    names = dict.fromkeys(name for placed in _Placed.all(found) for name in _find_norms(placed))
    if names and (found.lacks_memory or _most_saved(found, names) > 0):
        yield from ((name, "sequence_parallel") for name in names)


def _find_norms(placed: _Placed) -> Iterator[str]:
    program = placed.program
    axis, ranks = program.mesh.model_axis, program.mesh.degree(program.mesh.model_axis)
    static = computed_from_leaves(program.graph, {leaf for leaf, _ in program.leaves()})
    fitting = {
        name: (members, given)
        for name, members in _innermost(program.graph).items()
        if ranks > 1
        and not program.mesh.is_unequal([axis])
        and (given := _given(members, static))
        and _has_shares(members, given, ranks)
    }
    heavy = set[fx.Node]()  # products, and values that depend on one
    for node in edit.calls(program.graph) if fitting else ():
        if _is_product(node) or not heavy.isdisjoint(node.all_input_nodes):
            heavy.add(node)
    for name, (members, given) in fitting.items():
        shares = [placed.sharding(value) for value in given]
        is_apart = all(own is not None and axis not in own.dims[1].axes for own in shares)
        if is_apart and given <= heavy and not any(map(_is_product, members)):
            yield name


def _innermost(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the ops of each module that contains no other module."""
    modules, outer = dict[str, list[fx.Node]](), {""}
    for node in edit.calls(graph):
        *around, own = edit.module_paths(node) or [""]
        modules.setdefault(own, []).append(node)
        outer.update(around)
    return {name: members for name, members in modules.items() if name not in outer}


def _given(members: Sequence[fx.Node], static: Set[fx.Node]) -> set[fx.Node]:
    """Return the values that a module takes from outside."""
    inside = {*members, *static}
    return {value for node in members for value in edit.operands(node) if value not in inside}


def _has_shares(members: Sequence[fx.Node], given: Set[fx.Node], ranks: int) -> bool:
    """Return True if all inputs and results of a module are [samples, steps, features] with evenly divisible steps."""
    inside = set(members)
    made = [node for node in members if any(user not in inside for user in node.users)]
    if not all(map(edit.is_tensor, (*given, *made))):
        return False
    first, *others = (edit.shape(value) for value in (*given, *made))
    return (
        len(first) == 3 and sym_quotient(first[1], ranks) is not None and all(are_equal(each, first) for each in others)
    )


def _most_saved(found: Solution, names: Mapping[str, Any]) -> float:
    """Return an upper bound on the seconds saved if these norms work on shares."""
    mesh, axes = found.mesh, found.model
    alike = (
        seconds
        for node, seconds in seconds_of_ops(found, found.machine)
        if not _is_product(node) and not any(made.axes & set(axes) for made in found.choices[node].made)
    )
    saved = sum(alike) * (1 - 1 / mesh.size(axes))
    for value, (kind, over, count) in sends_of(found):
        name = edit.module_path(value)
        is_inside = name in names and all(edit.module_path(user) == name for user in value.users)
        one, *two = (
            found.machine.collective_seconds(each, over, count / parts, mesh)
            for each, parts in ((kind, 1), ("reduce_scatter", 2), ("all_gather", 2))
        )
        saved += one if is_inside else one - sum(two) if kind == "all_reduce" else 0.0
    return saved


def _is_product(node: fx.Node) -> bool:
    return bool(edit.outputs(node)) and (is_attention(node) or factors_of_product(node, rule_of(node)) is not None)


def find_attention(found: Solution, device: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that attend over sharded steps, if memory is short."""
    for placed in _Placed.all(found) if found.lacks_memory else ():
        program = placed.program
        axis = STYLES["attend_in_turns"].axis_on(program.mesh)
        if program.mesh.degree(axis) == 1 or program.mesh.is_unequal([axis]):
            continue
        modules: dict[str, list[bool]] = {}
        for node in edit.calls(program.graph):
            if node.target is ATTENTION:
                own = [placed.sharding(operand) for operand in edit.operands(node)[:3]]
                is_cut = any(each is not None and len(each.dims) == 4 and axis in each.dims[STEPS].axes for each in own)
                fits = is_cut and not misfit(node, axis, program.mesh, device, dynamic=True)
                modules.setdefault(edit.module_path(node), []).append(fits)
        yield from ((name, "attend_in_turns") for name, fit in modules.items() if name and all(fit))


def find_resting(found: Solution) -> Iterator[tuple[str, str]]:
    """Yield all parameters, to be held in shards over the axes that cut samples, if nothing else fits."""
    for program in found.given if found.too_large is not None else ():
        inputs = (program.constraints[node.name].sharding.axes for node in program.user_inputs())
        axes = {axis for own in inputs for axis in own} - {program.mesh.model_axis}
        graded = {name for _, name in program.gradients()}
        if axes and not program.resting and not program.mesh.is_unequal(axes):
            style = f"shard_at_rest({program.mesh.ordered(axes)[0]})"
            yield from ((fqn, style) for _, fqn in program.leaves() if fqn in graded)


def find_forms(device: str) -> list[Finder]:
    """Return the finders for a device, in the order in which the search tries their forms."""
    return [find_dispatch, find_experts, find_norms, partial(find_attention, device=device), find_resting]


def note_forms(
    task: Task,
    found: Solution,
    plans: Sequence[Plan],
    names: Sequence[Sequence[str]],
    plan_programs: Callable[[Sequence[Plan]], Sequence[PlannedProgram]],
) -> list[str]:
    """Report the time of a call, and the memory of a rank, without each of the forms, with all else as it was found."""
    notes = []
    for style in dict.fromkeys(entry.style.name for plan in plans for entry in plan.forms.entries):
        ruled = (plan.assign(own) for own, plan in zip(names, plans, strict=True))
        named = dict.fromkeys(name for own in ruled for name, entry in own.items() if entry.style.name == style)
        if STYLES[style].rests:
            named = dict.fromkeys(entry.pattern for plan in plans for entry in plan.entries if entry.style.rests)
        alike = Counter(map(fold_layers, named))
        others = (replace(plan, entries=tuple(e for e in plan.entries if e.style.name != style)) for plan in plans)
        programs = plan_programs([*others])
        with no_new_guards(*(program.graph for program in programs)):
            other = solve(replace(task, programs=programs), PLACING)
        if not math.isinf(other.seconds):
            call = duration(measure_step_time(other, found.machine).total)
            held = format_bytes(measure_memory(other).total)
            layers = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in alike.items())
            notes.append(f"{style}: {layers}; without it a call would take {call} and a rank would hold about {held}")
    return notes
