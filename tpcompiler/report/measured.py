"""Collectives that a running rank calls, compared with those that its files state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tpcompiler._torch import TorchDispatchMode
from tpcompiler.artifact.collective_records import is_exchange, transfer_of
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.cost.collective import KIND_OF, wire_bytes
from tpcompiler.ir.node_placement import records_of
from tpcompiler.ir.shares import mesh_of
from tpcompiler.report.costs import count_costs, fold_rows, layer_of_record
from tpcompiler.report.written import Written
from tpcompiler.runtime.records import Record
from tpcompiler.terminal.printed import format_unequal_bytes
from tpcompiler.terminal.tables import Table


class Call(NamedTuple):
    """One collective as it was called: the bytes of its payload, and the name of its group."""

    kind: str
    payload_bytes: int
    group: str


class CountedCollectives(Record, frozen=True):
    """Collectives of one kind in a layer, as the files record them and as they were called."""

    layer: str  # such as `layers.0`
    kind: str  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    count: int  # as the files record
    wire_bytes: int  # as the files record
    called: int  # their number in the call
    called_bytes: int  # in the call

    @property
    def agrees(self) -> bool:
        return (self.count, self.wire_bytes) == (self.called, self.called_bytes)


class WatchedCollectives(TorchDispatchMode):
    """Notes the `calls` of collectives in the block, in order. What runs as machine code shows none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name, _ = str(func).split(".")
        if namespace == "_c10d_functional" and name in KIND_OF:
            value: torch.Tensor = result if KIND_OF[name] == "all_gather" else args[0]
            self.calls.append(Call(KIND_OF[name], value.numel() * value.element_size(), str(args[-1])))
        return result


def counts_table(rows: Sequence[CountedCollectives]) -> Table:
    """Return the counts as a table."""
    cells = []
    for each in rows:
        pair = (f"{each.count} / {each.called}", " / ".join(format_unequal_bytes(each.wire_bytes, each.called_bytes)))
        cells.append((each.layer, each.kind, *pair, "" if each.agrees else "NOT EQUAL"))
    headers = ("layer", "kind", "count", "wire bytes", "", "")
    return Table("collectives of rank 0, as its files say / as it called them", headers, fold_rows(cells))


def compare_counts(
    program: ArtifactProgram, calls: Sequence[Call], inputs: Mapping[str, torch.Tensor]
) -> list[CountedCollectives]:
    """Compare rank 0's calls, by layer and kind, with the collectives that its files state for these input sizes.

    The n-th call is taken for the n-th collective of the manifest, which says the layer.

    Raises:
        ArtifactError: a file is damaged or, without trust, could run code.
    """
    written = Written.of(program)
    sizes = {each.name: inputs[each.input].shape[each.dim] for each in count_costs(written).sizes}
    said = {(cost.layer, cost.kind): cost for cost in count_costs(written, sizes).costs}
    records, count, sent = written.manifest.collectives, Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    nodes = list(records_of(written.graph, written.manifest))
    mesh = mesh_of(written.manifest)
    for at, call in enumerate(calls):
        key = layer_of_record(records[at]) if at < len(records) else "beyond these", call.kind
        count[key] += 1
        wire = wire_bytes(call.kind, call.payload_bytes, len(written.manifest.groups[call.group][0]))
        if at < len(records) and call.kind == records[at].kind and is_exchange(nodes[at]):
            is_said = call.payload_bytes == transfer_of(nodes[at], mesh).payload_bytes
            wire = records[at].wire_bytes if is_said else wire  # the files say what the busiest rank sends
        sent[key] += wire
    return [
        CountedCollectives(
            *key, *((cost.count, cost.wire_bytes) if (cost := said.get(key)) else (0, 0)), count[key], sent[key]
        )
        for key in dict.fromkeys([*said, *count])
    ]
