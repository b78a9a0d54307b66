"""Other dims that an op could shard of an operand that it gathers: an all_to_all moves the shards there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from tpcompiler.ask.again import Again, Price
from tpcompiler.ir import edit
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.registry import rule_of
from tpcompiler.runtime.records import Record

NEVER = "never: the plan, the boundary or the ops leave no placement of the whole program with it"


class OtherDim(Record, frozen=True):
    """A dim that could be sharded of an operand that is gathered: an all_to_all moves the shards there."""

    operand: str  # the value that the op reads
    axis: str  # of the mesh, over which it is gathered
    dim: int  # of the operand, that an all_to_all could shard instead
    size: str  # of that dim
    seconds: float | None  # of the whole program with it, above the least of the op's choices; None if it is no choice
    sends: tuple[str, ...]  # the collectives of what the op reads or makes then, such as `4 all_to_all`
    reason: str  # for which it is no choice; empty if it is one

    def row(self) -> tuple[str, ...]:
        """Return the table cells."""
        us = "" if self.seconds is None else f"{self.seconds * 1e6:+,.3f}"
        return self.operand, self.axis, f"{self.dim} of {self.size}", us, ", ".join(self.sends) or self.reason


def find_other_dims(again: Again, op: fx.Node, prices: Sequence[Price]) -> Iterator[OtherDim]:
    """Find the dims that an op could shard of the operands that it gathers, with the price of each or why it has none.

    Args:
        prices: those of every choice of the op.
    """
    rule, wants = rule_of(op), again.found.choices[op].wants
    least = min((price.seconds for price in prices if price.seconds is not None), default=0.0)
    for at, (operand, want) in enumerate(zip(edit.operands(op), wants, strict=True)):
        have = again.found.seen(operand)
        for axis in (each for each in have.cut_axes if each not in want.axes):
            for dim, size in enumerate(edit.shape(operand)):
                if axis in have.dims[dim].axes:
                    continue
                alike = [each for each in prices if each.wants and axis in each.wants[at].dims[dim].axes]
                priced = [(each.seconds, each.sends) for each in alike if each.seconds is not None]
                seconds, sends = min(priced, default=(None, ()))
                reason = "" if priced else NEVER if alike else _reason(rule, at, dim, again.found.mesh.degree(axis))
                above = None if seconds is None else seconds - least
                yield OtherDim(operand.name, again.found.mesh.text((axis,)), dim, str(size), above, sends, reason)


def _reason(rule: Rule | None, at: int, dim: int, degree: int) -> str:
    """Say why a dim is no choice of an op."""
    if rule is None:
        return "the op has no rule, so it runs whole"
    factors = rule.pattern.inputs[at][dim]
    if factors and all(factor in rule.pattern.whole for factor in factors):
        return "the op needs it whole"
    sizes = [extent for factor in factors if isinstance(extent := rule.extent[factor], int)]
    if len(sizes) == len(factors) and max(sizes, default=1) < degree:
        return f"it has fewer than {degree} parts"
    return "left out: the op can take the operand as it is sharded, or has too many choices"
