"""torch's placements as text: `R`, `S(dim)`, `P(op)`. A spec is one placement, or one per mesh axis."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler.errors import PlanError

REDUCE_OPS = ("sum", "avg", "product", "max", "min")

# As a user gives it: one placement (a mesh of one axis), or {axis: placement}; absent axes are replicated.
PlacementSpec = Placement | Mapping[str, Placement]


def parse_placement(text: str) -> Placement:
    """Read `R`, `S(1)`, `S(-1)`, `P(sum)` (also torch's long names `Replicate()`, `Shard(1)`).

    Raises:
        PlanError: the text is none of these.
    """
    compact = re.sub(r"\s+", "", text)
    if re.fullmatch(r"R|Replicate(\(\))?", compact):
        return Replicate()
    if found := re.fullmatch(r"(?:S|Shard)\((?:dim=)?(-?\d{1,4})\)", compact):
        return Shard(int(found[1]))
    if (found := re.fullmatch(r"(?:P|Partial)\(['\"]?(\w*)['\"]?\)", compact)) and (found[1] or "sum") in REDUCE_OPS:
        return Partial(found[1] or "sum")
    raise PlanError(
        f"{text!r} is not a placement",
        help=f"write R, S(dim) such as S(0) or S(-1), or P(op) with op one of {', '.join(REDUCE_OPS)}",
    )


def format_placement(placement: Placement) -> str:
    """The short text of a placement: `R`, `S(1)`, `P(sum)`."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"


def format_spec(spec: PlacementSpec) -> str | dict[str, str]:
    """The text of a spec as plain data, for a plan file or the manifest."""
    if isinstance(spec, Mapping):
        return {axis: format_placement(placement) for axis, placement in spec.items()}
    return format_placement(spec)
