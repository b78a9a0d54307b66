"""Rewrite calls that torch's decompositions would get wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import aten, graph_modules, quiet_torch
from tpcompiler.frontend.draws_in_place import is_dense_draw
from tpcompiler.frontend.written_back import VIEWS, writes
from tpcompiler.ir import edit
from tpcompiler.ir.local import fake_mode_of, is_contiguous
from tpcompiler.ir.sizes import statically_equal


def spell_out(program: ExportedProgram) -> ExportedProgram:
    """Rewrite the calls whose decomposition would compute something else; the program itself is not changed.

    Before    p = unsafe_split(x, 2); mul_(x, 2); copy_(buffer, y); dropout(z, 1.0, True)
    After     p = split(x, 2); mul_(x, 2); copy_(buffer, y.to(buffer.dtype).expand_as(buffer)); mul(z, 0)

    - A view whose schema does not declare it: writes to it or to its base would be lost.
    - A copy to a tensor of another dtype, shape or layout: torch's functional form returns the source unchanged.
    - Dropout of everything: torch's decomposition draws random numbers, its kernel draws none.
    - A draw for row-major memory: the same call in place draws in its operand's memory order (`draws_in_place`).
    """
    calls = [node for each in graph_modules(program.graph_module) for node in edit.calls(each.graph)]
    changes = any(map(writes, calls))
    if not any(
        _is_another(node) or _drops_all(node) or is_dense_draw(node) or (changes and node.target in VIEWS)
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
            elif is_dense_draw(node):
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
    dense = edit.insert_before(node, aten.clone.default, (value,), f"{node.name}_memory")
    dense.kwargs = {"memory_format": torch.contiguous_format}
    with fake_mode_of(node.graph):
        edit.record(dense, edit.fake(value).clone(memory_format=torch.contiguous_format))
    edit.replace_operand(node, 0, dense)


def _spell_out_copy(node: fx.Node) -> None:
    target, source = edit.operands(node)
    steps: list[tuple[Any, ...]] = [(aten.to.dtype, edit.fake(target).dtype), (aten.expand_as.default, target)]
    if is_contiguous(edit.fake(target)):
        steps.append((aten.contiguous.default,))
    for op, *rest in steps:
        call = edit.insert_before(node, op, (source, *rest), f"{node.name}_source")
        with fake_mode_of(node.graph):
            edit.record(call, op(*(edit.fake(arg) if isinstance(arg, fx.Node) else arg for arg in call.args)))
        source = call
    edit.replace_operand(node, 1, source)


def _is_another(node: fx.Node) -> bool:
    if node.target is not aten.copy_.default:
        return False
    target, source = (edit.fake(each) for each in edit.operands(node))
    same = target.ndim == source.ndim and all(map(statically_equal, target.shape, source.shape))
    return not same or target.dtype != source.dtype or (is_contiguous(target) and not is_contiguous(source))
