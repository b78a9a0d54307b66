"""Calls for which torch's decompositions and fake kernels differ from its kernels: the kernels decide."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, aten, graph_modules, quiet_torch
from tpcompiler.errors import UnsupportedError
from tpcompiler.frontend.written_back import VIEWS, writes
from tpcompiler.ir import edit
from tpcompiler.ir.draws import RECURRENT
from tpcompiler.ir.local import insert_call, is_contiguous, memory_order
from tpcompiler.ir.sizes import are_equal

Tensor = torch.Tensor
MEAN, SUM = 1, 2  # reductions of a loss
ONE_BY_ONE = 16  # `normal_` fills shorter or non-contiguous memory number by number, and the rest in blocks
# Fake kernels keep their operand's order of dims in memory; a CPU's keep it of images in channels-last order alone.
NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
)
# Of operands in several orders of dims, kernels take another one for the result's than their fakes.
BACKWARDS = (
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default,
    aten.leaky_relu_backward.default,
    aten.threshold_backward.default,
    aten.logit_backward.default,
    aten.log_sigmoid_backward.default,
    aten._prelu_kernel_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten.native_dropout_backward.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def spell_out(program: ExportedProgram) -> ExportedProgram:
    """Rewrite the calls whose decomposition would compute something else; the program itself is not changed.

    Before    p = unsafe_split(x, 2); mul_(x, 2); copy_(buffer, y); dropout(z, 1.0, True)
    After     p = split(x, 2); mul_(x, 2); copy_(buffer, y.to(buffer.dtype).expand_as(buffer)); mul(z, 0)

    - A view whose schema does not declare it: writes to it or to its base would be lost.
    - A copy to a tensor of another dtype, shape or layout: torch's functional form returns the source unchanged.
    - Dropout of everything: torch's decomposition draws random numbers, its kernel draws none.
    - A draw for row-major memory: the same call in place draws in its operand's memory order.
    """
    calls = [node for each in graph_modules(program.graph_module) for node in edit.calls(each.graph)]
    changes = any(map(writes, calls))
    if not any(
        _is_another(node) or _drops_all(node) or _is_dense_draw(node) or (changes and node.target in VIEWS)
        for node in calls
    ):
        return program
    module = copy.deepcopy(program.graph_module)
    for each in graph_modules(module):
        for node in edit.calls(each.graph):
            if _is_another(node):
                _spell_out_copy(node)
            elif _drops_all(node):
                _spell_out_zeros(node)
            elif _is_dense_draw(node):
                _spell_out_memory(node)
            elif changes:
                node.target = VIEWS.get(node.target, node.target)
        each.recompile()
    with quiet_torch():
        return program._update(module, program.graph_signature)


def _drops_all(node: fx.Node) -> bool:
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(edit.arguments(node).dropout_p == 1)
    return node.target is aten.dropout.default and edit.arguments(node).p == 1 and edit.arguments(node).train is True


def _spell_out_zeros(node: fx.Node) -> None:
    """Multiply by zero, as the kernels do: values that are not finite become NaN."""
    if node.target is aten.dropout.default:
        node.target, node.args, node.kwargs = aten.mul.Tensor, (edit.arguments(node).input, 0), {}
        return
    edit.set_argument(node, "dropout_p", 0.0)
    zeros = edit.insert_after(node, aten.mul.Tensor, (node, 0), f"{node.name}_dropped")
    edit.record(zeros, edit.fake(node))
    edit.replace_uses(node, zeros, keep=[zeros])


def _spell_out_memory(node: fx.Node) -> None:
    """Draw for a copy of the operand, in row-major memory."""
    (value,) = edit.operands(node)
    how, name = {"memory_format": torch.contiguous_format}, f"{node.name}_memory"
    edit.replace_operand(node, 0, insert_call(node, aten.clone.default, (value,), name, **how))


def _spell_out_copy(node: fx.Node) -> None:
    target, source = edit.operands(node)
    steps: list[tuple[Any, ...]] = [(aten.to.dtype, edit.fake(target).dtype), (aten.expand_as.default, target)]
    if is_contiguous(edit.fake(target)):
        steps.append((aten.contiguous.default,))
    for op, *rest in steps:
        source = insert_call(node, op, (source, *rest), f"{node.name}_source")
    edit.replace_operand(node, 1, source)


def _is_another(node: fx.Node) -> bool:
    if node.target is not aten.copy_.default:
        return False
    target, source = (edit.fake(each) for each in edit.operands(node))
    is_same = target.dtype == source.dtype and are_equal(target.shape, source.shape)
    return not is_same or (is_contiguous(target) and not is_contiguous(source))


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = MEAN) -> tuple[Tensor, Tensor]:
    """Sum over the labels in front of the first -1; torch's decomposition also counts those behind it, as class 0."""
    rows, labels = (value.reshape(-1, value.shape[-1] if value.ndim else 1) for value in (x, target))
    classes = torch.arange(rows.shape[1], device=x.device)
    is_label = (labels < 0).cumsum(1) == 0
    labels = torch.where(is_label, labels, 0)
    is_target = ((labels.unsqueeze(-1) == classes) & is_label.unsqueeze(-1)).any(1)
    apart = (1 - rows.gather(1, labels).unsqueeze(-1) + rows.unsqueeze(1)).relu()
    counts = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    each = torch.where(counts, apart, 0).sum([1, 2]) / rows.shape[1]
    loss = each.mean() if reduction == MEAN else each.sum() if reduction == SUM else each.reshape(x.shape[:-1])
    return loss, is_target.to(x.dtype).reshape(target.shape)


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    return _multilabel_margin(x, target, reduction)[0]


