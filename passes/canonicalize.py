"""Bring an exported program into the form that the rules read."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import (
    FakeTensor,
    OpOverload,
    aten,
    decomposed,
    decomposing,
    substituted,
    tree_flatten,
    tree_map,
)
from tpcompiler.errors import ProgramError, reason
from tpcompiler.frontend.backwards import IN_SIMPLER_OPS
from tpcompiler.frontend.decompose import NotSimple, decompose_calls
from tpcompiler.frontend.kernel_differences import AS_DRAWN, LOSSES, allow_copies, refuse_dynamic_gaps, spell_out
from tpcompiler.frontend.refused import refuse_calls, refuse_values
from tpcompiler.frontend.written_back import find_hidden_views, keep_results
from tpcompiler.ir import edit
from tpcompiler.ir.backward import mark_backward
from tpcompiler.ir.control_flow import read_bodies
from tpcompiler.ir.draws import RECURRENT, draws, draws_for_a_shape, remove_unused
from tpcompiler.ir.local import fake_mode_of, insert_call, is_contiguous, memory_order, no_new_guards
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.sizes import are_equal, statically_equal
from tpcompiler.rules.registry import ops_with_rules
from tpcompiler.rules.structure import is_cut_again

# torch's message for a write to a tensor that is no buffer
NO_BUFFER = "is mutated in the forward method|expected compiled_fn to be GraphModule"

# ops after which positions are the same, in other dims
SAME_POSITIONS = (aten.unsqueeze.default, aten.view.default, aten._to_copy.default, aten.clone.default)


def canonicalize(exported_program: ExportedProgram) -> CanonicalProgram:
    """Make the graph functional and free of higher-order wrappers; keep ops that have a rule whole.

    Before    training IR, canonical IR or core ATen
              bn.add_(one); with set_grad_enabled: ...; linear(x, w); _assert_tensor_metadata(y)
              dropout(x, 0.1); rand_like(x); x[:, [-2]]; linalg_vector_norm(x)
    After     bn_1 = add(bn, one) -> written back by the signature; linear(x, w)
              x * native_dropout(ones, 0.1)[0]; rand_like(ones)      ones: of the whole shape, on every rank
              clone(slice(x, 1, 8, 9)); sqrt(sum(x * x))             x: [4, 10]; slices count from the start

    Leaves one flat functional graph. The input program is not changed.

    Raises:
        ProgramError: no exported program, its state does not fit its graph, or decomposition fails.
        UnsupportedError: sparse and quantised tensors, and other cases listed in `frontend.refused`.
    """
    refuse_values(exported_program)
    refuse_dynamic_gaps(exported_program)
    try:
        source = _decompose(exported_program)
    except Exception as error:
        message = reason(error)
        help = "check that it runs: exported_program.run_decompositions() fails in the same way"
        if re.search(NO_BUFFER, message):
            help = (
                "register what forward changes as buffers, each in separate memory, the counters of a StaticCache "
                "too: docs/hugging-face.md has a module that does"
            )
        raise ProgramError(f"the program cannot be made functional: {message}", help=help) from error
    graph = edit.copy_graph(source.graph)
    read_bodies(graph, source.graph_module)
    for node in edit.calls(graph):
        if node.target is aten._assert_tensor_metadata.default:
            edit.erase(node)  # it asserts sizes that no shard has
    allow_copies(graph)
    with no_new_guards(graph):
        _settle_sizes(graph)
        _join_extrema(graph)
        _draw_whole(graph)
        _slice_by_constants(CanonicalProgram(source, graph))
        _read_all_in_place(graph)
        edit.count_slices_from_start(graph)
        _count_by_dims(graph)
        _split_by_sizes(graph)
        _write_inferred_sizes(graph)
    remove_unused(graph)
    refuse_calls(source, graph)
    for node in graph.nodes:
        node.meta.pop("custom", None)  # the exporter's annotations; claims take their place
    mark_backward(canonical := CanonicalProgram(source, graph))
    return canonical


def _decompose(program: ExportedProgram) -> ExportedProgram:
    """Decompose to core ATen ops, except ops with a rule, and ops whose decomposition would draw other numbers."""
    recurrent = {
        node.target
        for node in edit.calls(program.graph)
        if isinstance(node.target, OpOverload) and node.target.overloadpacket in RECURRENT and _drops(node)
    }
    own: dict[OpOverload, Any] = {
        aten.scaled_dot_product_attention.default: _attention,
        aten.linalg_vector_norm.default: _norm,
        **IN_SIMPLER_OPS,
        **LOSSES,
        **AS_DRAWN,
    }
    exported = program
    whole_ops = {*ops_with_rules(), aten.bernoulli.default} | recurrent
    program = spell_out(program)
    try:
        with decomposing(program, whole_ops - own.keys(), own) as tables:
            functional = decompose_calls(program, *tables)
    except NotSimple:
        functional = decomposed(program, whole_ops - own.keys(), own, find_hidden_views(program))
    return keep_results(functional, exported)


def _settle_sizes(graph: fx.Graph) -> None:
    """Write the sizes as numbers that were asked for as dynamic, and that the export found to be one number."""
    mode = fake_mode_of(graph)
    for node in graph.nodes:
        if node.op == "placeholder" and not edit.is_tensor(node):
            continue  # its signature calls it a size
        values = tree_flatten(node.meta.get("val"))[0]
        sizes = [size for each in values for size in (each.shape if isinstance(each, torch.Tensor) else [each])]
        if any(isinstance(size, torch.SymInt) and size.node.maybe_as_int() is not None for size in sizes):
            node.meta["val"] = tree_map(lambda value: substituted(value, mode, {}), node.meta["val"])


def _drops(node: fx.Node) -> bool:
    """Return True if a recurrent layer has dropout between its layers, which torch's decomposition omits."""
    args = edit.arguments(node)
    return bool(args.dropout and args.train and args.num_layers > 1)


