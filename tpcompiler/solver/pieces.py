"""Dims that are sliced or joined at more places than an op has choices, as unrolled loops over rows leave them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.rules.infer import is_one
from tpcompiler.rules.notation import Dim, Joined, Rule

Place = tuple[fx.Node, int]  # a dim of a value


def find_pieces(
    operands: Mapping[fx.Node, Sequence[fx.Node]], rules: Mapping[fx.Node, Rule | None], most: int
) -> dict[fx.Node, frozenset[str]]:
    """Return, by op, the pieces of dims that have more than `most` different ones.

    Before    each row gets a sum of the rows before it: 63 slices [..., :i] of one matrix
    After     these ops need the matrix whole, or cut along another dim

    A piece could be cut by itself in every value that has the dim, so the search would compare only some of the
    choices of all these ops anyway, and take most of its time for them.
    """
    above: dict[Place, Place] = {}  # a union-find forest of dims that ops hand on as they are

    def root(place: Place) -> Place:
        while above.setdefault(place, place) != place:
            above[place] = above[above[place]]
            place = above[place]
        return place

    rows: list[tuple[fx.Node, Rule, Place, Joined]] = []
    for node, rule in rules.items():
        first: dict[object, Place] = {}
        for value, at, dim in _dims_of(node, operands[node], rule):
            if isinstance(dim, Joined) and rule is not None:
                rows.append((node, rule, (value, at), dim))
            if len(dim) == 1 or isinstance(dim, Joined):
                above[root((value, at))] = root(first.setdefault((type(dim), dim), (value, at)))
    pieces: dict[Place, set[object]] = {}  # where each begins and ends
    for _, rule, place, dim in rows:
        ends = [0, *itertools.accumulate(rule.extent[factor] for factor in dim)]
        for factor, piece in zip(dim, itertools.pairwise(ends), strict=True):
            if not factor.startswith("_") and not is_one(rule.extent[factor]):
                pieces.setdefault(root(place), set()).add(piece)
    found: dict[fx.Node, frozenset[str]] = {}
    for node, _, place, dim in rows:
        if len(pieces.get(root(place), ())) > most:
            found[node] = found.get(node, frozenset()) | frozenset(dim)
    return found


def _dims_of(node: fx.Node, operands: Sequence[fx.Node], rule: Rule | None) -> Iterator[tuple[fx.Node, int, Dim]]:
    """Yield each dim of an op's operands and results: the value, the dim's place in it, and its factors."""
    if rule is not None:
        values = [(value, rule.pattern.inputs[at]) for at, value in enumerate(operands)]
        values += [(made, rule.pattern.outputs[at]) for made, at in edit.results(node)]
        for value, term in values:
            for at, dim in enumerate(term):
                yield value, at, dim
