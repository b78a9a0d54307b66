"""Several axes at once: of every op and leaf, each choice over one axis with each over the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.constraints import Exactly
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option
from tpcompiler.solver.domain import Domain
from tpcompiler.solver.leaf import Leaf
from tpcompiler.solver.stage import Stage
from tpcompiler.solver.ways import Ways

MOST_TOGETHER = 64  # choices of an op: what is found for two axes takes as long as 4 times that many over one


def combine_domains(stage: Stage, alone: Sequence[Sequence[Domain]]) -> list[Domain]:
    """The domains of programs over all axes of a stage, made of those over each.

    Raises:
        UnsupportedError: an op has more than `MOST_TOGETHER` choices.
    """
    found, leaves = list[Domain](), dict[str, Leaf]()  # by group: programs share them
    for own in zip(*alone, strict=True):
        first, named = own[0], dict[str, Leaf]()
        for name, leaf in first.leaves.items():
            if leaf.group not in leaves:
                leaves[leaf.group] = _combine_leaf(stage, [domain.leaves[name] for domain in own])
            named[name] = leaves[leaf.group]
        ways = {node: _combine_ways(stage, [domain.ways[node] for domain in own]) for node in first.ways}
        found.append(Domain(first.program, stage, named, first.operands, first.rules, ways, first.kernels))
    return found


def _combine_ways(stage: Stage, each: Sequence[Ways]) -> Ways:
    return stage.known.once(("together", *each), partial(_find_ways, stage, each))


def _find_ways(stage: Stage, each: Sequence[Ways]) -> Ways:
    if (count := math.prod(len(ways.found) for ways in each)) > MOST_TOGETHER:
        raise UnsupportedError(f"an op has {count} choices over {len(each)} axes", help="solve one axis at a time")
    limits = each[0].limits._replace(barred=frozenset(), blocked=frozenset(), left_out=frozenset(), is_closed=False)
    ways = Ways(each[0].rule, Option(), limits, math.factorial(len(each)) * MOST_TOGETHER)
    made = ways.adding(stage, _nested_options(stage, [[way.option for way in own] for own in each]))
    return replace(made, is_capped=any(own.is_capped for own in each))


def _nested_options(stage: Stage, each: Sequence[Sequence[Option]]) -> Iterator[Option]:
    """One of each axis together; where two cut one factor, either is outside."""
    for some in itertools.product(*each):
        for order in itertools.permutations(some):
            made = Option()
            for option in order:
                made = stage.extended(made, option)
            if sum(len(cut.axes) for cut in made.cuts.values()) == sum(
                len(c.axes) for o in some for c in o.cuts.values()
            ):
                yield made


def _combine_leaf(stage: Stage, each: Sequence[Leaf]) -> Leaf:
    leaf = each[0]
    if isinstance(leaf.allowed, Exactly):
        made = [stage.within(asked, leaf.value) for asked in leaf.allowed.shardings]
    elif any(own.shardings for own in each):
        made = [*_nested_shardings(stage, leaf, [list(own.shardings) or [leaf.before] for own in each])]
    else:
        made = []
    return replace(leaf, shardings=dict.fromkeys(made))


def _nested_shardings(stage: Stage, leaf: Leaf, each: Sequence[Sequence[Sharding]]) -> Iterator[Sharding]:
    for some in itertools.product(*each):
        for order in itertools.permutations(some):
            made = leaf.before
            for sharding in order:
                made = sharding.beside(made, sharding.axes)
            is_made = made.axes == frozenset().union(*(sharding.axes for sharding in some))
            sizes = zip(made.dims, leaf.value.shape, strict=True)
            if is_made and not any(cut.find_misfit(size, stage.mesh) for cut, size in sizes):
                yield stage.known.setdefault(made, made)
