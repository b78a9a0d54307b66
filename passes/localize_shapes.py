"""Make the sizes in arguments and fake values local, and check every value against its sharding."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import fx

from tpcompiler._torch import FakeTensorMode, aten, enable_python_dispatcher, trace_ops
from tpcompiler.errors import InternalError, RuleError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.local import fake_mode_of, fake_result, insert_call, is_contiguous, key, local_value, same_layout
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, has_reshard, placement_of, write_call
from tpcompiler.ir.program import GLOBAL, LocalProgram, LoweredProgram
from tpcompiler.ir.rank_numbers import read_number
from tpcompiler.ir.sizes import are_equal, sym_quotient
from tpcompiler.terminal.progress import counted

Results = dict[Any, Any]


def localize_shapes(program: LoweredProgram, results: Results) -> LocalProgram:
    """Rewrite the size arguments that rules name, insert local bodies, and recompute every fake value.

    Before    v: S(2) = view(q, [b, s, 8, 16])      rank 0 of 2
              e: P(sum) = embedding(table, ids)     table: S(0) of 100 rows
    After     v: S(2) = view(q, [b, s, 4, 16])
                  ...                                   look up ids - n if it is in [0, 50), else zeros; n is 0
              e: P(sum) = where(absent, 0, rows)

    Assumes that meta["val"] is global and that the graph belongs to these ranks alone (`lower_reshards` made it): it is
    edited in place. Leaves meta["val"] local. After every marked node the local shape is compared with its sharding.
    `results` caches an op's results by the layout of its arguments, across layers and ranks.

    Raises:
        InternalError: a local value does not have the claimed shape.
    """
    graph = program.graph
    mode = fake_mode_of(graph)
    local: set[fx.Node] = set()  # nodes whose value is not the global one
    replaced: set[fx.Node] = set()  # parts of an op with several outputs that its body replaced
    for node in counted(list(graph.nodes), "cutting the ops", "ops"):
        if node in replaced:
            continue
        mark: NodePlacement | None = node.meta.get(PLACEMENT)
        whole = node.meta.pop(GLOBAL, node.meta.get("val"))
        wholes_of = {node: whole}
        if node.op == "placeholder" and mark is not None and mark.shardings:
            here = program.here
            edit.record(node, local_value(whole, mark.shardings[0], program.mesh, here, mode))
        elif node.op == "call_function":
            lowered = has_reshard(node)
            call = write_call(node) if mark is not None and not lowered and _may_change(mark) else None
            resized = mark is not None and not lowered and _localize_sizes(node, mark, program)
            if node.target is aten.sym_size.int and mark is not None and not lowered:
                _read_whole_size(node, mark, program)
            if mark is not None and mark.local is not None:
                parts = list(node.users) if isinstance(whole, (tuple, list)) else [node]
                replaced.update(parts)
                wholes = [edit.fake(part) for part in parts]
                wholes_of = dict(zip(_put_in_body(node, parts, program, mode, call), wholes, strict=True))
            elif lowered or resized or not local.isdisjoint(node.all_input_nodes):
                if mark is not None and mark.skips_empty and not lowered:
                    _make_empty(node, mark, program)
                if call is not None and write_call(node) != call:
                    node.meta[PLACEMENT] = replace(placement_of(node), call=call)
                if node.target in edit.VIEWS and not is_contiguous(edit.fake(edit.operands(node)[0])):
                    edit.allow_copy(node)  # the global operand was dense
                if mark is not None and isinstance(whole, torch.Tensor) and node.meta.get("unbacked_bindings"):
                    edit.record(node, _run_by_name(node, mark, program, mode))
                else:
                    edit.record(node, _run(node, results))
        for result, whole in wholes_of.items():
            mark = result.meta.get(PLACEMENT)
            if mark is not None and mark.shardings:
                _check(result, mark, whole, program)
                if edit.fake(result) is not whole and key(result) == key(whole):
                    edit.record(result, whole)
            if result.op != "output" and result.meta.get("val") is not whole:
                local.add(result)
    return LocalProgram(program.source, graph, program.mesh, program.ranks)


def _may_change(mark: NodePlacement) -> bool:
    """Return True if a rank may call anything else than the whole op with the same arguments."""
    return bool(mark.sizes or mark.counts or mark.local or mark.skips_empty)


def _localize_sizes(node: fx.Node, mark: NodePlacement, program: LoweredProgram) -> bool:
    """Write local sizes in arguments that, by the rule, count a sharded dim."""
    here = program.here
    changed = False
    for argument, positions in mark.sizes.items():
        entries = list(edit.bound(node)[argument])
        shape = mark.shardings[0].local_shape(edit.outputs(node)[0].shape, program.mesh, here)
        by = [mark.shardings[0].dims[position].axes for position in positions if position >= 0]
        cut = any(program.mesh.size(axes) > 1 for axes in by)
        for at, position in enumerate(positions if cut else ()):
            size = shape[position] if position >= 0 else 1
            axes = mark.shardings[0].dims[position].axes if position >= 0 else ()
            if entries[at] == -1 and 0 in shape:  # for a tensor without elements, it might be any number
                entries[at] = size if isinstance(size, int) else _read_size(size, node)
                changed = True
            elif isinstance(size, int) and (axes or entries[at] == -1):
                entries[at] = size
                changed = True
            elif axes and isinstance(entries[at], fx.Node):
                entries[at] = _divide(entries[at], program.mesh.size(axes), node)
                changed = True
        if changed:
            edit.set_argument(node, argument, entries)
    for argument, groups in mark.counts.items():
        own = [sum(cut.local_size(size, program.mesh, here) for size, cut in group) for group in groups]
        is_list = isinstance(edit.bound(node)[argument], (list, tuple))
        edit.set_argument(node, argument, own if is_list else own[0])
    return changed or bool(mark.counts)


def _read_whole_size(node: fx.Node, mark: NodePlacement, program: LoweredProgram) -> None:
    """Multiply a size that `sym_size` reads off a shard by the degree, because sizes keep their global meaning."""
    _, dim = node.args
    assert isinstance(dim, int)
    degree = program.mesh.size(mark.wants[0].dims[dim].axes)
    if degree == 1:
        return
    whole = edit.insert_after(node, operator.mul, (node, degree), "global_size")
    edit.replace_uses(node, whole, keep=[whole])
    edit.record(whole, edit.fake(node))
    edit.record(node, edit.fake(node) // degree)


def _divide(size: fx.Node, degree: int, user: fx.Node) -> fx.Node:
    if size.target is operator.mul and size.args[1] == degree:
        (local,) = size.all_input_nodes
        return local
    return insert_call(user, operator.floordiv, (size, degree), "local_size")


def _put_in_body(
    node: fx.Node, parts: Sequence[fx.Node], program: LoweredProgram, mode: FakeTensorMode, call: Any
) -> list[fx.Node]:
    """Replace the op by its rule's local body, traced for the ranks' range of the sharded factors.

    For an op with several outputs, `parts` are its users (a getitem each), and the body computes only these. Return the
    replacements of the parts, each with its part's mark.
    """
    share = node.meta[PLACEMENT].local
    inputs = node.all_input_nodes
    ranges = [share.range_of(program.mesh, program.mesh.coordinate(rank)) for rank in program.ranks]

    def body(offset: torch.Tensor, *values: Any) -> list[torch.Tensor]:
        values_of = dict(zip(inputs, values, strict=True))
        shard = replace(ranges[0], offset=offset)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values_of[n])
        result = share.body(*args, shard=shard, **kwargs)
        return [result if part is node else result[part.args[1]] for part in parts]

    with mode, torch.no_grad(), enable_python_dispatcher():
        # A tracer identifies its inputs as objects, and slices of one shape may share their fake value. The copies keep
        # the strides, so that the body's views are traced as they run: a part of a split is not dense.
        values = [same_layout(edit.fake(i)) if edit.is_tensor(i) else edit.fake(i) for i in inputs]
        traced = trace_ops(body, torch.empty((), dtype=torch.int64), *values)
    traced.eliminate_dead_code()
    offset = None
    if next(iter(traced.nodes)).users:
        if not all(isinstance(each.offset, int) for each in ranges):
            raise RuleError(
                f"the local body of {node.target} asks where a shard of a dynamic dim begins, which is not a number",
                help="keep the factor whole where its size is no int (`!`)",
                used_at=edit.source_line(node),
            )
        offset = read_number(node.graph, [each.offset for each in ranges], mode)
    outputs: Any = traced.output_node().args[0]
    if parts == [node]:
        traced.output_node().args = tuple(outputs)
    inner = [n for n in traced.nodes if n.op == "call_function"]
    inside = NodePlacement(origin=node.name, body=node.name)
    copies = dict(zip(inner, edit.graft(node, traced, [offset, *inputs], {PLACEMENT: inside}), strict=True))
    results = [copies[output] for output in outputs]
    for result, part in zip(results, parts, strict=True):
        index: Any = None if part is node else part.args[1]
        own = structs.replace(call, output=index)
        result.meta[PLACEMENT] = replace(placement_of(part), origin=part.name, body=node.name, call=own)
    return results


def _make_empty(node: fx.Node, mark: NodePlacement, program: LoweredProgram) -> None:
    """Replace an op that cannot take an empty share by zeros, if this rank's share is empty."""
    value = edit.outputs(node)[0]
    shape = mark.shardings[0].local_shape(value.shape, program.mesh, program.here)
    if any(isinstance(size, int) and size == 0 for size in shape):
        sizes = [size if isinstance(size, int) else _read_size(size, node) for size in shape]
        node.target = aten.full.default
        node.args, node.kwargs = (sizes, 0), {"dtype": value.dtype, "device": value.device}


