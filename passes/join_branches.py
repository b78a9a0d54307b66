"""The same op on every part of a split becomes one op on the whole."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, trace_ops
from tpcompiler.ir import edit
from tpcompiler.ir.draws import remove_unused
from tpcompiler.ir.local import fake_mode_of, no_new_guards
from tpcompiler.ir.program import PlannedProgram

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def join_branches(program: PlannedProgram) -> PlannedProgram:
    """Apply an op once to all parts of a split that are put together again, each with weights of its own.

    Before    parts = split(q, 1, dim=1)                            q: [b, 2, s, 8]
              norm_0 = layer_norm(parts[0], [8], w_0)
              norm_1 = layer_norm(parts[1], [8], w_1)
              out = cat([norm_0, norm_1], dim=1)
    After     w = stack([w_0, w_1])
              norm = native_layer_norm(unflatten(q, 1, [2, 1]), [8], None, None, 1e-05)[0]
              out = flatten(norm * w as [2, 1, 1, 8], 1, 2)

    For ops of their own, parts that lie on different ranks would be gathered; one op over all of them works on every
    rank on the parts that it has. It is what `torch.vmap` makes of the op on one part. Left as they are: branches of
    which the plan pins a value, that others use too, that draw random numbers or that torch cannot batch.
    """
    graph = edit.copy_graph(program.graph)
    with no_new_guards(graph):
        for node in edit.calls(graph):
            if node.target is aten.cat.default:
                _join(node)
    remove_unused(graph)
    return replace(program, graph=graph)


def _join(cat: fx.Node) -> None:
    branches = edit.operands(cat)
    dim = edit.bound(cat)["dim"] % cat.meta["val"].ndim
    columns = _columns(branches)
    if columns is None:
        return
    sources = [_split_source(column, dim) for column in columns]
    wholes = [source for source in sources if source is not None]
    if len(wholes) != 1:
        return
    count = len(branches)
    inputs: list[fx.Node] = []
    in_dims: list[int | None] = []
    for column, source in zip(columns, sources, strict=True):
        if source is not None:
            part = column[0].meta["val"].shape[dim]
            inputs.append(_made(cat, aten.unflatten.int, (source, dim, [count, part]), "parts"))
            in_dims.append(dim)
        elif len(set(column)) == 1:
            inputs.append(column[0])
            in_dims.append(None)
        else:
            inputs.append(_made(cat, aten.stack.default, (list(column),), "of_all"))
            in_dims.append(0)
    first, dense = branches[0], cat.meta["val"].is_contiguous()

    def one(*values: Any) -> Any:
        args, kwargs = edit.map_operands(first, lambda i, _: values[i])
        return first.target(*args, **kwargs)  # type: ignore[operator]

    def body(*values: Any) -> Any:
        joined = torch.vmap(one, tuple(in_dims), dim)(*values).flatten(dim, dim + 1)
        return joined.contiguous() if dense else joined  # what follows has the strides of the concatenation

    with fake_mode_of(cat.graph), torch.no_grad():
        values = [torch.empty_like(i.meta["val"]) for i in inputs]
        try:
            traced = trace_ops(body, *values)
        except RuntimeError:
            return  # an op that torch cannot batch, or will not: one that draws
    traced.eliminate_dead_code()
    edit.rewrite(cat, traced, inputs)


def _columns(branches: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]] | None:
    """The operands of one op that all branches apply, place by place; None if they are not of one kind."""
    first = branches[0]
    if len(set(branches)) < 2 or not all(_fits(branch, first) for branch in branches):
        return None
    columns = list(zip(*map(edit.operands, branches), strict=True))
    return columns if all(_alike(column) for column in columns) else None


def _fits(branch: fx.Node, first: fx.Node) -> bool:
    """Whether two calls differ in their tensors alone, and nobody else needs what they make."""
    if branch.op != "call_function" or not isinstance(branch.target, OpOverload) or not edit.is_tensor(branch):
        return False
    if branch.target is not first.target or branch.target.namespace != "aten":  # others' ops may not be batchable
        return False
    alike = edit.map_operands(branch, lambda i, _: i) == edit.map_operands(first, lambda i, _: i)
    return alike and len(branch.users) == 1


def _alike(values: Sequence[fx.Node]) -> bool:
    shapes = {(tuple(map(str, v.meta["val"].shape)), v.meta["val"].dtype) for v in values}
    return len(shapes) == 1


def _split_source(values: Sequence[fx.Node], dim: int) -> fx.Node | None:
    """What the values are all parts of, in order, by a split of `dim`."""
    split = values[0].args[0] if values[0].target is operator.getitem else None
    if not isinstance(split, fx.Node) or split.target not in SPLITS or len(split.meta["val"]) != len(values):
        return None
    if any(v.target is not operator.getitem or v.args != (split, i) for i, v in enumerate(values)):
        return None
    (source,) = edit.operands(split)
    return source if edit.bound(split)["dim"] % source.meta["val"].ndim == dim else None


def _made(before: fx.Node, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    node = edit.insert_before(before, target, args, name)
    given = fx.node.map_arg(args, lambda n: n.meta["val"])
    with fake_mode_of(before.graph), torch.no_grad():
        node.meta["val"] = target(*given)
    return node
