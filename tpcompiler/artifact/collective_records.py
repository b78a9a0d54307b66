"""Collectives of a parallel program: a record of each, and their counts and predicted seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from msgspec.structs import asdict
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.collective import KIND_OF, wire_bytes
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import Times, predict_times
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import records_of, reshard_of
from tpcompiler.ir.program import LocalProgram
from tpcompiler.ir.shares import mesh_of
from tpcompiler.ir.text import op_name
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective, Transfer


def collectives_of(programs: Sequence[LocalProgram]) -> list[Collective]:
    """Every collective that the programs of the ranks call, in order, as the first of them calls it."""
    out, mesh = [], programs[0].mesh
    calls = [[node for node in edit.calls(each.graph) if edit.is_collective(node)] for each in programs]
    for node, *others in zip(*calls, strict=True):
        change = reshard_of(node)
        pairs = zip((node, *others) if is_exchange(node) else (node,), programs, strict=False)
        sent = most_sent([transfer_of(call, mesh, program.ranks[0]) for call, program in pairs])
        out.append(
            Collective(
                **asdict(sent),
                node=node.name,
                module=edit.module_path(node),
                source=edit.source_line(node),
                why=change.why,
                reason=change.reason,
                reshard=change.name,
            )
        )
    return out


def most_sent(transfers: Sequence[Transfer]) -> Transfer:
    """Return the transfer of the busiest rank: in an exchange of edges each may send another number of bytes."""
    return max(transfers, key=lambda each: (each.wire_bytes, each.payload_bytes))


def is_exchange(node: fx.Node) -> bool:
    """Return True for the first rank's all_to_all to which it gives nothing for itself: only edges are sent."""
    return op_name(node) == "all_to_all_single" and _keeps_nothing(node, 0)


def _keeps_nothing(node: fx.Node, at: int) -> bool:
    sizes: Any = node.args[2]  # of a file, which may list too few
    return at < len(sizes) and type(sizes[at]) is int and sizes[at] == 0


def transfer_of(node: fx.Node, mesh: Mesh, rank: int = 0) -> Transfer:
    """Count the bytes of a rank's collective, with the sizes of the example."""
    kind = KIND_OF[str(node.target).split(".")[1]]
    axes = mesh.axes_of(str(node.args[-1]))
    payload, size = sum(_bytes(edit.fake(value)) for value in sent_values(node)), mesh.size(axes)
    is_all_sent = kind == "all_to_all" and _keeps_nothing(node, mesh.index(axes, rank))
    wire = payload if is_all_sent else wire_bytes(kind, payload, size)
    return Transfer(kind=kind, axis=mesh.text(axes), payload_bytes=payload, group_size=size, wire_bytes=wire)


def sent_values(node: fx.Node) -> list[fx.Node]:
    """Return the values whose bytes are a collective's payload: its result if it gathers, or else its operands."""
    return [node] if "all_gather" in str(node.target) else edit.operands(node)


def _bytes(value: torch.Tensor) -> int:
    return torch.Size([sym_hint(s) for s in value.shape]).numel() * value.element_size()


def counted_kinds(kinds: Iterable[str]) -> str:
    """Count collectives by kind: `2 all_reduce, 1 all_gather`."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items()) or "no collectives"


def sent_seconds(records: Iterable[Collective], machine: Machine, mesh: Mesh) -> float:
    """Seconds that collectives take one after the other, on the links of a machine; nothing overlaps."""
    return sum(record_seconds(row, row.wire_bytes, machine, mesh) for row in records)


def predict_call(graph: fx.Graph, manifest: Manifest, machine: Machine) -> Times:
    """Predict how long a call of a rank's program takes, with the sizes of the example.

    Raises:
        ArtifactError: it calls other collectives than the manifest records.
    """
    mesh = mesh_of(manifest)
    records = records_of(graph, manifest)
    sent = {node.name: record_seconds(row, row.wire_bytes, machine, mesh) for node, row in records.items()}
    return predict_times(graph, sent, machine, mesh)


def record_seconds(record: Collective, wire_bytes: float, machine: Machine, mesh: Mesh) -> float:
    """Seconds of one collective of a manifest, with so many bytes."""
    return machine.collective_seconds(record.kind, mesh.read(record.axis), wire_bytes, mesh)
