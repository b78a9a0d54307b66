"""Which calls attend in turns, over which axis, and what of theirs is dealt out evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import IN_TURNS, InTurns
from tpcompiler.passes._kernels import MULTIPLES
from tpcompiler.plan import PlanEntry

STEPS = 2  # the dim of queries, keys and values: [batch, heads, steps, features]


def ask_for_turns(graph: fx.Graph, name: str, entry: PlanEntry, mesh: Mesh) -> None:
    """Note on the attention of a module that its style wants it in turns, where it does.

    Raises:
        PlanError: there is none in the module.
    """
    if not entry.style.in_turns:
        return
    axis = entry.style.axis if entry.style.axis in mesh.names else mesh.model_axis
    inside = [node for node in edit.calls(graph) if name in edit.module_paths(node)]
    attention = [node for node in inside if node.target is aten.scaled_dot_product_attention.default]
    if not attention:
        raise PlanError(
            f"style '{entry.style.name}' does not fit '{name}': it calls no scaled_dot_product_attention",
            help="name the module that attends, of a program as torch.export gives it",
            asked_by=entry.where,
        )
    for node in attention:
        node.meta[IN_TURNS] = InTurns(axis, entry.where)


def dealt_out(node: fx.Node, mesh: Mesh, device_type: str) -> Iterator[tuple[str, fx.Node, int]]:
    """What of a call has steps that are dealt out, and of what they are a multiple: of keys each rank has some in each
    turn.
    """
    ranks, args = mesh.degree(node.meta[IN_TURNS].axis), edit.bound(node)
    queries, keys, _ = MULTIPLES[device_type]
    for what, operand, each in (("queries", args["query"], queries), ("keys", args["key"], math.lcm(ranks, keys))):
        if operand.meta["val"].ndim == 4:
            yield what, operand, ranks * each