def _layer_by_layer(
    op: OpOverload,
    x: Tensor,
    states: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Drop features between recurrent layers; torch's decomposition leaves the dropout out."""
    if not (dropout and train and layers > 1):
        return NotImplemented
    ways, count, last = 1 + bidirectional, len(weights) // layers, list[Sequence[Tensor]]()
    x = x.transpose(0, 1) if batch_first else x
    for at in range(layers):
        own: Any = [each[at * ways : (at + 1) * ways] for each in ([states] if isinstance(states, Tensor) else states)]
        own = own[0] if isinstance(states, Tensor) else own
        x, *state = op(x, own, weights[at * count : (at + 1) * count], has_biases, 1, 0.0, train, bidirectional, False)
        x = torch.dropout(x, dropout, True) if at < layers - 1 else x
        last.append(state)
    return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*last, strict=True)))


LOSSES: dict[OpOverload, Callable[..., Any]] = {
    aten.multilabel_margin_loss_forward.default: _multilabel_margin,
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
}
LAYERS: dict[OpOverload, Callable[..., Any]] = {op.input: partial(_layer_by_layer, op.input) for op in RECURRENT}


def refuse_dynamic_gaps(program: ExportedProgram) -> None:
    """Check that a slice into which `normal_` draws has a known size.

    Raises:
        UnsupportedError: its size is dynamic.
    """
    for each in graph_modules(program.graph_module):
        for node in edit.calls(each.graph):
            value = edit.fake(edit.operands(node)[0]) if node.target is aten.normal_.default else None
            if value is not None and _has_gaps(value) and not isinstance(value.numel(), int):
                raise UnsupportedError(
                    f"'{node.name}' ({node.target}) draws into a slice of {value.numel()} numbers: what it draws "
                    "depends on how many there are",
                    help="draw with torch.randn_like and copy it into the slice, or export with static sizes",
                    used_at=edit.source_line(node),
                )


def _is_dense_draw(node: fx.Node) -> bool:
    """Return True if a call draws for row-major memory although its operand's is not, so it is already functional."""
    if node.target not in AS_DRAWN:
        return False
    value = edit.fake(edit.operands(node)[0])
    return not is_contiguous(value) and (node.target is aten.bernoulli.p or _has_gaps(value))


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Draw in the memory order of the operand."""
    order = memory_order(x)
    if order == sorted(order):
        return NotImplemented
    drawn = aten.bernoulli.p(x.permute(order), p, generator=generator)
    return drawn.permute([order.index(dim) for dim in range(x.ndim)])


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    """Draw number by number, as torch does for non-contiguous memory: two columns, and an odd last number."""
    count: Any = x.numel()
    if not isinstance(count, int) or count < ONE_BY_ONE or not _has_gaps(x):
        return NotImplemented
    columns = aten.normal_functional.default(x.new_ones(count // 2, 2).t(), mean, std, generator=generator)
    drawn = columns.t().reshape(-1)
    if count % 2:
        last = aten.normal_functional.default(x.new_ones(1), mean, std, generator=generator)
        drawn = torch.cat([drawn, last])
    return drawn.view(x.shape)


def _has_gaps(x: torch.Tensor) -> bool:
    """Return True if `x` is not contiguous but a copy of it is."""
    return not is_contiguous(x) and is_contiguous(torch.empty_like(x))


# torch's functional forms of `bernoulli_` and `normal_` draw for dense row-major memory, which gives other numbers.
AS_DRAWN: Mapping[Any, Callable[..., Any]] = {
    aten.bernoulli.p: _bernoulli,
    aten.normal_functional.default: _normal,
}


def allow_copies(graph: fx.Graph) -> None:
    """Replace the views by reshapes in a graph with results whose layout in memory is not known.

    The order of dims of such a result spreads through all calls after it; a view of them may not exist.
    """
    calls = (node for node in edit.calls(graph) if node.target in NORMS + BACKWARDS)
    if any(not is_contiguous(edit.fake(value)) for call in calls for value in edit.operands(call)):
        for node in edit.calls(graph):
            edit.allow_copy(node)
