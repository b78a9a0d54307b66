"""Ops on vectors along a dim, which stays whole."""

from __future__ import annotations

import re

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import pointwise
from tpcompiler.rules.registry import op_rule


@op_rule(aten.linalg_cross.default, shards="any")
def cross(node: fx.Node) -> RuleText:
    """ "d0 d1!, d0 d1! -> d0 d1!": the vector's dim is whole, others broadcast. Linear in each operand."""
    whole = f"d{edit.arguments(node).dim % edit.ndim(node)}"
    return RuleText(re.sub(rf"\b{whole}\b", f"{whole}!", pointwise(node)), linear=((0,), (1,)))


@op_rule(aten.renorm.default, shards="any")
def renorm(node: fx.Node) -> str:
    """ "d0! d1 d2! -> d0! d1 d2!": every slice of the dim has its own norm."""
    ndim = edit.ndim(node)
    term = " ".join(f"d{d}" if d == edit.arguments(node).dim % ndim else f"d{d}!" for d in range(ndim))
    return f"{term} -> {term}"


@op_rule(aten.trace.default, shards="any")
def trace(node: fx.Node) -> RuleText:
    """ "d0! d1! ->": the diagonal crosses both dims. Linear."""
    return RuleText("d0! d1! ->", linear=((0,),))
