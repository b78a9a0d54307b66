"""Resolve a plan to placements on leaves and values of a graph."""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import fx
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError, ShardingError, option
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.constraints import AnyStyle, AsUsed, AtRest, Constraint, Dims, Exactly, Over
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.leaf_values import LeafValues
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers, layer_of, modules_around, weight_of
from tpcompiler.ir.placements import PlacementSpec
from tpcompiler.ir.program import DISPATCH, PIN, UNCUT, AxisRequest, CanonicalProgram, Note, PlannedProgram, pin, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import fitted
from tpcompiler.ir.text import value_text
from tpcompiler.passes.regions.attend_in_turns import ask_for_turns
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.plan.styles import Style
from tpcompiler.rules.registry import rule_of
from tpcompiler.rules.weight_features import feature_dims, is_addend

PINNED_KINDS = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)  # a gradient is placed as its parameter is
Leaves = Mapping[str, Mapping[str, fx.Node]]  # by layer
Boundary = Mapping[str, PlacementSpec] | Sequence[PlacementSpec | None] | None


def apply_plan(
    program: CanonicalProgram, plan: Plan, mesh: Mesh, inputs: Boundary = None, outputs: Boundary = None
) -> PlannedProgram:
    """Resolve plan entries to constraints on leaves, and to `pin` nodes on values; pin the boundary.

    Before    x, w1 = up.weight                       plan: up: colwise_gather_output
              h = linear(x, w1)
              return h
    After     x, w1 = up.weight                       constraints: x: R, w1: dim 0
              h = linear(x, w1)
              pin_1: R = pin(h)                       asked by the plan
              pin_2: R = pin(pin_1)                   asked by the boundary
              return pin_2

    A style names features, so the weight dim that it shards is read off the rule of the op that uses the weight. If the
    plan leaves the rest to the search, most of its requests for leaves only narrow what the search may find.

    Raises:
        PlanError: an entry matches nothing, or its style does not fit the layer.
        ShardingError: a placement that the tensor cannot have.
    """
    graph = edit.copy_graph(program.graph)
    planned = CanonicalProgram(program.source, graph)
    leaves = {fqn: node for node, fqn in planned.leaves()}
    values = LeafValues(graph)
    static = values.of(set(leaves.values()))
    mutated = {name for _, name in planned.mutations()}
    constant = values.of({node for fqn, node in leaves.items() if fqn not in mutated})
    owned: dict[str, dict[str, fx.Node]] = {}
    weights: dict[str, dict[str, fx.Node]] = {}
    for fqn, node in leaves.items():
        for layer in {layer_of(fqn), fqn.rpartition(".")[0]}:  # "up.base_layer.weight": both "up" and "up.base_layer"
            owned.setdefault(layer, {})[fqn] = node
        for name in {fqn, weight_of(fqn)}:
            weights.setdefault(name, {})[fqn] = node
    aliases = _aliases(planned)
    assigned, used = plan.assign(names_of(planned)), {*names_of(planned, used=True)}
    busy = {entry.where for name, entry in assigned.items() if name in used}
    # Of the layers that a pattern matches, a tower may leave out the last.
    assigned = {name: entry for name, entry in assigned.items() if name in used or entry.where not in busy}
    assigned = {name: entry for name, entry in assigned.items() if not _runs_elsewhere(name, owned, assigned)}
    constraints: dict[str, Constraint] = {}
    undecided: dict[str, Constraint] = {}  # leaves of a layer whose style shards none of their dims
    cutting = [name for name, entry in assigned.items() if entry.style.cut or entry.style.whole]
    calls = edit.calls_by_module(graph)
    wrapped = _find_wrapped(calls, cutting, owned, static)
    named: dict[str, str] = {}  # leaf -> the layer whose entry placed it
    for name in sorted(assigned, key=lambda n: n.count(".")):  # inner names override outer ones
        entry, weight = assigned[name], weights.get(name, {})
        own = owned.get(wrapped.get(name, name), {})
        found = _find_constraints(name, entry, leaves, weight, own, aliases, constant, values, mesh)
        if plan.searches and entry.style.whole and not weight:  # they follow the layer's weight
            found = {leaf: replace(each, allowed=Dims((each.sharding,))) for leaf, each in found.items()}
        for shared in () if weight else constraints.keys() & found.keys():
            if not name.startswith(f"{named[shared]}."):
                what = f"'{found[shared].leaf}' is one tensor that two layers use, but the plan places it"
                _refuse_two(constraints[shared], found[shared], what)
        constraints.update(found)
        if entry.style.dispatches:
            for fqn in (each.leaf for each in found.values()):
                leaves[fqn].meta[DISPATCH] = AxisRequest(entry.style.axis_on(mesh), entry.where)
        named.update(dict.fromkeys(found, name))
        if entry.style.cut and not weight:
            undecided |= {n.name: Constraint(AsUsed(), entry.where, fqn) for fqn, n in own.items()}
        _pin_module(calls, name, entry, static, mesh)
        ask_for_turns(calls.get(name, ()), name, entry, mesh)
    _tie(constraints, planned)
    names = set(program.source.graph_signature.parameters)
    parameters = {fqn: node for fqn, node in leaves.items() if fqn in names}
    placing = {name for name, entry in assigned.items() if entry.style.places}
    resting = _find_resting(parameters, aliases, plan, mesh)
    touched = {*constraints, *resting}
    notes = (*(Note("plan", text) for text in plan.notes), *_untouched(parameters, placing, touched))
    if plan.searches:
        constraints = {name: _leave_to_search(own, mesh) for name, own in constraints.items()}
    else:
        constraints = undecided | constraints
    constraints |= _constrain_inputs(planned, mesh, inputs)
    _pin_outputs(planned, mesh, outputs)
    rest = AnyStyle(gathers=plan.gathers) if plan.searches else AsUsed()
    return PlannedProgram(program.source, graph, mesh, constraints, notes, rest, resting)


