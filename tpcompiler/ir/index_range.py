"""Inputs that are indices, and the values that they may have: for others the single-device program raises."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram, ReshardedProgram

SAME_VALUES = {  # each of the input's values is one of the result's
    aten.view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten._to_copy.default,
}
BY_DIM = {  # ops that take `dim` and `index`
    aten.index_select.default,
    aten.index_copy.default,
    aten.index_add.default,
    aten.gather.default,
    aten.scatter.src,
}
INDICES = (torch.int64, torch.int32)
BY_POSITION = {aten.index.Tensor, aten.index_put.default}


def index_ranges(program: CanonicalProgram | ReshardedProgram) -> dict[str, tuple[int, int]]:
    """The least and the greatest value of each input that is nothing but indices of dims with known sizes."""
    found = {}
    for node in program.user_inputs():
        value = node.meta["val"]
        if value.dtype in INDICES and (ends := list(_ranges(node))):
            found[node.name] = max(least for least, _ in ends), min(most for _, most in ends)
    return {name: (least, most) for name, (least, most) in found.items() if least <= most}


def _ranges(node: fx.Node) -> Iterator[tuple[int, int]]:
    for user in node.users:
        if user.target in SAME_VALUES:
            if user.args[0] is node and user.meta["val"].dtype in INDICES:  # a narrower one wraps
                yield from _ranges(user)
        elif isinstance(user.target, torch._ops.OpOverload):
            for size, from_end in _indexed(user, node):
                if isinstance(size, int) and size > 0:
                    yield -size if from_end else 0, size - 1


def _indexed(user: fx.Node, index: fx.Node) -> Iterator[tuple[int | torch.SymInt, bool]]:
    """The sizes of dims that are indexed, and whether an index below zero counts from the end."""
    if user.target is aten.embedding.default and user.args[1] is index:
        yield user.args[0].meta["val"].shape[0], False  # type: ignore[union-attr]
    elif user.target in BY_DIM and (taken := edit.bound(user))["index"] is index:
        if shape := taken["self"].meta["val"].shape:
            yield shape[taken["dim"]], False
    elif user.target in BY_POSITION:
        taken = edit.bound(user)
        indices, shape = taken["indices"], taken["self"].meta["val"].shape
        plain = all(each is None or each.meta["val"].dtype not in (torch.bool, torch.uint8) for each in indices)
        yield from ((shape[at], True) for at, each in enumerate(indices) if each is index and plain)
