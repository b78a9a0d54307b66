"""A plan to begin with, read off the rules: layers whose cut output features meet again in the next layer's sum."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from typing import NamedTuple

from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.rules.features import computed_from_leaves
from tpcompiler.rules.notation import Dim, Joined, Rule
from tpcompiler.rules.registry import rule_of

Cuts = dict[fx.Node, dict[int, set[int]]]  # value -> index of the result -> dims that are cut


class Layer(NamedTuple):
    """An op that takes one weight: its layer's name, and the factors of the weight that are features."""

    name: str
    rule: Rule
    made: Set[str]
    summed: Set[str]


def propose_styles(program: CanonicalProgram) -> dict[str, str]:
    """`colwise` and `rowwise` for pairs of layers between which nothing needs the features whole; by layer's name.

    A layer is cut along its output features if every way from them ends in a layer that sums over them. Layers of which
    that is not so, such as those that feed a norm, are left out.
    """
    layers = dict(_layers(program))
    specs = program.source.graph_signature.output_specs
    outputs = {spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT}
    styles: dict[str, str] = {}
    for node, layer in layers.items():
        if styles.get(layer.name) is None:
            ends = _ends(node, layer, layers, outputs)
            if ends and not any(styles.get(end) == "colwise" or end == layer.name for end in ends):
                styles |= {layer.name: "colwise", **dict.fromkeys(ends, "rowwise")}
    return styles


def _layers(program: CanonicalProgram) -> Iterator[tuple[fx.Node, Layer]]:
    kinds = {node: spec.kind for node, spec in program.inputs()}
    leaves = dict(program.leaves())
    static = computed_from_leaves(program.graph, leaves.keys())
    for node in edit.calls(program.graph):
        if node in static or not edit.outputs(node) or (rule := rule_of(node)) is None:
            continue
        pairs = list(zip(edit.operands(node), rule.pattern.inputs, strict=True))
        weights = [(w, term) for w, term in pairs if w in static and len(term) > 1]
        behind = {leaf for w, _ in weights for leaf in _behind(w, leaves) if len(leaf.meta["val"].shape) > 1}
        if len(weights) != 1 or len(behind) != 1 or kinds[leaf := behind.pop()] is not InputKind.PARAMETER:
            continue
        own = {factor for _, term in weights for dim in term for factor in dim} - rule.pattern.whole
        active = {factor for w, term in pairs if w not in static for dim in term for factor in dim}
        made = {factor for term in rule.pattern.outputs for dim in term for factor in dim}
        yield node, Layer(leaves[leaf].rpartition(".")[0], rule, own & made - active, own & rule.reduced)


def _behind(value: fx.Node, leaves: dict[fx.Node, str]) -> set[fx.Node]:
    """The leaves that a value is computed from."""
    if value in leaves:
        return {value}
    return {leaf for source in value.all_input_nodes for leaf in _behind(source, leaves)}


def _ends(start: fx.Node, layer: Layer, layers: dict[fx.Node, Layer], outputs: Set[str]) -> set[str] | None:
    """The layers that sum over what this one makes; None where something else needs it whole."""
    ends: set[str] = set()
    cuts: Cuts = {start: _made(layer.rule, layer.made)}
    left = [start]
    while left:
        node = left.pop()
        if node.name in outputs or not any(cuts[node].values()):
            return None
        for user in node.users:
            if user.op == "output" or not edit.outputs(user):
                continue
            if user.target is operator.getitem:
                found: dict[int, set[int]] | None = {0: cuts[node].get(user.args[1], set())}  # type: ignore[arg-type]
            else:
                found = _through(node, user, cuts[node][0], layers.get(user), ends)
            if found is None:
                return None
            known = cuts.get(user, {})
            both = {index: dims | known.get(index, set()) for index, dims in found.items()}
            if any(found.values()) and known != both:
                cuts[user] = both
                left.append(user)
    return ends


def _through(
    node: fx.Node, user: fx.Node, dims: set[int], layer: Layer | None, ends: set[str]
) -> dict[int, set[int]] | None:
    """The dims of what an op makes that are cut where these dims of its operand are; none where they are summed."""
    if (rule := rule_of(user)) is None:
        return None
    terms = [t for operand, t in zip(edit.operands(user), rule.pattern.inputs, strict=True) if operand is node]
    factors = {factor for term in terms for dim in dims for factor in _outermost(term[dim])}
    if not factors or factors & rule.pattern.whole:
        return None
    if factors <= rule.reduced:
        if layer is None or not factors <= layer.summed:
            return None
        ends.add(layer.name)
        return {}
    made = _made(rule, factors)
    return made if any(made.values()) else None


def _made(rule: Rule, factors: Set[str]) -> dict[int, set[int]]:
    return {
        index: {at for at, dim in enumerate(term) if factors & _outermost(dim)}
        for index, term in enumerate(rule.pattern.outputs)
    }


def _outermost(dim: Dim) -> set[str]:
    """The factors along which a dim is cut."""
    return set(dim) if isinstance(dim, Joined) else set(dim[:1])
