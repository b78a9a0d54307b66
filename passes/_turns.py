"""Calls that attend in turns, the axis they use, and the dims that must be dealt out evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.errors import PlanError
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import IN_TURNS, InTurns
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.passes._kernels import MULTIPLES
from tpcompiler.plan import PlanEntry
from tpcompiler.plan.styles import STYLES

HEADS, STEPS, FEATURES = 1, 2, 3  # dims of queries, keys and values: [batch, heads, steps, features]
ATTENTION = aten.scaled_dot_product_attention.default


def ask_for_turns(graph: fx.Graph, name: str, entry: PlanEntry, mesh: Mesh) -> None:
    """Note on a module's attention calls that its style requests turns, if it does.

    Raises:
        PlanError: the module calls no attention.
    """
    if not entry.style.in_turns:
        return
    axis = axis_of_turns(mesh)
    inside = [node for node in edit.calls(graph) if name in edit.module_paths(node)]
    attention = [node for node in inside if node.target is ATTENTION]
    if not attention:
        raise PlanError(
            f"style '{entry.style.name}' does not fit '{name}': it calls no scaled_dot_product_attention",
            help="name the module that attends, of a program as torch.export gives it",
            asked_by=entry.where,
        )
    for node in attention:
        node.meta[IN_TURNS] = InTurns(axis, entry.where)


def axis_of_turns(mesh: Mesh) -> str:
    """Return the axis over which the style shards steps: its own if the mesh has that axis."""
    own = STYLES["attend_in_turns"].axis
    return own if own in mesh.names else mesh.model_axis


def dealt_out(node: fx.Node, axis: str, mesh: Mesh, device_type: str) -> Iterator[tuple[str, fx.Node, int]]:
    """Yield the operands of a call whose steps are dealt out, with a name and the required multiple.

    Each rank has some of the keys in each turn.
    """
    ranks, args = mesh.degree(axis), edit.bound(node)
    queries, keys, _ = MULTIPLES[device_type]
    for what, operand, each in (("queries", args["query"], queries), ("keys", args["key"], math.lcm(ranks, keys))):
        if edit.ndim(operand) == 4:
            yield what, operand, ranks * each


def misfit(node: fx.Node, axis: str, mesh: Mesh, device_type: str, dynamic: bool = False) -> str:
    """Return why a call cannot be written in turns, or "". `dynamic`: such sizes will be divided later."""
    args = edit.bound(node)
    q, k, v = (edit.shape(args[name]) for name in ("query", "key", "value"))
    if not len(q) == len(k) == len(v) == 4 or not all(map(statically_equal, (*k, q[0], q[3]), (*v, k[0], k[3]))):
        shapes = ", ".join(str(list(shape)) for shape in (q, k, v))
        return f"it takes {shapes}, and must take [batch, heads, steps, features] of as many samples and features"
    if not isinstance(sym_quotient(q[HEADS], k[HEADS]), int):
        return f"{q[HEADS]} heads of queries are no groups over {k[HEADS]} heads of keys"
    sizes = [("features", args["query"], FEATURES, MULTIPLES[device_type][-1])]
    sizes += [
        (f"steps of {what}", each, STEPS, parts) for what, each, parts in dealt_out(node, axis, mesh, device_type)
    ]
    for what, operand, dim, multiple in sizes:
        size = edit.shape(operand)[dim]
        if sym_quotient(size, multiple) is None and not (dynamic and not isinstance(size, int)):
            return f"{size} {what} are no multiple of {multiple}, as that many ranks on {device_type} need"
    return ""