def _read_size(size: Size, node: fx.Node) -> fx.Node:
    """Compute a dynamic local size from the operand dims that it consists of: `b * 4` of [b * 4, 2] from [b, 8]."""
    runs = (
        (operand, dims)
        for operand in edit.operands(node)
        for dims in itertools.combinations(range(edit.ndim(operand) + 1), 2)
    )
    for operand, (start, end) in runs:
        shape = edit.shape(operand)[start:end]
        over = sym_quotient(math.prod(shape), size)
        if not isinstance(over, int) or not over:
            continue
        product = insert_call(node, aten.sym_size.int, (operand, start), "size")
        for dim in range(start + 1, end):
            factor = insert_call(node, aten.sym_size.int, (operand, dim), "size")
            product = insert_call(node, operator.mul, (product, factor), "size")
        return product if over == 1 else insert_call(node, operator.floordiv, (product, over), "size")
    raise InternalError(
        f"'{node.name}' ({node.target}) has no operand of which {size} is a size",
        help="report this with the model and the plan",
        used_at=edit.source_line(node),
    )


def _run(node: fx.Node, results: Results) -> Any:
    """Return the node's local fake value: the op's result for its operands' local values."""
    cache_key = (node.target, key(node.args), key(node.kwargs))
    if cache_key not in results:
        results[cache_key] = fake_result(node)
    return results[cache_key]


