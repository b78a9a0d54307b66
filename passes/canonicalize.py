"""Bring an exported program into the form that the rules read."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpcompiler._torch import OpOverload, decomposed
from tpcompiler.errors import ProgramError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.rules.registry import has_rule

aten = torch.ops.aten


def canonicalize(exported_program: ExportedProgram) -> CanonicalProgram:
    """Make the graph functional and free of higher-order wrappers; keep ops that have a rule whole.

    Before    training IR, canonical IR or core ATen
              bn.add_(one); with set_grad_enabled: ...; linear(x, w); _assert_tensor_metadata(y)
    After     bn_1 = add(bn, one) -> written back by the signature; linear(x, w)

    Leaves one flat functional graph. The input program is not changed.

    Raises:
        ProgramError: decomposition fails.
        UnsupportedError: control flow, custom objects or effect tokens are left.
    """
    table = torch.export.default_decompositions()
    for target in [t for t in table if has_rule(t)]:
        del table[target]
    try:
        source = decomposed(exported_program, table)
    except Exception as error:
        raise ProgramError(
            f"the program cannot be made functional: {str(error).strip().splitlines()[0]}",
            help="check that it runs: exported_program.run_decompositions() fails in the same way",
        ) from error
    _refuse_what_has_no_graph(source)
    graph = edit.copy_graph(source.graph)
    for node in edit.calls(graph):
        if node.target is aten._assert_tensor_metadata.default:
            edit.erase(node)  # it states sizes that no shard has
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    for node in graph.nodes:
        node.meta.pop("custom", None)  # annotations of the exporter; claims take their place
    return CanonicalProgram(source, graph)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return (isinstance(node.target, OpOverload) and node.target._schema.is_mutable) or "assert" in str(node.target)


def _refuse_what_has_no_graph(source: ExportedProgram) -> None:
    for spec in source.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise UnsupportedError(
                f"input {spec.arg} is a {spec.kind.name.lower()}, which cannot be sharded yet",
                help="export the model without custom classes and side effects",
            )
    for node in source.graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedError(
                f"'{node.name}' is control flow or a nested graph ({node.target}), which cannot be sharded yet",
                help="export the model without torch.cond, scan or while_loop",
                used_at=edit.source_line(node),
            )
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise ProgramError(
                f"'{node.name}' ({node.target}) still changes its operand in place",
                help="export with torch.export.export, which lets decomposition make the graph functional",
                used_at=edit.source_line(node),
            )
