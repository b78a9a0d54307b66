"""Compare each claimed origin with the model's name for the value."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Set

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.text import op_name
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.unsound import Unsound
from tpcompiler.runtime.artifact import MODEL


def check_origins(
    made: Folded, ours: Mapping[fx.Node, int], names: Mapping[int, Set[str]], shown: Callable[[fx.Node], str]
) -> None:
    """Compare the origin of every claim with the model's names for the value.

    They must be equal except for their number: in a file, a program that torch traces as a whole may be numbered
    differently (`mul`, `mul_1` for `mul_7`, `mul_85`), but in the same order. Inside a piece that the compiler has
    replaced, a value that the model lacks has a name that no other value has. Such a value may happen to be one of the
    model's, and then that one is claimed as well. In a region all claims name the value that it changes, or the op that
    it computes a share of.

    Args:
        ours: the number of each value of the folded program.
        names: number -> the names of the model's values.

    Raises:
        Unsound: a claim has no origin, or a false one.
    """
    owners: dict[str, int] = {}
    right: dict[int, set[str]] = {}
    numbered: dict[str, dict[tuple[int, int], fx.Node]] = {}
    foreign: list[fx.Node] = []
    for node, whole in made.whole.items():
        if node.op == "placeholder":
            right.setdefault(ours[whole], set()).add(node.name)
    claims = [(node, origin, ours[made.whole[node]]) for node, origin in _claims(made)]
    known = {name for own in names.values() for name in own}
    by_name = {number for _, origin, number in claims if origin in names.get(number, ())}
    for node, origin, number in claims:
        have = names.get(number, set())
        stem, claimed = _parts(origin)
        same = {at for other, at in map(_parts, have) if other == stem}
        if owners.setdefault(origin, number) != number:
            raise _untrue(node, origin, have, shown(made.whole[node]))
        if same and origin not in known and number in by_name:  # replaced, with a value that the backward has too
            foreign.append(node)
        elif same:
            numbered.setdefault(stem, {})[claimed if claimed in same else min(same), claimed] = node
            right.setdefault(number, set()).update({origin} if node not in made.changed else ())
        elif have and stem != op_name(_changed(made, node)):  # experts dealt to ranks end in an op that names its value
            foreign.append(node)
    for found in numbered.values():
        for (before, one), (after, other) in itertools.pairwise(sorted(found)):
            if before < after and one > other:
                node = found[after, other]
                raise _untrue(node, made.claim(node).origin, names[ours[made.whole[node]]], shown(made.whole[node]))
    for node in foreign:
        number = ours[made.whole[node]]
        if len(right.get(number, ())) < len(names[number]):
            raise _untrue(node, made.claim(node).origin, names[number], shown(made.whole[node]))
    for region in made.regions.values():
        _check_region(made, region, ours, names)


def _changed(made: Folded, node: fx.Node) -> fx.Node:
    """Return the node that has this value before any change of sharding."""
    while node in made.changed:
        (node,) = made.changed[node]
    return node


def _parts(name: str) -> tuple[str, int]:
    """Split `mul_85` into the name of an op and its number."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if stem and number.isdecimal() else (name, 0)


def _claims(made: Folded) -> Iterator[tuple[fx.Node, str]]:
    """Yield every node that stands for tensors, with its origin; in a file, a getitem outside of regions has none."""
    ends = {node for region in made.regions.values() for node in region.outputs}
    for node in made.whole:
        if node.op != "call_function" or (node.target is operator.getitem and node not in ends):
            continue
        if edit.outputs(node):
            if (origin := made.claim(node).origin) is None:
                raise Unsound(node, "claims no origin")
            yield node, origin


def _check_region(
    made: Folded, region: ProgramRegion, ours: Mapping[fx.Node, int], names: Mapping[int, Set[str]]
) -> None:
    """Check that all nodes in a region have its origin; the operand of a change already has one."""
    last = region.nodes[-1]
    if region.call is None:
        wanted = made.claim(last).origin or ""
        (operand,) = made.changed[last]
        before = made.claim(operand).origin if operand.op == "call_function" else operand.name
        if operand.target is not operator.getitem and before != wanted:
            raise Unsound(last, f"claims to change '{wanted}', and '{operand.name}' stands for '{before}'")
    else:
        wanted = made.claim(last).body or ""
        have = names.get(ours[region.call], set())
        if have and _parts(wanted)[0] not in {_parts(name)[0] for name in have}:
            raise _untrue(last, wanted, have, str(region.call.target))
    for node in region.nodes:
        if node not in made.whole and (origin := made.claim(node).origin) != wanted:
            raise Unsound(node, f"is in {region.name} of '{wanted}', and claims to stand for '{origin}'")


def _untrue(node: fx.Node, origin: str | None, names: Set[str], shown: str) -> Unsound:
    has = f"'{min(names)}'" if names else "no such value"
    return Unsound(node, f"claims to stand for '{origin}' of the model, and {MODEL} has {has} for {shown}")
