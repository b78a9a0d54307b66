"""Join the same op on every part of a split into one op on the whole."""

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
    graph = edit.copy_graph(program.graph)
    with no_new_guards(graph):
        for node in edit.calls(graph):
            if node.target is aten.cat.default:
                _join(node)
    remove_unused(graph)
    return replace(program, graph=graph)


def _join(cat: fx.Node) -> None:
    branches = edit.operands(cat)
    dim = edit.bound(cat)["dim"] % edit.ndim(cat)
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
            part = edit.shape(column[0])[dim]
            inputs.append(_insert(cat, aten.unflatten.int, (source, dim, [count, part]), "parts"))
            in_dims.append(dim)
        elif len(set(column)) == 1:
            inputs.append(column[0])
            in_dims.append(None)
        else:
            inputs.append(_insert(cat, aten.stack.default, (list(column),), "of_all"))
            in_dims.append(0)
    first, dense = branches[0], edit.fake(cat).is_contiguous()

    def one(*values: Any) -> Any:
        args, kwargs = edit.map_operands(first, lambda i, _: values[i])
        return first.target(*args, **kwargs)  # type: ignore[operator]

    def body(*values: Any) -> Any:
        joined = torch.vmap(one, tuple(in_dims), dim)(*values).flatten(dim, dim + 1)
        return joined.contiguous() if dense else joined  # keep the strides of the concatenation

    with fake_mode_of(cat.graph), torch.no_grad():
        values = [torch.empty_like(edit.fake(i)) for i in inputs]
        try:
            traced = trace_ops(body, *values)
        except RuntimeError:
            return  # an op that torch cannot or will not batch, such as a random one
    traced.eliminate_dead_code()
    edit.rewrite(cat, traced, inputs)


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


def _insert(before: fx.Node, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    node = edit.insert_before(before, target, args, name)
    values = fx.node.map_arg(args, lambda n: edit.fake(n))
    with fake_mode_of(before.graph), torch.no_grad():
        edit.record(node, target(*values))
    return node
