"""Describe a converted program in an artifact's manifest."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import torch

from tpcompiler._torch import guards_of
from tpcompiler.ir import edit
from tpcompiler.ir.calling_convention import calling_of
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.program import PlacedProgram, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.symm_mem import rooms_of
from tpcompiler.ir.text import dtype_name
from tpcompiler.parallel.partition import Partition
from tpcompiler.plan.plan import Plan
from tpcompiler.rules.index_range import door_ranges
from tpcompiler.runtime.artifact import FORMAT, VERSION, Manifest
from tpcompiler.runtime.records import Asked, BoundaryRecord, TensorRecord


def manifest_of(partition: Partition, plan: Plan, asked: Asked) -> Manifest:
    """Return the manifest without notes and the files' hashes."""
    program, mesh = partition.program, partition.program.mesh
    ranges = door_ranges(program, {node.name: placement_of(node).shardings[0] for node in program.user_inputs()})
    inputs = [
        BoundaryRecord(
            name=node.name,
            values=list(ranges[node.name]) if node.name in ranges else None,
            **_described(edit.fake(node), placement_of(node).shardings[0], mesh),
        )
        for node in program.user_inputs()
    ]
    outputs = [
        BoundaryRecord(name=name, **_described(edit.fake(value), placement_of(value).shardings[0], mesh))
        for name, value in _outputs(program)
    ]
    first = partition.rank_program(0)
    return Manifest(
        mesh=mesh.written,
        factors={axis: list(degrees) for axis, degrees in mesh.factors},
        groups=partition.groups(),
        device_type="cuda" if partition.device_type == "cuda" else "cpu",
        plan=plan.to_data(),
        tensors=_tensors(program),
        inputs=inputs,
        outputs=outputs,
        collectives=partition.collectives(),
        notes=[],
        output_type=None,
        versions={"tpcompiler": VERSION, "torch": str(torch.__version__), "python": platform.python_version()},
        calling=calling_of(first, guards_of(first)),
        rank_numbers=partition.rank_numbers,
        asked=asked,
        symm_mem={name: room.group for name, room in rooms_of(first).items()},
        files={},
        programs={},
        format=FORMAT,
    )


def _tensors(program: PlacedProgram) -> list[TensorRecord]:
    first_of = tied(program)
    names = {node.name: fqn for node, fqn in program.leaves()}
    specs = {spec.target: spec for _, spec in program.inputs()}
    rows = []
    for node, fqn in program.leaves():
        first = first_of[node.name]
        rows.append(
            TensorRecord(
                name=fqn,
                kind=specs[fqn].kind.name.lower(),
                persistent=specs[fqn].persistent is not False,
                tied_to=names[first] if first != node.name else None,
                **_described(program.state(fqn), placement_of(node).shardings[0], program.mesh),
            )
        )
    return rows


def _outputs(program: PlacedProgram) -> Iterator[tuple[str, Any]]:
    """The user's outputs that are tensors, by name."""
    names, values = program.output_names(), list(program.output.args[0])  # type: ignore[arg-type]
    for name, value in zip(names, values[len(values) - len(names) :], strict=True):
        if edit.is_tensor(value):
            yield name, value


def _described(value: torch.Tensor, sharding: Sharding, mesh: Mesh) -> dict[str, Any]:
    return {
        "shape": [size if isinstance(size, int) else str(size) for size in value.shape],
        "dtype": dtype_name(value.dtype),
        "sharding": sharding.text(mesh),
    }
