"""Share, chain and cancel reshards."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.program import MARK, RESHARD, Reshard, ReshardedProgram, mark_of, reshard
from tpcompiler.ir.sharding import Sharding


def fold_reshards(program: ReshardedProgram) -> ReshardedProgram:
    """Do every change of sharding once, and none that is undone.

    Before    a: R = reshard(x)                     x: S(0)
              b: R = reshard(x)                     equal to a
              c: S(0) = reshard(b)                  undoes b
              return a, c
    After     a: R = reshard(x)
              return a, x

    A reshard whose only user is another one becomes part of it (P -> R -> S(0) is a reduce_scatter).
    """
    graph = edit.copy_graph(program.graph)
    _share(graph)
    shared: dict[tuple[fx.Node, Sharding], fx.Node] = {}
    for node in edit.calls(graph):
        if node.target is not reshard:
            continue
        (value,) = edit.operands(node)
        change: Reshard = node.meta[RESHARD]
        while value.target is reshard and (len(value.users) == 1 or value.meta[RESHARD].source == change.target):
            inner: Reshard = value.meta[RESHARD]
            if inner.source.partial and change.target.partial:
                break
            (source,) = edit.operands(value)
            node.args = (source,)
            change = replace(change, source=inner.source, why=inner.why if inner.why == "inherent" else change.why)
            node.meta[RESHARD] = change
            node.meta[MARK] = replace(mark_of(node), wants=(change.source,))
            shared.pop((source, inner.target), None) if not value.users else None
            if not value.users:
                edit.erase(value)
            value = source
        first = shared.setdefault((value, change.target), node)
        if change.source == change.target or first is not node:
            edit.replace_uses(node, value if change.source == change.target else first)
            if shared[value, change.target] is node:
                del shared[value, change.target]
            edit.erase(node)
    return ReshardedProgram(program.source, graph, program.mesh, program.notes)


def _share(graph: fx.Graph) -> None:
    """Equal changes of one value first, so that a change before them has a single user and can become part of theirs."""
    shared: dict[tuple[fx.Node, Sharding], fx.Node] = {}
    for node in edit.calls(graph):
        if node.target is reshard:
            first = shared.setdefault((edit.operands(node)[0], node.meta[RESHARD].target), node)
            if first is not node:
                edit.replace_uses(node, first)
                edit.erase(node)
