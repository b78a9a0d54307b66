"""Sum gradients in few large collectives."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.buckets import ALL_REDUCE, BUCKET
from tpcompiler.ir.node_placement import PLACEMENT, placement_of, reshard_of
from tpcompiler.ir.program import LocalProgram

BYTES = 25 * 2**20  # as torch's DistributedDataParallel: large for the links, and several of them in a backward


def bucket_sums(program: LocalProgram, first: LocalProgram | None = None) -> LocalProgram:
    """Put sums of gradients into buckets of at least `BYTES`, in the order of the backward.

    Before    a = all_reduce(x); aw = wait_tensor(a)
              y = mm(u, v)
              b = all_reduce(y); bw = wait_tensor(b)
              return loss, aw, bw
    After     y = mm(u, v)
              c = all_reduce_coalesced([x, y])
              aw = wait_tensor(c[0]); bw = wait_tensor(c[1])
              return loss, aw, bw

    The sums of a bucket have one reduction, group and dtype. Their results move to the end of the program, so that the
    rest of the backward runs before they are waited for.

    Assumes that the graph belongs to these ranks alone (`lower_reshards` made it): it is edited in place.

    Args:
        first: the program of the first rank, whose buckets all ranks make.
    """
    sums = list(_sums(program))
    if first is None:
        buckets = sorted(_filled(sums), key=lambda bucket: bucket[-1].start)  # as the other ranks read them
    else:
        by_change = {reshard_of(own.start).name: own for own in sums}
        buckets = [[by_change[name] for name in names] for names in _changes(first.graph)]
    for bucket in buckets:
        _write(bucket)
    order = dict.fromkeys(program.graph.nodes)
    for node in [node for bucket in buckets for own in bucket for node in own.results]:
        del order[node]
        order[node] = None
    edit.reorder(program.graph, order)
    return program


@dataclass(frozen=True)
class _Sum:
    """An all_reduce that only a gradient needs, and what follows it: its wait, and ops on the result alone."""

    start: fx.Node
    results: tuple[fx.Node, ...]

    @property
    def kind(self) -> Any:
        """Equal for sums that one call can make."""
        return (*self.start.args[1:], edit.fake(self.start).dtype)

    @property
    def bytes(self) -> int:
        value = edit.fake(self.start)  # of a parameter, so of a fixed size
        return int(value.numel() * value.element_size())


def _sums(program: LocalProgram) -> Iterator[_Sum]:
    """Yield the sums of gradients that nothing else uses, in the order in which they start."""
    values: Any = program.output.args[0]
    found = dict[fx.Node, _Sum]()
    for position, _ in program.gradients():
        node, results = values[position], list[fx.Node]()
        while node.op == "call_function" and len(node.users) == 1 and len(node.all_input_nodes) == 1:
            results.insert(0, node)
            (node,) = node.all_input_nodes
            if edit.is_wait(results[0]):
                break
        if results and edit.is_wait(results[0]) and node.target is ALL_REDUCE:
            found[node] = _Sum(node, tuple(results))
    yield from (found[node] for node in program.graph.nodes if node in found)


def _filled(sums: Sequence[_Sum]) -> Iterator[list[_Sum]]:
    """Yield buckets of two sums or more."""
    ahead = dict[Any, list[_Sum]]()
    for own in sums:
        ahead.setdefault(own.kind, []).append(own)
        if sum(each.bytes for each in ahead[own.kind]) >= BYTES:
            yield from filter(_has_several, [ahead.pop(own.kind)])
    yield from filter(_has_several, ahead.values())


def _has_several(bucket: Sequence[_Sum]) -> bool:
    return len(bucket) > 1


def _changes(graph: fx.Graph) -> Iterator[list[str]]:
    """Yield the changes of sharding that each bucket of a program makes."""
    for node in edit.calls(graph):
        if node.target is BUCKET:
            yield [reshard_of(part).name for part in node.users]


def _write(bucket: Sequence[_Sum]) -> None:
    """Replace the starts of sums by one call, at the place of the last of them."""
    starts, last = [own.start for own in bucket], bucket[-1].start
    values = [start.args[0] for start in starts]
    call = edit.insert_before(last, BUCKET, (values, *last.args[1:]), "all_reduce_coalesced")
    edit.record(call, [edit.fake(start) for start in starts])
    change = reshard_of(starts[0])
    reason = f"{change.reason}, with the sums of {len(starts) - 1} other gradients"
    placement = replace(placement_of(starts[0]), reshard=replace(change, reason=reason))
    stacks = [list((start.meta.get("nn_module_stack") or {}).items()) for start in starts]
    around = takewhile(lambda entries: all(each == entries[0] for each in entries), zip(*stacks, strict=False))
    call.meta |= {PLACEMENT: placement, "nn_module_stack": dict(entries[0] for entries in around)}
    for at, start in enumerate(starts):
        part = edit.insert_before(last, operator.getitem, (call, at), f"{start.name}_part")
        edit.record(part, edit.fake(start))
        part.meta[PLACEMENT] = placement_of(start)
        edit.inherit_meta(part, start)
        edit.replace_uses(start, part)
    for start in starts:
        edit.erase(start)