def _find_resting(
    parameters: Mapping[str, fx.Node], aliases: Mapping[str, list[fx.Node]], plan: Plan, mesh: Mesh
) -> dict[str, AtRest]:
    """Return the parameters that the plan asks to be held in shards, by placeholder name; tied names as the first."""
    found: dict[str, AtRest] = {}
    for fqn, node in parameters.items():
        if entry := plan.find_resting(fqn):
            if entry.style.axis not in mesh.names:
                raise PlanError(
                    f"'{entry.style.written}' names no axis of the mesh {mesh}",
                    help=f"name one of {', '.join(mesh.names)}",
                    asked_by=entry.where,
                )
            if mesh.is_unequal([entry.style.axis]):
                raise PlanError(
                    f"'{entry.style.written}' holds equal shards, and {mesh} has unequal shares",
                    help="leave the entry out, or give the axis equal shares",
                    asked_by=entry.where,
                )
            for alias in aliases[node.name]:
                found.setdefault(alias.name, AtRest(entry.style.axis, entry.where))
    return found


def _leave_to_search(constraint: Constraint, mesh: Mesh) -> Constraint:
    """Let a constraint over the axis that the search decides only narrow the search.

    The search then finds what it would find without the entry if the entry agrees with its choice.
    """
    allowed, sharding = constraint.allowed, constraint.sharding
    assert isinstance(allowed, Exactly | Dims)
    is_by_parts = isinstance(allowed, Dims) and (allowed.needs_parts or any(cut.parts for cut in sharding.dims))
    if is_by_parts or sharding.partial or not sharding.axes <= {mesh.model_axis}:
        return constraint
    return replace(constraint, allowed=AnyStyle(within=allowed))