def _norm(
    x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Compute the euclidean norm as the root of a sum, which ranks can share; narrow floats are summed in float32."""
    result_dtype = dtype or x.dtype
    if ord != 2 or result_dtype.is_complex or x.is_complex():
        return NotImplemented
    wide = x.to(torch.promote_types(result_dtype, torch.float32))
    return (wide * wide).sum(list(range(x.ndim)) if dim is None else dim, keepdim).sqrt().to(result_dtype)


def _attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, *rest: Any, **named: Any) -> Any:
    """Compute attention with dropout as the CPU does, with a drawn mask over queries and keys; else keep it whole."""
    if not dropout:
        return NotImplemented
    math = aten._scaled_dot_product_attention_math.default
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.logical_not(), -torch.inf)
    return math(q, k, v, mask, dropout, *rest, **named)[0]


def _join_extrema(graph: fx.Graph) -> None:
    """Join the least and the greatest of the same numbers, as quantisers need, so that one collective serves both."""
    for least in edit.calls(graph):
        if least.target is not aten.amin.default or not edit.fake(least).is_floating_point():
            continue
        (value,), arguments = edit.operands(least), edit.arguments(least)
        same = (u for u in value.users if u.target is aten.amax.default and edit.arguments(u) == arguments)
        greatest = next(same, None)
        if greatest is None or len(arguments.dim) != 1:
            continue
        both = edit.insert_before(min(least, greatest), aten.aminmax.default, (value,), "aminmax")
        both.kwargs = {"dim": arguments.dim[0], "keepdim": arguments.keepdim}
        edit.record(both, (edit.fake(least), edit.fake(greatest)))
        for part, node in enumerate((least, greatest)):
            part_of_both = edit.insert_before(node, operator.getitem, (both, part), node.name)
            edit.record(part_of_both, edit.fake(node))
            edit.replace_uses(node, part_of_both)
            edit.erase(node)


def _draw_whole(graph: fx.Graph) -> None:
    """Let ops that draw for a shape draw for the whole value: all ranks draw the same, in the same order.

    The result is replicated, and sharding it is a local slice. Dropout becomes a product with dropout applied to ones.
    """
    for node in edit.calls(graph):
        if not draws(node):
            continue
        if node.target is aten.native_dropout.default:
            (x,) = edit.operands(node)
            edit.replace_operand(node, 0, _ones(node, x, edit.fake(x)))
            for part in list(node.users):
                if part.target is operator.getitem and part.args[1] == 0:
                    drawn = edit.insert_before(part, operator.getitem, (node, 0), "drawn")
                    edit.record(drawn, edit.fake(part))
                    part.target, part.args = aten.mul.Tensor, (x, drawn)
        elif draws_for_a_shape(node):
            ones = _ones(node, edit.operands(node)[0], edit.fake(node))
            edit.replace_operand(node, 0, ones)
            with fake_mode_of(graph):  # a slice that is drawn into has gaps, and the drawn value has none
                edit.record(node, torch.empty_like(edit.fake(ones), dtype=edit.fake(node).dtype))


def _ones(node: fx.Node, like: fx.Node, layout: torch.Tensor) -> fx.Node:
    """Return ones with the shape and dtype of `like` and the memory order of `layout`, in which numbers are drawn."""
    value = edit.fake(like)
    order = memory_order(layout)
    sizes = [_size(node, like, dim) for dim in order]
    ones = insert_call(node, aten.full.default, (sizes, 1), "ones", dtype=value.dtype, device=value.device)
    if order == sorted(order):
        return ones
    back = [order.index(dim) for dim in range(value.ndim)]
    return insert_call(node, aten.permute.default, (ones, back), "ones_as_they_lie")


def _size(node: fx.Node, value: fx.Node, dim: int) -> int | fx.Node:
    size = edit.shape(value)[dim]
    return size if isinstance(size, int) else insert_call(node, aten.sym_size.int, (value, dim), "size")


def _slice_by_constants(program: CanonicalProgram) -> None:
    """Replace a look-up of consecutive constant rows by a slice, whose rows a rule can see."""
    names = {node: spec.target for node, spec in program.inputs() if spec.kind is InputKind.CONSTANT_TENSOR}
    for node in edit.calls(program.graph):
        if node.target is not aten.index.Tensor:
            continue
        value, indices = edit.arguments(node).self, edit.arguments(node).indices
        ((dim, rows), *others) = [(d, index) for d, index in enumerate(indices) if index is not None]
        while rows.target in (aten.clone.default, aten.lift_fresh_copy.default, aten.detach.default):
            (rows,) = edit.operands(rows)
        size = edit.shape(value)[dim]
        if others or rows not in names or not isinstance(size, int) or not is_contiguous(edit.fake(node)):
            continue
        positions = program.state(str(names[rows]))
        if isinstance(positions, FakeTensor) or positions.ndim != 1 or not positions.numel():
            continue
        if positions.is_floating_point() or positions.dtype == torch.bool:
            continue
        first, *rest = [row + size if row < 0 else row for row in positions.tolist()]
        if first >= 0 and first + len(rest) < size and rest == list(range(first + 1, first + 1 + len(rest))):
            part = insert_call(node, aten.slice.Tensor, (value, dim, first, first + 1 + len(rest)), "rows")
            node.target, node.args = aten.clone.default, (part,)
            node.kwargs = {"memory_format": torch.contiguous_format}


def _read_all_in_place(graph: fx.Graph) -> None:
    """Replace a look-up of all positions in their order, as masks are read for each sample, by the value itself."""
    for node in edit.calls(graph):
        if node.target is not aten.index.Tensor:
            continue
        value, indices = edit.arguments(node).self, edit.arguments(node).indices
        sizes, ndim = edit.shape(value), edit.ndim(node)
        counting = [_dim_that_counts(*pair) for pair in zip(indices, sizes, strict=False)]
        dims = [ndim + dim for dim in counting if dim is not None]  # dims of the result: indices broadcast
        if len(dims) < len(sizes) or dims != sorted(set(dims)):
            continue
        whole = value
        for dim in set(range(ndim)) - set(dims):
            whole = insert_call(node, aten.unsqueeze.default, (whole, dim), "whole")
        node.target, node.args = aten.clone.default, (whole,)
        node.kwargs = {"memory_format": torch.contiguous_format}


def _dim_that_counts(index: fx.Node | None, size: Any) -> int | None:
    """Return the dim, from the end, along which an index is 0, 1, ... to the last position; None if it is not."""
    source = index
    while source is not None and (source.target in SAME_POSITIONS or _changes_nothing(source)):
        (source,) = edit.operands(source)
    if index is None or source is None or source.target is not aten.arange.start_step:
        return None
    args, shape = edit.arguments(source), edit.shape(index)
    long = [dim for dim, length in enumerate(shape) if not statically_equal(length, 1)]
    counts = (args.start, args.step) == (0, 1) and len(long) == 1 and statically_equal(shape[long[0]], size)
    return long[0] - len(shape) if counts else None


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is not aten.slice.Tensor:
        return node.target is aten.add.Tensor and bool(node.args[1] == 0)
    return are_equal(edit.shape(node), edit.shape(edit.operands(node)[0]))


def _split_by_sizes(graph: fx.Graph) -> None:
    """Write the sizes of equal parts that are taken apart again, so that the rule cuts each of them by itself."""
    for node in edit.calls(graph):
        if node.target in (aten.chunk.default, aten.split.Tensor):
            (value,) = edit.operands(node)
            dim = edit.bound(node)["dim"] % edit.ndim(value)
            sizes = [part.shape[dim] for part in edit.outputs(node)]
            if is_cut_again(node, dim) and all(isinstance(size, int) for size in sizes):
                node.target, node.args, node.kwargs = aten.split_with_sizes.default, (value, sizes, dim), {}


def _count_by_dims(graph: fx.Graph) -> None:
    """Replace the number of elements by the product of the sizes, which a rank with a share can read."""
    for node in edit.calls(graph):
        if node.target is not aten.sym_numel.default:
            continue
        (value,) = edit.operands(node)
        shape = edit.shape(value)
        product: Any = math.prod(size for size in shape if isinstance(size, int))
        for dim, size in enumerate(shape):
            if not isinstance(size, int):
                factor = insert_call(node, aten.sym_size.int, (value, dim), "size")
                product = insert_call(node, operator.mul, (factor, product), "numel")
        edit.replace_uses(node, product)
        edit.erase(node)


def _write_inferred_sizes(graph: fx.Graph) -> None:
    """Replace -1 in a reshape with dynamic sizes by the inferred number.

    torch may fail to infer it again in a program read from a file, such as 4 for (4 * n) // n with n the least of two
    sizes.
    """
    for node in edit.calls(graph):
        if node.target not in (aten.view.default, aten._unsafe_view.default, aten.view_copy.default):
            continue
        sizes, inferred = edit.arguments(node).size, edit.shape(node)
        if any(isinstance(size, fx.Node) for size in sizes):
            explicit = [
                new if old == -1 and isinstance(new, int) else old for old, new in zip(sizes, inferred, strict=True)
            ]
            edit.set_argument(node, "size", explicit)
