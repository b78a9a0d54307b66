"""Collectives of a parallel program, as records."""

from __future__ import annotations

import torch
from msgspec.structs import asdict
from torch import fx

from tpcompiler._torch import sym_hint
from tpcompiler.cost.collective import KIND_OF, wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import reshard_of
from tpcompiler.ir.program import LocalProgram
from tpcompiler.runtime.records import Collective, Transfer


def collectives_of(program: LocalProgram) -> list[Collective]:
    """Every collective that the program calls, in order."""
    out = []
    for node in edit.calls(program.graph):
        if edit.is_collective(node):
            change = reshard_of(node)
            out.append(
                Collective(
                    **asdict(transfer_of(node, program.mesh)),
                    node=node.name,
                    module=edit.module_path(node),
                    source=edit.source_line(node),
                    why=change.why,
                    reason=change.reason,
                    reshard=change.name,
                )
            )
    return out


def transfer_of(node: fx.Node, mesh: Mesh) -> Transfer:
    """Count the bytes of a collective, with the sizes of the example."""
    kind = KIND_OF[str(node.target).split(".")[1]]
    axes = mesh.axes_of(str(node.args[-1]))
    payload, size = sum(_bytes(edit.fake(value)) for value in sent_values(node)), mesh.size(axes)
    wire = wire_bytes(kind, payload, size)
    return Transfer(kind=kind, axis=mesh.text(axes), payload_bytes=payload, group_size=size, wire_bytes=wire)


def sent_values(node: fx.Node) -> list[fx.Node]:
    """Return the values whose bytes are a collective's payload: its result if it gathers, or else its operands."""
    return [node] if "all_gather" in str(node.target) else edit.operands(node)


def _bytes(value: torch.Tensor) -> int:
    return torch.Size([sym_hint(s) for s in value.shape]).numel() * value.element_size()