def names_of(program: CanonicalProgram, *, used: bool = False) -> list[str]:
    """Return the names that a plan may use: leaves, and the modules that hold them or ran an op.

    `used`: only leaves that ops take.
    """
    leaves = [fqn for node, fqn in program.leaves() if node.users or not used]
    names = dict.fromkeys((*leaves, *map(weight_of, leaves)))
    for fqn in leaves:
        while "." in fqn:
            fqn = fqn.rpartition(".")[0]
            names.setdefault(fqn)
    for node in edit.calls(program.graph):
        names.update(dict.fromkeys(edit.module_paths(node)))
    return list(names)


def _runs_elsewhere(name: str, owned: Leaves, assigned: Collection[str]) -> bool:
    """Return True if only other planned layers use a layer's leaves, as a stage's embedding a head's tied weight.

    A layer that contains this one does not count: torch's attention uses the weight of its output projection itself.
    """
    users = [user for node in owned.get(name, {}).values() for user in node.users]
    return bool(users) and all(
        name not in (paths := edit.module_paths(user))
        and any(other in assigned and not name.startswith(f"{other}.") for other in paths)
        for user in users
    )


def _over_axes(spec: PlacementSpec, mesh: Mesh) -> Mapping[str, Placement]:
    """Return placements by axis; one without an axis is over the axis that shards layers."""
    return spec if isinstance(spec, Mapping) else {mesh.model_axis: spec}


def _pin(value: fx.Node, constraint: Constraint, before: fx.Node, owner: fx.Node) -> fx.Node:
    """Insert a pin in the module of `owner`: a layer's output pin stays outside the layer that takes the output."""
    node = edit.insert_before(before, pin, (value,), "pin")
    node.meta.clear()
    edit.inherit_meta(node, owner)
    node.meta["val"] = edit.fake(value)
    node.meta[PIN] = constraint
    return node


def _pin_module(
    calls: Mapping[str, list[fx.Node]], name: str, entry: PlanEntry, static: Set[fx.Node], mesh: Mesh
) -> None:
    """Pin the values that enter and leave a module, as its style asks; the pins join the `calls` of their modules."""
    style = entry.style
    if not (style.inputs or style.outputs):
        return
    inside = [node for node in calls.get(name, ()) if not is_backward(node)]
    members = set(inside)
    results = [n for n in inside if edit.is_tensor(n) and any(u not in members and not is_backward(u) for u in n.users)]
    entering = dict.fromkeys(o for node in inside for o in edit.operands(node) if o not in members and o not in static)
    for what, specs, values in (("output", style.outputs, results), ("input", style.inputs, list(entering))):
        if len(specs) == 1:
            specs = specs * len(values)  # a layer called several times
        elif len(specs) > len(values):
            raise PlanError(
                f"style '{style.name}' gives {len(specs)} {what} placements, '{name}' has {len(values)} tensor {what}s",
                help="give one placement per tensor",
                asked_by=entry.where,
            )
        for value, spec in zip(values, specs, strict=False):
            if spec is None:
                continue
            spec = _over_axes(spec, mesh)
            sharding = _sharding(spec, mesh, edit.fake(value), f"the {what} of '{name}'", entry.where)
            users = [u for u in value.users if (u in members) == (what == "input")]
            before = min(users)
            allowed = Exactly((sharding,)) if len(mesh.axes) == 1 else Over((sharding,), tuple(spec))
            owner = before if what == "input" else value
            pinned = _pin(value, Constraint(allowed, entry.where), before, owner)
            for path in dict.fromkeys(edit.module_paths(pinned)):
                bisect.insort(calls[path], pinned)
            for user in users:
                user.replace_input_with(value, pinned)


def _aliases(program: CanonicalProgram) -> dict[str, list[fx.Node]]:
    """Map a placeholder name to all placeholders of the same tensor: exporters let one of them serve every use."""
    first_of = tied(program)
    groups: dict[str, list[fx.Node]] = {}
    for node, _ in program.leaves():
        groups.setdefault(first_of[node.name], []).append(node)
    return {name: groups[first] for name, first in first_of.items()}


