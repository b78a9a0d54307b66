"""Tensors that share elements in memory without being one tensor, such as a weight and its transpose.

The shares that ranks hold of such leaves cannot share elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tpcompiler.errors import ShardingError
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.program import PlacedProgram


def find_shared(values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each two tensors that have elements in common; tensors without memory have none."""
    groups: dict[int, list[str]] = {}
    for name, value in values.items():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.numel():
            if value.device.type != "meta":
                groups.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    for names in groups.values():
        spans = sorted((*_span(values[name]), name) for name in names)
        for at, (_, end, name) in enumerate(spans):
            for begin, _, other in spans[at + 1 :]:
                if begin >= end:
                    break
                if _have_common(values[name], values[other]):
                    yield name, other


def is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors with common memory have the same elements at the same places."""
    return (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride())


def _span(value: torch.Tensor) -> tuple[int, int]:
    """Return the first byte, and the one behind the last, in the memory."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    begin, each = int(value.storage_offset()), value.element_size()
    return begin * each, (begin + int(reach)) * each


def _have_common(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors whose spans overlap have an element in common: columns of one matrix have none."""
    if one.element_size() != other.element_size() or is_same_view(one, other):
        return True
    spans = [_span(one), _span(other)]
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    taken = torch.zeros((end - begin) // one.element_size(), dtype=torch.bool)
    places = []
    for each, (first, _) in zip((one, other), spans, strict=True):
        shape = [size if stride else 1 for size, stride in zip(each.shape, each.stride(), strict=True)]  # of expand
        places.append(taken.as_strided(shape, each.stride(), (first - begin) // each.element_size()))
    places[0].fill_(True)
    return bool(places[1].any())


def refuse_cut_shared(program: PlacedProgram) -> None:
    """Refuse to cut a leaf that changes with another one, or lets it change: ranks would hold old values.

    Raises:
        ShardingError: two leaves share memory, not as a whole, of which one is trained or written, and one is cut.
    """
    changed = {name for _, name in (*program.gradients(), *program.mutations())}
    if not changed:
        return
    nodes = {fqn: node for node, fqn in program.leaves()}
    values = {fqn: program.state(fqn) for fqn in nodes}
    for one, other in find_shared(values):
        if changed.isdisjoint((one, other)) or is_same_view(values[one], values[other]):
            continue
        shardings = {fqn: placement_of(nodes[fqn]).shardings[0] for fqn in (one, other)}
        if cut := next((fqn for fqn, sharding in shardings.items() if not sharding.is_replicated), None):
            raise ShardingError(
                f"{one!r} {list(values[one].shape)} and {other!r} {list(values[other].shape)} share memory, so a "
                f"change of one changes the other, and {cut!r} is sharded as {shardings[cut].text(program.mesh)}: the "
                "shares of ranks cannot share it",
                help="give both the style replicate in the plan, or compute one from the other in the forward",
            )
