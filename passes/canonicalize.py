"""Bring an exported program into the form that the rules read."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, decomposed
from tpcompiler.errors import ProgramError
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.refused import refuse_calls, refuse_values
from tpcompiler.rules.registry import has_rule

aten = torch.ops.aten


def canonicalize(exported_program: ExportedProgram) -> CanonicalProgram:
    """Make the graph functional and free of higher-order wrappers; keep ops that have a rule whole.

    Before    training IR, canonical IR or core ATen
              bn.add_(one); with set_grad_enabled: ...; linear(x, w); _assert_tensor_metadata(y)
    After     bn_1 = add(bn, one) -> written back by the signature; linear(x, w)

    Leaves one flat functional graph. The input program is not changed.

    Raises:
        ProgramError: no exported program, its state does not fit its graph, or decomposition fails.
        UnsupportedError: what `ir.refused` lists: control flow, random numbers, sparse and quantised tensors, ...
    """
    refuse_values(exported_program)
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
    graph = edit.copy_graph(source.graph)
    for node in edit.calls(graph):
        if node.target is aten._assert_tensor_metadata.default:
            edit.erase(node)  # it states sizes that no shard has
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    refuse_calls(source, graph)
    for node in graph.nodes:
        node.meta.pop("custom", None)  # annotations of the exporter; claims take their place
    return CanonicalProgram(source, graph)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return (isinstance(node.target, OpOverload) and node.target._schema.is_mutable) or "assert" in str(node.target)