def _tie(constraints: dict[str, Constraint], program: CanonicalProgram) -> None:
    """Copy a constraint on one tied leaf to all leaves of that tensor."""
    first_of = tied(program)
    known: dict[str, Constraint] = {}
    for name, own in constraints.items():
        other = known.setdefault(first_of[name], own)
        _refuse_two(other, own, f"'{other.leaf}' and '{own.leaf}' are one tied tensor, but the plan places them")
    for node, fqn in program.leaves():
        if first_of[node.name] in known:
            constraints.setdefault(node.name, replace(known[first_of[node.name]], leaf=fqn))


def _refuse_two(first: Constraint, second: Constraint, what: str) -> None:
    if first.sharding != second.sharding:
        raise PlanError(
            f"{what} differently",
            help="give both the same placement, or plan only one of them",
            asked_by=f"{first.asked_by} and {second.asked_by}",
        )


def _boundary(given: Boundary, names: Sequence[str], what: str) -> dict[str, PlacementSpec]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        if len(given) > len(names):
            raise ShardingError(
                f"{len(given)} {what} placements for {len(names)} tensor {what}s", help="give one per tensor or a dict"
            )
        return {name: spec for name, spec in zip(names, given, strict=False) if spec is not None}
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 3, 0.0)
            raise ShardingError(f"the program has no tensor {what} {name!r}", help=f"it has {', '.join(near)}")
    return dict(given)


def _sharding(spec: PlacementSpec, mesh: Mesh, value: torch.Tensor, what: str, asked_by: str) -> Sharding:
    """Return the sharding of a graph value with these placements."""
    sharding = fitted(Sharding.of(spec, mesh, value.ndim, what, asked_by), value.shape, mesh, what, asked_by)
    if sharding.partial and not (value.is_floating_point() or value.is_complex()):
        raise ShardingError(
            f"cannot place {what} as {sharding.text(mesh)}: it is {value_text(value)}, and only floating-point values "
            "can be pending reductions",
            help="place it as R or S(dim)",
            asked_by=asked_by,
        )
    return sharding


def _constrain_inputs(program: CanonicalProgram, mesh: Mesh, given: Boundary) -> dict[str, Constraint]:
    nodes = {node.name: node for node in program.user_inputs()}
    specs, asked_by = _boundary(given, list(nodes), "input"), option("--input", "inputs=")
    shardings = {
        name: _sharding(specs[name], mesh, edit.fake(node), f"input '{name}'", asked_by)
        if name in specs
        else Sharding.replicated(edit.ndim(node))
        for name, node in nodes.items()
    }
    return {name: Constraint(Exactly((sharding,)), asked_by) for name, sharding in shardings.items()}


def _pin_outputs(program: CanonicalProgram, mesh: Mesh, given: Boundary) -> None:
    output = program.output
    values = list(output.args[0])  # type: ignore[arg-type]
    specs = program.source.graph_signature.output_specs
    user = [i for i, s in enumerate(specs) if s.kind in PINNED_KINDS and edit.is_tensor(values[i])]
    first = len(values) - len(program.output_names())  # values written back come first
    names = [program.output_names()[i - first] for i in user]
    requested = _boundary(given, names, "output")
    for position, name in zip(user, names, strict=True):
        value = values[position]
        asked_by = "outputs=" if name in requested else "outputs are R unless outputs= says otherwise"
        sharding = Sharding.replicated(edit.ndim(value))
        if name in requested:
            source = option("--output", "outputs=")
            sharding = _sharding(requested[name], mesh, edit.fake(value), f"output '{name}'", source)
        values[position] = _pin(value, Constraint(Exactly((sharding,)), asked_by), output, owner=value)
    output.args = (tuple(values),)


