"""What a conversion comes to: bytes per rank, collectives by cause, fallbacks and notes, as data and as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tpcompiler.artifact.report import NOTE_TITLES
from tpcompiler.checkpoint.leaves import dtype_of
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.tables import Part, Table

MOST_RANKS = 16  # that a table lists one by one


def artifact_data(manifest: Manifest) -> dict[str, Any]:
    """Mesh, bytes per rank, tensors, boundary, collectives by kind and cause, notes, versions of an artifact."""
    mesh = Mesh.of(manifest.mesh)
    tensors = []
    whole, per_rank = 0, [0] * mesh.world_size
    for row in manifest.tensors:
        sharding = row_sharding(row, mesh)
        size = dtype_of(row["dtype"]).itemsize
        local = [
            torch.Size(sharding.local_shape(row["shape"], mesh, mesh.coordinate(rank))).numel() * size
            for rank in range(mesh.world_size)
        ]
        tensors.append({**row, "bytes": torch.Size(row["shape"]).numel() * size, "bytes_per_rank": local})
        if "tied_to" not in row:
            whole += tensors[-1]["bytes"]
            per_rank = [a + b for a, b in zip(per_rank, local, strict=True)]
    return {
        "kind": "artifact",
        "mesh": manifest.mesh,
        "device_type": manifest.device_type,
        "bytes": whole,
        "bytes_per_rank": per_rank,
        "tensors": tensors,
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "output_type": manifest.output_type,
        "collectives": _collectives(manifest.collectives),
        "fallbacks": [row for row in manifest.collectives if row["why"] == "fallback"],
        "notes": manifest.notes,
        "plan": manifest.plan,
        "versions": manifest.versions,
    }


def _collectives(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["kind"], row["why"])
        new = {"kind": key[0], "why": key[1], "count": 0, "payload_bytes": 0, "wire_bytes": 0}
        total = sums.setdefault(key, new)
        total["count"] += 1
        for part in ("payload_bytes", "wire_bytes"):
            total[part] += row[part]
    return list(sums.values())


def summary_parts(data: Mapping[str, Any]) -> Iterator[Part]:
    """The report of a conversion: bytes per rank, collectives by cause, fallbacks, what nothing touches."""
    axes = ",".join(f"{axis}={degree}" for axis, degree in data["mesh"].items())
    yield f"mesh {axes}, {len(data['bytes_per_rank'])} ranks, {data['device_type']}"
    whole = data["bytes"]
    rows = [("one device", format_bytes(whole), "100.0%")]
    for ranks, held in _alike(data["bytes_per_rank"]):
        rows.append((ranks, format_bytes(held), f"{100 * held / max(whole, 1):.1f}%"))
    yield Table("parameters, buffers and constants", ("on", "bytes", "share"), rows)
    collectives = [
        (
            row["why"],
            row["kind"],
            str(row["count"]),
            *(format_bytes(row[name]) for name in ("payload_bytes", "wire_bytes")),
        )
        for row in data["collectives"]
    ]
    headers = ("why", "kind", "count", "payload bytes", "wire bytes per rank")
    yield Table("collectives of one call", headers, collectives)
    lines = []
    for row in data["fallbacks"]:
        where = row.get("source") or row.get("module") or row.get("node")
        lines.append(
            f"fallback: {row['kind']} of {format_bytes(row['payload_bytes'])} at {where}: {row.get('reason', '')}"
        )
    for kind, title in NOTE_TITLES.items():
        texts = [note["text"] for note in data["notes"] if note["kind"] == kind]
        if texts:
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
    if lines:
        yield from (*lines, "")


def _alike(per_rank: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each rank, or of a large mesh the neighbours that hold equally much, with what they hold."""
    first = 0
    for held, equal in itertools.groupby(per_rank):
        last = first + len(list(equal)) - 1
        if first == last or len(per_rank) <= MOST_RANKS:
            yield from ((f"rank {rank}", held) for rank in range(first, last + 1))
        else:
            yield f"ranks {first} to {last}", held
        first = last + 1
