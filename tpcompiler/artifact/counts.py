"""What a manifest comes to in numbers: bytes that ranks hold, and seconds that collectives take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from tpcompiler.checkpoint.leaves import dtype_of
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.timeline import Times, predict_times
from tpcompiler.ir.claims import records_of
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.artifact import Manifest


def held_per_rank(manifest: Manifest) -> list[int]:
    """Bytes of parameters, buffers and constants of every rank; a tied tensor counts once.

    Raises:
        ArtifactError: a tensor cannot have its sharding.
    """
    mesh = Mesh.of(manifest.mesh)
    total = [0] * mesh.world_size
    for row in manifest.tensors:
        if "tied_to" not in row:
            sharding, itemsize = row_sharding(row, mesh), dtype_of(row["dtype"]).itemsize
            for rank in range(mesh.world_size):
                shape = sharding.local_shape(row["shape"], mesh, mesh.coordinate(rank))
                total[rank] += math.prod(shape) * itemsize
    return total


def counted_kinds(kinds: Iterable[str]) -> str:
    """Count collectives by kind: `2 all_reduce, 1 all_gather`."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items()) or "no collectives"


def sent_seconds(records: Iterable[Mapping[str, Any]], machine: Machine, mesh: Mesh) -> float:
    """Seconds that collectives take one after the other, on the links of a machine; nothing overlaps."""
    return sum(record_seconds(row, row["wire_bytes"], machine, mesh) for row in records)


def predict_call(graph: fx.Graph, manifest: Manifest, machine: Machine) -> Times:
    """Predict how long a call of a rank's program takes, with the sizes of the example.

    Raises:
        ArtifactError: it calls other collectives than the manifest records.
    """
    mesh = Mesh.of(manifest.mesh)
    records = records_of(graph, manifest)
    sent = {node.name: record_seconds(row, row["wire_bytes"], machine, mesh) for node, row in records.items()}
    return predict_times(graph, sent, machine, mesh)


def record_seconds(record: Mapping[str, Any], wire_bytes: float, machine: Machine, mesh: Mesh) -> float:
    """Seconds of one collective of a manifest, with so many bytes."""
    return machine.collective_seconds(record["kind"], record["axis"].split("."), wire_bytes, mesh)