def _untouched(leaves: Mapping[str, fx.Node], placing: Set[str], constrained: Set[str]) -> tuple[Note, ...]:
    """Note layers with weights of two or more dims that no entry touches, not even under a tied name."""
    counts = Counter[str]()
    for fqn, node in leaves.items():
        is_named = node.name in constrained or not placing.isdisjoint((fqn, *modules_around(fqn)))
        if edit.ndim(node) >= 2 and not is_named:
            counts[fold_layers(fqn.rpartition(".")[0])] += 1
    return tuple(Note("untouched", f"{key} x {n}" if n > 1 else key) for key, n in counts.items())


def _find_constraints(
    name: str,
    entry: PlanEntry,
    leaves: Mapping[str, fx.Node],
    weight: Mapping[str, fx.Node],
    owned: Mapping[str, fx.Node],
    aliases: Mapping[str, list[fx.Node]],
    constant: Set[fx.Node],
    values: LeafValues,
    mesh: Mesh,
) -> dict[str, Constraint]:
    """Return an entry's constraints on a weight (one leaf or several) or on a layer's leaves, by placeholder name."""
    style = entry.style
    inside = dict(weight or owned)
    if not weight:
        if style.cut is not None and not any(node.users and edit.ndim(node) > 1 for node in inside.values()):
            inside |= _borrowed(name, leaves, constant, anywhere=not inside)
    found: dict[str, Constraint] = {}
    largest = max(weight, key=lambda fqn: edit.fake(weight[fqn]).numel(), default="")
    for fqn, node in inside.items():
        ndim = edit.ndim(node)
        if style.placement is not None:
            spec = style.placement if isinstance(style.placement, Mapping) else {style.axis_on(mesh): style.placement}
            if len(weight) > 1 and fqn != largest:
                spec = _of_part(spec, edit.fake(node))
            sharding = Sharding.of(spec, mesh, ndim, f"'{fqn}'", entry.where)
            sharding = fitted(sharding, edit.shape(node), mesh, f"'{fqn}'", entry.where)
            found[node.name] = Constraint(Exactly((sharding,)), entry.where, fqn)
        elif style.whole:
            found[node.name] = Constraint(Exactly((Sharding.replicated(ndim),)), entry.where, fqn)
        elif style.cut is not None:
            layer = layer_of(fqn) if weight else name
            features = feature_dims(aliases[node.name], style.cut, constant, layer)
            if not features:  # leaves of other layers alone, such as learned queries, are an activation for this layer
                own = values.of(set(inside.values()))
                features = feature_dims(aliases[node.name], style.cut, own, layer)
            if not features and fqn == name and node.users and len(_long_dims(node)) == 1:
                # A vector that the plan names, such as sinks or a gate. A row-wise layer adds its bias once, whole.
                if style.cut == "in" and is_addend(aliases[node.name], constant):
                    return {}
                features = _long_dims(node)
            if len(features) > 1 and weight:  # stacked experts: count the dims as Hugging Face does
                features = features & {ndim - (2 if style.cut == "out" else 1)} or features
            if len(features) > 1:
                raise PlanError(
                    f"style '{style.name}' is ambiguous for '{fqn}': its uses cut dims {sorted(features)}",
                    help=f'give an explicit placement, e.g. "{fqn}": "S({min(features)})"',
                    asked_by=entry.where,
                )
            for dim in features:
                cut = _cut(fqn, dim, edit.shape(node)[dim], entry, mesh)
                sharding = Sharding.replicated(ndim).with_dim(dim, cut if mesh.size(cut.axes) > 1 else WHOLE)
                allowed = Dims((sharding,), needs_parts=style.packed and not style.sizes)
                found[node.name] = Constraint(allowed, entry.where, fqn)
    if style.cut is not None and not found:
        why, help = _misfit(name, style, {fqn: aliases[node.name] for fqn, node in inside.items()}, leaves)
        raise PlanError(f"style '{style.name}' does not fit '{name}': {why}", help=help, asked_by=entry.where)
    return found


