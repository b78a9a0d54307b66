"""Whether each claimed origin is the name that the model gives to the value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.claims import read_claim
from tpcompiler.runtime.artifact import MODEL
from tpcompiler.soundness.folded import Folded
from tpcompiler.soundness.region import Region
from tpcompiler.soundness.unsound import Unsound


def check_origins(
    made: Folded,
    ours: Mapping[fx.Node, int],
    names: Mapping[int, Set[str]],
    named: Mapping[str, fx.Node],
    shown: Callable[[fx.Node], str],
) -> None:
    """Compare the origin of every claim with the names that the model has for the value.

    A value that the model lacks, inside a piece that the compiler has written in another way, has a name of its own:
    one that is not in the model. Such a value may happen to be another one of the model's too, and then that one is
    claimed as well. In a region all claims name the value that it changes, or the op that it does a share of.

    Args:
        ours: the number of each value of the folded program.
        names: by number, the names of the model's values.
        named: the model's values by name.

    Raises:
        Unsound: a claim without an origin, or with one that is not true.
    """
    right: dict[int, set[str]] = {}
    foreign: list[tuple[fx.Node, str]] = []
    owners: dict[str, int] = {}
    for node, origin in _claims(made):
        whole = made.whole[node]
        have = names.get(ours[whole], set())
        if origin in have:
            if node not in made.changed:
                right.setdefault(ours[whole], set()).add(origin)
        elif origin in named or owners.setdefault(origin, ours[whole]) != ours[whole]:
            raise _untrue(node, origin, have, shown(whole))
        elif have:
            foreign.append((node, origin))
    for node, origin in foreign:
        have = names[ours[made.whole[node]]]
        if have - right.get(ours[made.whole[node]], set()):
            raise _untrue(node, origin, have, shown(made.whole[node]))
    for region in made.regions.values():
        _check_region(made, region, ours, names, named)


def _claims(made: Folded) -> Iterator[tuple[fx.Node, str]]:
    """Every node that stands for a value, and its origin; a getitem outside of regions has none in a file."""
    ends = {node for region in made.regions.values() for node in region.outputs}
    for node in made.whole:
        if node.op != "call_function" or (node.target is operator.getitem and node not in ends):
            continue
        claim = read_claim(node)
        if "origin" in claim:
            yield node, claim["origin"]
        elif edit.outputs(node):
            raise Unsound(node, "claims no origin")


def _check_region(
    made: Folded, region: Region, ours: Mapping[fx.Node, int], names: Mapping[int, Set[str]], named: Mapping[str, Any]
) -> None:
    """Inside, all nodes have the region's origin; what is changed has one already."""
    last = region.nodes[-1]
    if region.call is None:
        wanted = read_claim(last)["origin"]
        (operand,) = made.changed[last]
        before = read_claim(operand).get("origin") if operand.op == "call_function" else operand.name
        if operand.target is not operator.getitem and before != wanted:
            raise Unsound(last, f"claims to change '{wanted}', and '{operand.name}' stands for '{before}'")
    else:
        wanted = read_claim(last)["body"]
        have = names.get(ours[region.call], set())
        if wanted not in have if have else wanted in named:
            raise _untrue(last, wanted, have, str(region.call.target))
    for node in region.nodes:
        if node not in made.whole and (origin := read_claim(node).get("origin")) != wanted:
            raise Unsound(node, f"is in {region.name} of '{wanted}', and claims to stand for '{origin}'")


def _untrue(node: fx.Node, origin: str, names: Set[str], shown: str) -> Unsound:
    has = f"'{min(names)}'" if names else "no such value"
    return Unsound(node, f"claims to stand for '{origin}' of the model, and {MODEL} has {has} for {shown}")
