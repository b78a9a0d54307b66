"""Ops in simpler ones (`rules/variants.py`), where an operand may be cut along a dim that the op itself needs whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, enable_python_dispatcher, tree_flatten
from tpcompiler.ir import edit
from tpcompiler.ir.local import KEY, fake_mode_of, key
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.region import Region
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Refusal, follow, shardings
from tpcompiler.rules.notation import Rule, Term
from tpcompiler.rules.registry import call_variant, rule_of, takes_pieces, variant_of
from tpcompiler.solver.domain import Domain, shardings_of
from tpcompiler.solver.solution import Place
from tpcompiler.solver.strategies import made_of, take_operands, to_cut
from tpcompiler.solver.turn import Strategy

ATTENTION = aten.scaled_dot_product_attention.default


def find_openings(domain: Domain) -> Iterator[tuple[fx.Node, int, Set[Place]]]:
    """Yield the calls that have a variant and cannot take an operand as it may be cut; which operand, and where.

    An operand may also be cut as calls before it, as variants, make it.
    """
    turn, more = domain.turn, dict[fx.Node, list[Sharding]]()
    for node, strategies in domain.strategies.items():
        have = tuple((*shardings_of(domain, each), *more.get(each, ())) for each in domain.operands[node])
        made = list[tuple[Sharding, ...]]()  # if the call takes shares of an operand that it needs whole
        for index, each in enumerate(have if variant_of(node.target) is not None else ()):
            cuts = tuple(to_cut(turn, each))
            find = partial(_made_as_variant, strategies.rule, index, cuts, turn.mesh)
            if (as_variant := turn.known.once(("as variant", strategies.rule, index, cuts), find)) is not None:
                yield node, index, find_places(domain, node, index, cuts)
                made += as_variant
        if not more.keys().isdisjoint(domain.operands[node]):
            strategies = turn.known.once(("takes", strategies, have), partial(take_operands, turn, strategies, have))
        for value, at in edit.results(node) if made or strategies is not domain.strategies[node] else ():
            known = shardings_of(domain, value)
            results = dict.fromkeys([*(every[at] for every in made), *made_of(turn, strategies, have, at)])
            if new := [each for each in results if turn.axis in each.axes and each not in known]:
                more[value] = new


def _made_as_variant(rule: Rule, index: int, cuts: Sequence[Sharding], mesh: Mesh) -> list[tuple[Sharding, ...]] | None:
    """Return what an op would make if it took a share of the dims that it needs whole and makes too, as far as known;
    None if it takes the operand in all these shardings.

    Its variant makes the same, or sums to reduce.
    """
    term = rule.pattern.inputs[index]
    if not any(isinstance(follow(rule, term, cut, mesh), Refusal) for cut in cuts):
        return None
    kept = {factor for term in rule.pattern.outputs for dim in term for factor in dim}
    free = replace(rule, pattern=replace(rule.pattern, whole=rule.pattern.whole - kept))
    options = (follow(free, term, cut, mesh) for cut in cuts)
    every = (shardings(free, option, mesh) for option in options if not isinstance(option, Refusal))
    return [both[1] for both in every if not isinstance(both, Refusal)]


def find_places(domain: Domain, node: fx.Node, index: int, shardings: Sequence[Sharding]) -> Set[Place]:
    """Return the dims of an operand that the axis of the turn shards, and that the op needs whole."""
    rule, turn = domain.strategies[node].rule, domain.turn
    term, axes = rule.pattern.inputs[index], [turn.axis]
    return {place for each in shardings for place in _refused_places(node, rule, term, each, axes, turn.mesh)}


def _refused_places(
    node: fx.Node, rule: Rule, term: Term, sharding: Sharding, axes: Sequence[str], mesh: Mesh
) -> Iterator[Place]:
    """Yield the contiguous shards over these axes that a rule refuses; none where the variant does not use them."""
    for axis in axes if takes_pieces(node.target) else ():
        for dim in sharding.dims_cut_by(axis):
            cut = sharding.dims[dim]
            alone = Sharding.replicated(sharding.ndim).with_dim(dim, cut.axis_part(axis))
            if not (cut.block or cut.parts) and isinstance(follow(rule, term, alone, mesh), Refusal):
                yield Place(axis, mesh.pieces(axis), dim)


def write_variants(
    program: PlannedProgram, calls: Mapping[str, Set[Place]], bodies: Memo
) -> tuple[PlannedProgram, dict[str, list[str]]]:
    """Write calls as their variants, with no placements yet.

    Before    softmax = softmax(x, -1)
    After     amax = amax(x, [-1], True); exp = exp(x - amax); div = exp / sum(exp, [-1], True)

    Args:
        calls: the calls by name, and the dims that may be sharded.
        bodies: what was traced before, for calls alike.

    Returns:
        The program, and the new ops by the name of the call that they replace.
    """
    graph, written = edit.copy_graph(program.graph), dict[str, list[str]]()
    for node in edit.calls(graph):
        name = node.name
        if name not in calls:
            continue
        pieces = _count_pieces(calls[name])
        region = Region(node, edit.operands(node), partial(_run_variant, node, pieces), (ATTENTION,))
        indices = () if edit.is_tensor(node) else tuple(user.args[1] for user in node.users)
        alike = node.target, key(node.args), key(node.kwargs), key(node), indices, tuple(pieces.items())
        body = bodies.once(alike, region.trace)
        if body is None:
            continue
        users = [(edit.fake(part), list(part.users)) for part in region.results]
        made = region.put(body)
        written[name] = [inner.name for inner in made]
        returned = tree_flatten(body.output_node().args[0])[0]
        changed = [
            u for (was, own), now in zip(users, returned, strict=True) if key(was) != key(edit.fake(now)) for u in own
        ]
        if not _run_anew(graph, changed):
            return write_variants(program, {other: calls[other] for other in calls if other != name}, bodies)
    return replace(program, graph=graph), written


def _run_anew(graph: fx.Graph, changed: Collection[fx.Node]) -> bool:
    """Give the values of these calls, and of those behind them, the strides that they have now; whether all can have
    others: an output cannot.
    """
    stale, mode = set(changed), fake_mode_of(graph)
    for node in graph.nodes if stale else ():
        if node not in stale:
            continue
        if node.op == "output" or node.meta.get("unbacked_bindings"):
            return False
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: edit.fake(used))
        try:
            with mode, torch.no_grad(), enable_python_dispatcher():
                made = node.target(*args, **kwargs)
        except (RuntimeError, ValueError):  # torch's, for a view of a value with another memory order
            return False
        if key(made) != key(edit.fake(node)):
            node.meta["val"] = made
            node.meta.pop(KEY, None)
            stale.update(node.users)
    return True


def find_needed(
    program: PlannedProgram,
    written: Mapping[str, Sequence[str]],
    graph: fx.Graph,
    choices: Mapping[fx.Node, Strategy],
    mesh: Mesh,
) -> Iterator[tuple[str, Set[Place]]]:
    """Yield the calls, written as variants, that take a shard that the op itself cannot take; and where.

    Args:
        program: as it was before.
        written: as `write_variants` returns it.
        graph: that of the solution.
    """
    now = {node.name: node for node in graph.nodes}
    for node in edit.calls(program.graph):
        rule = rule_of(node) if node.name in written else None
        terms = [] if rule is None else list(zip(edit.operands(node), rule.pattern.inputs, strict=True))
        taken = (
            (operand.name, want)
            for each in map(now.__getitem__, written.get(node.name, ()))
            if each in choices
            for operand, want in zip(edit.operands(each), choices[each].wants, strict=True)
        )
        for name, want in taken:
            for term in (term for operand, term in terms if operand.name == name):
                if rule and isinstance(follow(rule, term, want.without_partial, mesh), Refusal):
                    yield node.name, {*_refused_places(node, rule, term, want, want.cut_axes, mesh)}


def _count_pieces(places: Set[Place]) -> dict[int, int]:
    """Return the number of shards by dim, in order."""
    dims = sorted({place.dim for place in places})
    return {dim: math.prod(place.degree for place in places if place.dim == dim) for dim in dims}


def _run_variant(node: fx.Node, pieces: Mapping[int, int], *operands: torch.Tensor) -> Any:
    args, kwargs = edit.map_operands(node, lambda at, _: operands[at])
    return call_variant(node.target, pieces, args, kwargs)
