"""Find the constraints of a plan entry: the shardings of a layer's weights, or of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
from torch import fx
from torch.distributed.tensor import Placement, Replicate, Shard

from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.constraints import Constraint, Dims, Exactly
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.leaf_values import LeafValues
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of, modules_around
from tpcompiler.ir.program import UNCUT
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import fitted
from tpcompiler.plan.plan import PlanEntry
from tpcompiler.plan.styles import Style
from tpcompiler.rules.registry import rule_of
from tpcompiler.rules.weight_features import feature_dims, is_addend


def find_constraints(
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
            axis = style.axis if style.axis in mesh.names else mesh.model_axis
            spec = style.placement if isinstance(style.placement, Mapping) else {axis: style.placement}
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
