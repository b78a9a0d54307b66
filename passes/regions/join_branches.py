"""Join the same op on every part of a split into one op on the whole."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.region import Region, write_regions

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def join_branches(program: PlannedProgram) -> PlannedProgram:
    """Apply an op once to all parts of a split that are concatenated again, each with its own weights.

    Before    parts = split(q, 1, dim=1)                            q: [b, 2, s, 8]
              norm_0 = layer_norm(parts[0], [8], w_0)
              norm_1 = layer_norm(parts[1], [8], w_1)
              out = cat([norm_0, norm_1], dim=1)
    After     w = stack([w_0, w_1])
              norm = native_layer_norm(unflatten(q, 1, [2, 1]), [8], None, None, 1e-05)[0]
              out = flatten(norm * w as [2, 1, 1, 8], 1, 2)

    Separate ops would gather parts that are on different ranks; one joint op lets every rank work on its own parts. It
    is `torch.vmap` of the op on one part. Branches stay separate if the plan pins one of their values, if others use
    them, if they draw random numbers, or if torch cannot batch them.
    """
    return write_regions(program, _find_branches)


def _find_branches(graph: fx.Graph) -> Iterator[Region]:
    """Yield the concatenations of one op's results for all parts of a split, in order."""
    for cat in edit.calls(graph):
        columns = _columns(edit.operands(cat)) if cat.target is aten.cat.default else None
        if columns is None:
            continue
        dim = edit.bound(cat)["dim"] % edit.ndim(cat)
        sources = [_split_source(column, dim) for column in columns]
        if sum(source is not None for source in sources) == 1:
            yield _joined(cat, dim, columns, sources)


def _joined(cat: fx.Node, dim: int, columns: Sequence[Sequence[fx.Node]], sources: Sequence[fx.Node | None]) -> Region:
    branches, pairs = edit.operands(cat), list(zip(columns, sources, strict=True))
    inputs = list(dict.fromkeys(each for column, source in pairs for each in ([source] if source else column)))
    dims = tuple(dim if source else None if len(set(column)) == 1 else 0 for column, source in pairs)

    def one(*values: Any) -> Any:
        args, kwargs = edit.map_operands(branches[0], lambda at, _: values[at])
        return branches[0].target(*args, **kwargs)  # type: ignore[operator]

    def body(*given: torch.Tensor) -> Any:
        values_of = dict(zip(inputs, given, strict=True))
        values = [
            aten.unflatten.int(values_of[source], dim, [len(branches), -1])
            if source
            else values_of[column[0]]
            if at is None
            else torch.stack([values_of[each] for each in column])
            for at, (column, source) in zip(dims, pairs, strict=True)
        ]
        try:
            return torch.vmap(one, dims, dim)(*values).flatten(dim, dim + 1)
        except RuntimeError:
            return NotImplemented  # an op that torch cannot or will not batch, such as a random one

    return Region(cat, inputs, body, whole=(aten.unflatten.int,))


def _columns(branches: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]] | None:
    """Return the operands of one op that all branches apply, place by place; None if the branches differ in kind."""
    first = branches[0]
    if len(set(branches)) < 2 or not all(_fits(branch, first) for branch in branches):
        return None
    columns = list(zip(*map(edit.operands, branches), strict=True))
    return columns if all(_alike(column) for column in columns) else None


def _fits(branch: fx.Node, first: fx.Node) -> bool:
    """Return True if two calls differ only in their tensors and have no other user."""
    if branch.op != "call_function" or not isinstance(branch.target, OpOverload) or not edit.is_tensor(branch):
        return False
    if branch.target is not first.target or branch.target.namespace != "aten":  # custom ops may not be batchable
        return False
    alike = edit.map_operands(branch, lambda i, _: i) == edit.map_operands(first, lambda i, _: i)
    return alike and len(branch.users) == 1


def _alike(values: Sequence[fx.Node]) -> bool:
    shapes = {(tuple(map(str, edit.shape(v))), edit.fake(v).dtype) for v in values}
    return len(shapes) == 1


def _split_source(values: Sequence[fx.Node], dim: int) -> fx.Node | None:
    """Return the value whose parts, in order, a split of `dim` yields as `values`."""
    split = values[0].args[0] if values[0].target is operator.getitem else None
    if not isinstance(split, fx.Node) or split.target not in SPLITS or len(edit.fake(split)) != len(values):
        return None
    if any(v.target is not operator.getitem or v.args != (split, i) for i, v in enumerate(values)):
        return None
    (source,) = edit.operands(split)
    return source if edit.bound(split)["dim"] % edit.ndim(source) == dim else None
