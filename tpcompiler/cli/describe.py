"""What `tpcompiler inspect` and `convert` say, as plain data: of a model, of an artifact, and a plan to begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from tpcompiler.api import find_plan
from tpcompiler.doctor import Diagnosis
from tpcompiler.errors import TpCompilerError
from tpcompiler.explain.plan_text import modules_of, plan_text
from tpcompiler.frontend.plain_weights import with_plain_weights
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.program import Program, tied
from tpcompiler.ir.shares import row_sharding
from tpcompiler.ir.text import DTYPES
from tpcompiler.plan import Plan
from tpcompiler.runtime.artifact import Manifest


def model_data(program: ExportedProgram) -> dict[str, Any]:
    """Modules, parameters, inputs, outputs and a plan skeleton of a single-device program, as JSON."""
    program = with_plain_weights(program)
    read = Program(program, program.graph)
    kinds = {spec.target: spec.kind.name.lower() for _, spec in read.inputs()}
    names = {node.name: fqn for node, fqn in read.leaves()}
    first_of = tied(read)
    parameters = []
    for node, fqn in read.leaves():
        value = read.state(fqn)
        row = {"name": fqn, "kind": kinds[fqn], **_described(value), "bytes": value.numel() * value.element_size()}
        if first_of[node.name] != node.name:
            row["tied_to"] = names[first_of[node.name]]
        parameters.append(row)
    return {
        "kind": "model",
        "modules": [{"name": name, "type": kind} for name, kind in modules_of(program).items()],
        "parameters": parameters,
        "inputs": _inputs(program),
        "outputs": _outputs(program),
        "plan": plan_text(program, _proposed(program)),
    }


def _proposed(program: ExportedProgram) -> Plan:
    """For 2 ranks; with every layer whole where the search finds none, for which `convert` gives the reason."""
    try:
        return find_plan(program, 2)
    except TpCompilerError:
        return Plan.of({"**": "replicate"})


def diagnosis_data(found: Diagnosis) -> dict[str, Any]:
    """Of every degree the bytes of a rank, what is sent, seconds and remarks; the limit, and the least that fits."""
    degrees = [
        {
            "ranks": each.ranks,
            "mesh": each.mesh,
            "bytes": {
                "weights": each.memory.weights,
                "caches": each.memory.caches,
                "activations": each.memory.activations,
                "total": each.memory.total,
            },
            "collectives": each.collectives,
            "wire_bytes": each.wire_bytes,
            "seconds": {"compute": each.seconds.compute, "network": each.seconds.network, "total": each.seconds.total},
            "fits": each.fits,
            "remarks": list(each.remarks),
        }
        for each in found.degrees
    ]
    stopped = [{"ranks": ranks, "reason": reason} for ranks, reason in found.stopped.items()]
    return {"limit": found.limit, "least": found.least, "degrees": degrees, "stopped": stopped}


def artifact_data(manifest: Manifest) -> dict[str, Any]:
    """Mesh, bytes per rank, tensors, boundary, collectives by kind and cause, notes, versions of an artifact."""
    mesh = Mesh.of(manifest.mesh)
    tensors = []
    whole, per_rank = 0, [0] * mesh.world_size
    for row in manifest.tensors:
        sharding = row_sharding(row, mesh)
        size = _itemsize(row["dtype"])
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


def _inputs(program: ExportedProgram) -> list[dict[str, Any]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    out: list[dict[str, Any]] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                out.append({"name": spec.arg.name, "constant": repr(spec.arg.value)})
            else:
                out.append({"name": spec.arg.name, **_described(values[spec.arg.name])})
    return out


def _outputs(program: ExportedProgram) -> list[dict[str, Any]]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names = Program(program, program.graph).output_names()
    user = [spec for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    out: list[dict[str, Any]] = []
    for name, spec in zip(names, user, strict=True):
        if isinstance(spec.arg, ConstantArgument):
            out.append({"name": name, "constant": repr(spec.arg.value)})
        else:
            out.append({"name": name, **_described(values[spec.arg.name])})
    return out


def _described(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"number": str(value)}  # one that the program takes or makes, maybe symbolic
    shape = [s if isinstance(s, int) else str(s) for s in value.shape]
    return {"shape": shape, "dtype": DTYPES.get(value.dtype, str(value.dtype))}


def _itemsize(text: str) -> int:
    by_text = {short: dtype for dtype, short in DTYPES.items()}
    dtype: torch.dtype = by_text[text] if text in by_text else getattr(torch, text.removeprefix("torch."))
    return dtype.itemsize
