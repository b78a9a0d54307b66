"""Damages in changes of sharding that only other numbers, or other sizes, show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tests.trust.damage import Artifact, at, inserted, kind, region, shape
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim

aten = torch.ops.aten
Arguments = Callable[[fx.Node], tuple[Any, ...] | None]
COMMON = 2**6 * 3**3 * 5**2 * 7 * 11 * 13 * 17 * 19 * 23 * 29 * 31  # a multiple of most sizes


def _after_waits(name: str, target: Any, arguments: Arguments) -> None:
    """Register the damage that does this to what comes out of a collective, and leaves its shape."""

    def damage(artifact: Artifact, nth: int) -> bool:
        waits = artifact.each(lambda n: edit.is_wait(n) and bool(read_claim(n).reshard))
        site = at([site for site in waits if arguments(site[0]) is not None], nth)
        for wait in site or ():
            users = list(wait.users)
            new = inserted(wait.next, target, (wait, *(arguments(wait) or ())), wait)
            for user in users:
                user.replace_input_with(wait, new)
        return site is not None

    damage.__name__ = name
    kind(damage)


def _always(*arguments: Any) -> Arguments:
    return lambda node: arguments if node.meta["val"].ndim else None


def _along_a_dynamic_dim(arguments: Callable[[int], tuple[Any, ...]]) -> Arguments:
    def of(node: fx.Node) -> tuple[Any, ...] | None:
        dims = [dim for dim, size in enumerate(shape(node)) if not isinstance(size, int)]
        return arguments(dims[0]) if dims else None

    return of


_after_waits("fractions_lost_in_a_change", aten.fix.default, _always())
_after_waits("rounded_in_a_change", aten.special_round.default, _always())
_after_waits("sorted_in_a_change", aten.msort.default, _always())
_after_waits("doubled_in_a_change", aten.div.Tensor, _always(0.5))
# What leaves small sizes as they are, or those that a number has as a divisor.
_after_waits("rolled_in_a_change", aten.roll.default, _along_a_dynamic_dim(lambda dim: ([COMMON], [dim])))
_after_waits("cut_off_in_a_change", aten.slice.Tensor, _along_a_dynamic_dim(lambda dim: (dim, 0, 63)))
_after_waits("a_triangle_in_a_change", aten.tril.default, _along_a_dynamic_dim(lambda dim: (63,)))


@kind
def padded_with_ones(artifact: Artifact, nth: int) -> bool:
    """What makes uneven shares equal is not zero. (It is cut off again, and no number shows it.)"""

    def where(node: fx.Node) -> bool:
        return bool(region(node)) and node.target is aten.new_zeros.default

    node = at([node for program in artifact.ranks for node in edit.calls(program.graph) if where(node)], nth)
    if node is not None:
        node.target, node.kwargs = aten.new_ones.default, {}
    return node is not None
