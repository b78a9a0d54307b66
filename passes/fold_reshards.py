"""Share, chain and cancel reshards."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.ir.node_placement import PLACEMENT, placement_of, put_reshard, reshard_of
from tpcompiler.ir.program import PlacedProgram, reshard
from tpcompiler.ir.sharding import Sharding


def fold_reshards(program: PlacedProgram) -> PlacedProgram:
    """Do every change of sharding once, and none that is undone.

    Before    a: R = reshard(x)                     x: S(0)
              b: R = reshard(x)                     equal to a
              c: S(0) = reshard(b)                  undoes b
              return a, c
    After     a: R = reshard(x)
              return a, x

    A reshard whose only user is another reshard becomes part of that one (P -> R -> S(0) is a reduce_scatter).
    """
    graph = edit.copy_graph(program.graph)
    _share(graph)  # first, so that a change before equal ones has a single user
    for node in edit.calls(graph):
        if node.target is reshard:
            _join(node)
    _share(graph)
    return replace(program, graph=graph)


def _share(graph: fx.Graph) -> None:
    """Replace equal changes of one value by the first of them; a leaf is changed again for the backward.

    Otherwise all ranks would hold the whole parameters from the forward to the backward.
    """
    first_of: dict[tuple[fx.Node, Sharding, bool], fx.Node] = {}
    for node in edit.calls(graph):
        if node.target is reshard:
            (value,) = edit.operands(node)
            again = value.op == "placeholder" and is_backward(node)
            first = first_of.setdefault((value, reshard_of(node).target, again), node)
            if first is not node:
                if reshard_of(first).why == "fallback":  # a change that another use demands anyway is no fallback
                    why, reason = reshard_of(node).why, reshard_of(node).reason
                    put_reshard(first, replace(reshard_of(first), why=why, reason=reason))
                edit.replace_uses(node, first)
                edit.erase(node)


def _join(node: fx.Node) -> None:
    """Merge this reshard with the ones before it that nobody else uses; remove it if they cancel."""
    (value,) = edit.operands(node)
    while value.target is reshard:
        change, before = reshard_of(node), reshard_of(value)
        cancels = before.source == change.target
        if (len(value.users) > 1 and not cancels) or (before.source.partial and change.target.partial and not cancels):
            return
        (source,) = edit.operands(value)
        node.args = (source,)
        why, reason = before.why if before.why == "inherent" else change.why, change.reason
        if before.target.is_replicated:  # the next change is a slice, which costs nothing
            why, reason = before.why, before.reason
        change = replace(change, source=before.source, why=why, reason=reason)
        node.meta[PLACEMENT] = replace(placement_of(node), wants=(before.source,), reshard=change)
        if not value.users:
            edit.erase(value)
        value = source
        if cancels:
            edit.replace_uses(node, value)
            edit.erase(node)
            return
