"""Whether what goes in, what comes out and what is kept are as the manifest says, and the weights' shares one whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import join, row_sharding
from tpcompiler.ir.text import DTYPES
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.soundness.folded import Folded, Unsound, read_claimed
from tpcompiler.soundness.written import Written

KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant_tensor",
}


def check_outputs(made: Folded, manifest: Manifest) -> None:
    """Outputs have the manifest's shardings, and what is written back keeps that of its buffer.

    Raises:
        Unsound: an output in another sharding, or one that the manifest does not name.
    """
    program, rows = made.program, iter(manifest.outputs)
    values: Any = program.graph.output_node().args[0]
    owners = {
        str(spec.target): node
        for node, spec in zip(_placeholders(program), program.graph_signature.input_specs, strict=True)
        if spec.target is not None
    }
    by_name = {node.name: node for node in _placeholders(program)}
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        if not edit.is_tensor(value):
            continue
        found = made.shardings[value][0]
        if spec.kind is OutputKind.USER_OUTPUT:
            row = next(rows, None)
            if row is None:
                raise Unsound(value, "is an output that the manifest does not name")
            if found != read_claimed(value, row["sharding"], made.mesh, found.ndim):
                raise Unsound(
                    value,
                    f"is {found.text(made.mesh)}, and the manifest says output {row['name']!r} is {row['sharding']}",
                )
            whole = edit.outputs(made.whole[value])[0].shape
            if [s for s in row["shape"] if isinstance(s, int)] != [
                w for s, w in zip(row["shape"], whole, strict=True) if isinstance(s, int)
            ]:
                raise Unsound(
                    value, f"is {list(whole)}, and the manifest says output {row['name']!r} is {row['shape']}"
                )
        else:
            owner = owners.get(str(spec.target)) or by_name[str(spec.target)]
            if found != made.shardings[owner][0]:
                raise Unsound(
                    value,
                    f"is written back to {spec.target!r} as {found.text(made.mesh)}, "
                    f"and that is {made.shardings[owner][0].text(made.mesh)}",
                )


def _placeholders(program: ExportedProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def check_state(ranks: Sequence[Written], manifest: Manifest, mesh: Mesh, original: ExportedProgram | None) -> None:
    """Every rank holds its share of every tensor of the manifest and nothing else; replicas are equal bit for bit.

    With the original the shares, put together, must be its tensors bit for bit.

    Raises:
        Unsound: a tensor too many or missing, of another shape or dtype, or of other content.
    """
    rows = {row["name"]: row for row in manifest.tensors}
    for rank, each in enumerate(ranks):
        for spec in each.program.graph_signature.input_specs:
            if spec.kind in KINDS and str(spec.target) not in rows:
                raise Unsound(
                    None, f"rank {rank} has the {KINDS[spec.kind]} {spec.target!r}, and the manifest does not"
                )
    theirs = {} if original is None else {**original.constants, **original.state_dict}
    for name, row in rows.items():
        if "stored_in" in row:
            continue  # it lies in the files of another program, and is checked with that
        held = [each.state.get(name) for each in ranks]
        for rank, value in enumerate(held):
            if not isinstance(value, torch.Tensor):
                raise Unsound(None, f"rank {rank} has no tensor {name!r}, and the manifest has")
            if DTYPES.get(value.dtype, str(value.dtype)) != row["dtype"]:
                raise Unsound(
                    None, f"{name!r} is of {value.dtype} on rank {rank}, and the manifest says {row['dtype']}"
                )
        sharding = row_sharding(row, mesh)
        try:
            wholes = join([value.detach() for value in held if value is not None], sharding, mesh, row["shape"])
        except ValueError as error:
            raise Unsound(None, f"{name!r}: {error}") from error
        for whole in wholes[1:]:
            if not _same_bits(whole, wholes[0]):
                raise Unsound(None, f"{name!r} is not the same on ranks that share it")
        if name in theirs and not _same_bits(wholes[0], theirs[name].detach()):
            raise Unsound(None, f"{name!r}: the ranks' shares do not make the original's tensor")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))