def _cut(fqn: str, dim: int, size: int, entry: PlanEntry, mesh: Mesh) -> DimSharding:
    """Return the cut of a dim in one piece, or in the parts whose sizes a packed style gives."""
    sizes, cut, style = entry.style.sizes, DimSharding.by(mesh.model_axis), entry.style
    if not sizes:
        return cut
    if len(sizes) == 1:
        sizes = (size // sizes[0],) * sizes[0]
    if sum(sizes) != size:
        equal = f"{size} is no multiple of {len(sizes)}"
        total = f"{' + '.join(map(str, sizes))} = {sum(sizes)}, and not {size}"
        raise PlanError(
            f"style '{style.written}' does not fit dim {dim} of '{fqn}': {equal if len(style.sizes) == 1 else total}",
            help=f"give sizes that add up to {size}, or write '{style.name}', which reads them off the uses",
            asked_by=entry.where,
        )
    return DimSharding.of_parts([(part, cut) for part in sizes])


def _borrowed(name: str, leaves: Mapping[str, fx.Node], constant: Set[fx.Node], anywhere: bool) -> dict[str, fx.Node]:
    """Return the weights that a layer uses without holding them.

    A strict export keeps one name of a tied weight. PT2E keeps the layer's own weight, unused, and holds the quantised
    one in the module around the layers. Unless `anywhere`, only weights held around this layer count.
    """
    return {
        fqn: node
        for fqn, node in leaves.items()
        if not fqn.startswith(f"{name}.")
        and (anywhere or layer_of(fqn) in modules_around(name))
        and any(name == edit.module_path(user) for user in _uses(node, constant))
    }


def _uses(leaf: fx.Node, constant: Set[fx.Node]) -> list[fx.Node]:
    """Return the ops that take the leaf, or a value computed from leaves with it."""
    ops = list(leaf.users)
    for node in ops:
        ops += node.users if node in constant else ()
    return ops


def _of_part(spec: Mapping[str, Placement], part: torch.Tensor) -> Mapping[str, Placement]:
    """Return a weight's placements for a part of it: a scale that serves a whole dim of the weight stays whole."""
    has = [isinstance(p, Shard) and -part.ndim <= p.dim < part.ndim and part.shape[p.dim] != 1 for p in spec.values()]
    return {axis: p if cut else Replicate() for (axis, p), cut in zip(spec.items(), has, strict=True)}


def _long_dims(leaf: fx.Node) -> set[int]:
    """Return the dims of a leaf that have more than one element."""
    return {dim for dim, size in enumerate(edit.shape(leaf)) if size != 1}


def _find_uses(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the ops that use leaves; behind one that only moves their elements, those that use its result too."""
    for user in (user for node in nodes for user in node.users):
        yield user
        rule = rule_of(user)
        if rule is not None and rule.relayout:
            yield from _find_uses([user])


def _misfit(
    name: str, style: Style, inside: Mapping[str, Sequence[fx.Node]], leaves: Mapping[str, fx.Node]
) -> tuple[str, str]:
    """Return why the style cannot shard any weight of a layer, and advice."""
    users = {fqn: list(_find_uses(nodes)) for fqn, nodes in inside.items()}
    if inside and not any(users.values()):
        return "no op of the program uses it", "remove the entry"
    if name in inside and not _long_dims(inside[name][0]):
        return "it has one element", f'write "{name}": R'
    for fqn, op in ((fqn, op) for fqn, ops in users.items() for op in ops if edit.outputs(op)):
        rule = rule_of(op)
        if rule is None:
            why = f", and runs whole on every rank, as {op.meta[UNCUT]}" if UNCUT in op.meta else ""
            return f"{op.target} has no rule for its use of '{fqn}'{why}", "use 'replicate' for this layer"
        if style.cut == "in" and rule.pattern.whole & rule.reduced:
            return f"{op.target} takes '{fqn}' and needs what it sums over whole", "use 'colwise' or 'replicate'"
    side = "output" if style.cut == "out" else "input"
    if name in inside:
        return f"it has no {side} features", f"give the dim to cut, as in {_placements(name, inside[name][0])}"
    if inside:
        fqn = max(inside, key=lambda fqn: edit.fake(inside[fqn][0]).numel())
        help = f"use 'replicate', or give a dim of a parameter to cut, as in {_placements(fqn, inside[fqn][0])}"
        return f"no weight of it has {side} features", help
    within = dict.fromkeys(layer_of(fqn) for fqn in leaves if fqn.startswith(f"{name}."))
    if not within:
        return "it has no weight", "remove the entry, or name a layer with a weight"
    return "it has no weight itself", f"name a layer inside it, such as {', '.join(map(repr, [*within][:3]))}"


def _placements(fqn: str, leaf: fx.Node) -> str:
    return " or ".join(f'"{fqn}": "S({dim})"' for dim in sorted(_long_dims(leaf)))


def _find_wrapped(
    calls: Mapping[str, list[fx.Node]], names: Iterable[str], owned: Leaves, static: Set[fx.Node]
) -> dict[str, str]:
    """Return module -> the layer inside that it wraps.

    Such a layer takes its module's input, and the module returns the layer's result, possibly plus other terms: `up`
    wraps `up.linear` if it returns `self.linear(x) + self.b(self.a(x))`. A module that uses a weight itself in this
    way, or has two such layers, wraps none.

    Args:
        calls: those inside each module.
        static: nodes that are computed from leaves alone.
    """
    around = {layer[:at] for layer, leaves in owned.items() if leaves for at, c in enumerate(layer) if c == "."}
    # Styles are of the forward, whose values the backward uses too.
    forward = {name: [node for node in nodes if not is_backward(node)] for name, nodes in calls.items()}
    layers_of_module = {
        name: _layers_of(name, forward, owned, static) for name in names if name in around and forward.get(name)
    }
    return {name: layers[0] for name, layers in layers_of_module.items() if len(layers) == 1}


def _layers_of(name: str, calls: Mapping[str, list[fx.Node]], owned: Leaves, static: Set[fx.Node]) -> list[str]:
    """Return the outermost layers inside a module whose result it returns, alone or as a term of a sum."""
    inside, entering = set(calls[name]), _entering(calls[name], static)
    leaving = (node for node in calls[name] if any(each not in inside and not is_backward(each) for each in node.users))
    terms = [node for node in leaving if node not in static]
    if len(terms) != 1:
        return []
    layers: dict[str, None] = {}
    own = {leaf for fqn, leaf in owned.get(name, {}).items() if fqn.rpartition(".")[0] == name}
    for term in terms:
        operands = edit.operands(term)
        if not entering.isdisjoint(operands) and any(_is_made_of(operand, own, static) for operand in operands):
            return []
        for path in edit.module_paths(term):
            if path.startswith(f"{name}.") and owned.get(path) and _entering(calls[path], static) == entering:
                layers[path] = None
        rule = rule_of(term)
        if term.target is aten.add.Tensor or (rule is not None and rule.relayout):
            terms += (operand for operand in operands if operand in inside and operand not in terms)
    return [path for path in layers if not any(path.startswith(f"{other}.") for other in layers)]


def _entering(calls: Iterable[fx.Node], static: Set[fx.Node]) -> set[fx.Node]:
    """Return the activations that a module's ops take from outside."""
    calls = set(calls)
    return {value for node in calls for value in edit.operands(node)} - calls - static


def _is_made_of(value: fx.Node, leaves: Set[fx.Node], static: Set[fx.Node]) -> bool:
    made_of = value.all_input_nodes if value in static else ()
    return value in leaves or any(_is_made_of(each, leaves, static) for each in made_of)
