"""Bring an exported program into the form that the rules read."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload, decomposed, statically_equal
from tpcompiler.errors import ProgramError
from tpcompiler.ir import edit
from tpcompiler.ir.program import CanonicalProgram
from tpcompiler.ir.refused import refuse_calls, refuse_values
from tpcompiler.rules.registry import has_rule

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def canonicalize(exported_program: ExportedProgram) -> CanonicalProgram:
    """Make the graph functional and free of higher-order wrappers; keep ops that have a rule whole.

    Before    training IR, canonical IR or core ATen
              bn.add_(one); with set_grad_enabled: ...; linear(x, w); _assert_tensor_metadata(y)
              view(bmm(view(q, [b * h, s, d]), view(k, [b * h, d, t])), [b, h, s, t])
    After     bn_1 = add(bn, one) -> written back by the signature; linear(x, w)
              matmul(q, k)

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
    _compose_matmul(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    refuse_calls(source, graph)
    for node in graph.nodes:
        node.meta.pop("custom", None)  # annotations of the exporter; claims take their place
    return CanonicalProgram(source, graph)


def _compose_matmul(graph: fx.Graph) -> None:
    """Core ATen merges batch dims into one for bmm and splits them again; in between no head could be cut."""
    for node in edit.calls(graph):
        product = edit.operands(node)[0] if node.target in VIEWS else None
        if product is not None and product.target is aten.bmm.default:
            sides = [_before_merge(side, node) for side in edit.operands(product)]
            if None not in sides and _same(node, product, slice(-2, None)):
                node.target, node.args, node.kwargs = aten.matmul.default, tuple(sides), {}


def _before_merge(side: fx.Node, split: fx.Node) -> fx.Node | None:
    """What `side` is a view of, if that has the batch dims that `split` makes again."""
    if side.target not in VIEWS:
        return None
    (whole,) = edit.operands(side)
    fits = whole.meta["val"].ndim == split.meta["val"].ndim and _same(whole, split, slice(None, -2))
    return whole if fits and _same(whole, side, slice(-2, None)) else None


def _same(a: fx.Node, b: fx.Node, dims: slice) -> bool:
    return all(map(statically_equal, a.meta["val"].shape[dims], b.meta["val"].shape[dims]))


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return (isinstance(node.target, OpOverload) and node.target._schema.is_mutable) or "assert" in str(node.target)
