"""Collectives of an artifact in numbers: counts, and predicted seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import Times, predict_times
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import records_of
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective


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
    mesh = Mesh.of(manifest.mesh, manifest.factors)
    records = records_of(graph, manifest)
    sent = {node.name: record_seconds(row, row.wire_bytes, machine, mesh) for node, row in records.items()}
    return predict_times(graph, sent, machine, mesh)


def record_seconds(record: Collective, wire_bytes: float, machine: Machine, mesh: Mesh) -> float:
    """Seconds of one collective of a manifest, with so many bytes."""
    return machine.collective_seconds(record.kind, mesh.read(record.axis), wire_bytes, mesh)
