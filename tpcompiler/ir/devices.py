"""The devices of a program's tensors, and whether the program can move to another device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.errors import UnsupportedError, option
from tpcompiler.ir import edit
from tpcompiler.ir.local import is_contiguous
from tpcompiler.ir.program import Program

MOVABLE = ("cpu", "cuda")
# Ops named after the one kind of device, or the one library, that has a kernel for them.
_OF_ONE_DEVICE = re.compile(r"_for_cpu|mkl|onednn|cudnn|miopen|_(flash|efficient|cudnn)_attention")


def values(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Yield every fake tensor of the graph, after the node that makes it."""
    for node in graph.nodes:
        yield from ((node, value) for value in edit.outputs(node))


def device_types(graph: fx.Graph) -> list[str]:
    """Return the types of device that the graph's tensors are on, sorted."""
    return sorted({value.device.type for _, value in values(graph)})


def device_type_for(program: Program, wanted: str | None) -> str:
    """Return the type of device that the program's ranks will run on: the wanted one, or that of its tensors.

    Raises:
        UnsupportedError: an unknown type; tensors on several devices and none wanted; a tensor or an op that cannot
            move.
    """
    if wanted is not None and wanted not in MOVABLE:
        indexed = torch.device(wanted).index is not None if re.fullmatch(r"(cpu|cuda):\d+", wanted) else False
        raise UnsupportedError(
            f"device_type is {wanted!r}, " + ("one device of a machine" if indexed else "not one of cpu and cuda"),
            help=f"give {wanted.partition(':')[0]!r}: every rank takes a separate device"
            if indexed
            else "give 'cpu' or 'cuda'",
        )
    names = {node.name: fqn for node, fqn in program.leaves()}
    on: dict[torch.device, list[str]] = {}
    for node, value in values(program.graph):
        on.setdefault(value.device, []).append(names.get(node.name, node.name))
    if meta := on.get(torch.device("meta")):
        raise UnsupportedError(
            f"{_several(meta)} on the meta device, which is no place to run: its tensors have no values",
            help="export the model on the CPU; one that is too large for that, under FakeTensorMode",
        )
    current = next((device.type for device in on), wanted or "cpu")
    if wanted is None and len(on) > 1:
        where = "; ".join(f"{_several(on[device])} on {device}" for device in sorted(on, key=str))
        raise UnsupportedError(
            f"the program's tensors are on several devices: {where}",
            help=f"give {option('--device', 'device_type')} to move all to one, or export the model on one device",
        )
    if wanted is not None and set(on) - {torch.device(wanted)}:
        _refuse_ops_of_one_device(program, wanted)
    return wanted or current


def _refuse_ops_of_one_device(program: Program, wanted: str) -> None:
    for node in edit.calls(program.graph):
        if not isinstance(node.target, OpOverload) or all(v.device.type == wanted for v in edit.outputs(node)):
            continue
        if _OF_ONE_DEVICE.search(str(node.target)):
            trains = any(program.gradients())
            raise UnsupportedError(
                f"'{node.name}' ({node.target}) has no kernel on {wanted}",
                help=f"export the model on {wanted}: each device has a backward by itself"
                if trains
                else "convert the program as torch.export gives it, without run_decompositions()",
                used_at=edit.source_line(node),
            )
        if node.target is aten.as_strided.default and not is_contiguous(edit.fake(edit.operands(node)[0])):
            raise UnsupportedError(
                f"'{node.name}' (as_strided) reads memory as a kernel of another device than {wanted} laid it out",
                help=f"call contiguous() before as_strided, or export the model on {wanted}",
                used_at=edit.source_line(node),
            )


def _several(names: Sequence[str]) -> str:
    """Return `'a', 'b', 'c' and 4 more are`."""
    names = list(dict.fromkeys(names))
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