def _run_by_name(node: fx.Node, mark: NodePlacement, program: LoweredProgram, mode: FakeTensorMode) -> torch.Tensor:
    """Return the local fake value of an op that creates data-dependent sizes, without creating new symbols."""
    whole = edit.fake(node)
    assert mode.shape_env is not None
    with mode.shape_env.ignore_fresh_unbacked_symbols():
        value = fake_result(node)
    shape = mark.shardings[0].local_shape(whole.shape, program.mesh, program.here)
    with mode:
        return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=value.device)


def _check(node: fx.Node, mark: NodePlacement, whole: Any, program: LoweredProgram) -> None:
    here, ranks = program.here, f"rank {program.ranks[0]}"
    wholes = whole if isinstance(whole, (tuple, list)) else [whole]
    expected = [t for t in wholes if isinstance(t, torch.Tensor)]
    for value, sharding, local in zip(expected, mark.shardings, edit.outputs(node), strict=True):
        claimed = sharding.local_shape(value.shape, program.mesh, here)
        if not are_equal(claimed, local.shape):
            raise InternalError(
                f"'{node.name}' ({node.target}) on {ranks} is {list(local.shape)}, but its sharding "
                f"{sharding.text(program.mesh)} of {list(value.shape)} says {list(claimed)}",
                help="report this with the model and the plan",
                used_at=edit.source_line(node),
            )
        if local.dtype != value.dtype:
            raise InternalError(
                f"'{node.name}' ({node.target}) on {ranks} is of {local.dtype}, not of {value.dtype}",
                help="report this with the model and the plan",
                used_at=edit.source_line(node),
            )
