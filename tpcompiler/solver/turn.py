"""One mesh axis on its turn: what is decided over the axes before it, and what `rules.infer` says over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from tpcompiler.ir.constraints import AnyStyle, AsUsed
from tpcompiler.ir.dim_sharding import WHOLE
from tpcompiler.ir.memo import Memo
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.rules.infer import Option, Refusal, candidates, follow, options, pass_through, restricted, shardings
from tpcompiler.rules.notation import Rule

MOST_CHOICES = 20
Side = Literal["in", "out"]
Both = tuple[tuple[Sharding, ...], tuple[Sharding, ...]]  # what an option needs, and what it makes


class Strategy(NamedTuple):
    """A way to run an op: what it needs of every operand, what it makes, its price, and by which rule."""

    wants: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    seconds: float = 0.0
    option: Option = Option()
    rule: Rule | None = None


@dataclass
class Turn:
    """The search over one axis.

    Attributes:
        axes: this one after those that are decided.
        before: the choices over these.
        rest: what leaves without a constraint may be.
        read: results that hold for all axes, such as the rules of the graphs.
        is_open: the search may cut inputs along dim 0 for their uses, in programs none of whose inputs is placed there.
        most: the most choices of an op, and shardings of a value with several users, without a plan.
        parts: of a turn over several axes at once, a turn over each by itself; its own `axis` is the last of them,
            over which layers are cut.
        known: results over this axis; equal calls have one rule.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    before: Mapping[fx.Node, Strategy]
    rest: AnyStyle | AsUsed
    read: Memo = field(default_factory=Memo)
    most: int = MOST_CHOICES
    is_open: bool = False
    parts: tuple[Turn, ...] = ()
    known: Memo = field(default_factory=Memo)

    @classmethod
    def together(cls, parts: Sequence[Turn]) -> Turn:
        """Over the axes of these at once."""
        last = parts[-1]
        axes, most = tuple(part.axis for part in parts), math.prod(part.most for part in parts)
        known = last.read.once(("together", *(part.what for part in parts)), Memo)
        return cls(last.mesh, axes, {}, last.rest, last.read, most, parts=tuple(parts), known=known)

    @property
    def axis(self) -> str:
        return self.axes[-1]

    @property
    def is_searched(self) -> bool:
        """True if the styles of layers are a choice over this axis."""
        return isinstance(self.rest, AnyStyle)

    @property
    def gathers(self) -> bool:
        return isinstance(self.rest, AnyStyle) and self.rest.gathers

    @property
    def what(self) -> tuple[Any, ...]:
        """Equal for stages over one axis, none before it, that leave the same choices."""
        return self.mesh, self.axis, self.rest, self.most, self.is_open

    @property
    def own(self) -> tuple[str, ...]:
        """The axes that are solved in this turn."""
        return tuple(part.axis for part in self.parts) or (self.axis,)

    def within(self, sharding: Sharding, value: torch.Tensor) -> Sharding:
        """Return the part of a sharding over the axes until now. Equal ones are one object, for quick comparison."""
        found = sharding.restrict_to(self.axes, value.shape, self.mesh)
        return self.known.setdefault(found, found)  # type: ignore[no-any-return]

    def base(self, node: fx.Node) -> Option:
        """Return an op's option over the axes before."""
        return self.before[node].option if node in self.before else Option()

    def name(self, option: Option) -> Any:
        """Equal for equal options."""
        return tuple(sorted(option.cuts.items(), key=_first)), tuple(sorted(option.through.items(), key=_first))

    def own_options(self, rule: Rule) -> Iterable[Option]:
        """Every way to run an op over the axis, with one factor cut or one pending operand passed through.

        Over the first axis these may include some that the rule refuses.
        """
        if len(self.axes) == 1:
            return candidates(rule, self.axis)
        return self.known.once(("own", rule), lambda: list(options(rule, self.mesh.along([self.axis]))))

    def both(self, rule: Rule, option: Option) -> Both | Refusal:
        def find() -> Both | Refusal:
            found = shardings(rule, option, self.mesh)
            if isinstance(found, Refusal):
                return found
            wants, made = (tuple(self.known.setdefault(each, each) for each in side) for side in found)
            return wants, made

        return self.known.once((rule, self.name(option)), find)

    def extended(self, base: Option, more: Option) -> Option:
        """An option over the axis, inside of one over those before."""
        cuts = dict(base.cuts)
        for factor, cut in more.cuts.items():
            cuts[factor] = cuts[factor].nest(cut) if factor in cuts else cut
        return Option(cuts, {**base.through, **more.through})

    def follow(self, side: Side, rule: Rule, index: int, sharding: Sharding, base: Option) -> Option | Refusal:
        """Return the option that takes an operand ("in") or makes a result ("out") in a sharding."""
        found = self.known.once((side, rule, index, sharding), lambda: self._following(side, rule, index, sharding))
        if isinstance(found, Refusal) and len(self.axes) > 1:
            only = sharding.axis_part(self.axis)
            found = self.known.once((side, rule, index, only), lambda: self._following(side, rule, index, only))
        if isinstance(found, Refusal) or len(self.axes) == 1:
            return found
        return found if self.is_inside(found, base, rule) else self.extended(base, restricted(found, self.axis))

    def is_inside(self, option: Option, base: Option, rule: Rule) -> bool:
        """True if an option equals this one over the axes before."""
        through = {axis: passed for axis, passed in option.through.items() if axis != self.axis}
        earlier = self.axes[:-1]
        return through == base.through and all(
            option.cuts.get(factor, WHOLE).restrict_to(earlier, rule.extent[factor], self.mesh)
            == base.cuts.get(factor, WHOLE)
            for factor in (*option.cuts, *base.cuts)
        )

    def _following(self, side: Side, rule: Rule, index: int, sharding: Sharding) -> Option | Refusal:
        term = (rule.pattern.inputs if side == "in" else rule.pattern.outputs)[index]
        found = follow(rule, term, sharding, self.mesh)
        for axis, op in sharding.partial:
            through = pass_through(rule, index, axis, op) if side == "in" else Refusal("a result is pending")
            if isinstance(found, Refusal) or isinstance(through, Refusal):
                return through if isinstance(through, Refusal) else found
            found = Option(found.cuts, {**found.through, **through.through})
        return found


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]
