"""Linear algebra on batches of vectors and matrices: their own dims stay whole, batch dims are free."""

from __future__ import annotations

import re

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.rules.notation import RuleText
from tpcompiler.rules.pointwise import broadcast, pointwise
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import dims_text

# The results for one matrix: the last dims of operands and outputs.
FACTORS = {
    aten.cholesky.default: "m! n! -> m! n!",
    aten.cholesky_inverse.default: "m! n! -> m! n!",
    aten.geqrf.default: "m! n! -> m! n!, k!",
    aten.linalg_cholesky_ex.default: "m! n! -> m! n!,",
    aten._linalg_det.default: "m! n! ->, m! n!, m!",
    aten.linalg_eig.default: "m! n! -> m!, m! n!",
    aten._linalg_eigh.default: "m! n! -> m!, m! n!",
    aten._linalg_eigvals.default: "m! n! -> m!",
    aten.linalg_householder_product.default: "m! n!, k! -> m! n!",
    aten.linalg_inv_ex.default: "m! n! -> m! n!,",
    aten.linalg_ldl_factor_ex.default: "m! n! -> m! n!, m!,",
    aten.linalg_lu.default: "m! n! -> m! p!, m! k!, k! n!",
    aten.linalg_lu_factor_ex.default: "m! n! -> m! n!, k!,",
    aten.lu_unpack.default: "m! n!, k! -> m! p!, m! k!, k! n!",
    aten.linalg_matrix_exp.default: "m! n! -> m! n!",
    aten.linalg_pinv.atol_rtol_tensor: "m! n!,, -> n! m!",
    aten.linalg_qr.default: "m! n! -> m! k!, j! n!",
    aten._linalg_slogdet.default: "m! n! ->,, m! n!, m!",
    aten._linalg_svd.default: "m! n! -> m! j!, k!, l! n!",
}
# Equations with `k` right sides: columns, or rows if the unknown is on the left.
SOLVERS = {
    aten.cholesky_solve.default: "m! k, m! n! -> m! k",
    aten.linalg_ldl_solve.default: "m! n!, m!, m! k -> m! k",
    aten.linalg_lu_solve.default: "m! n!, m!, m! k -> m! k",
    aten.linalg_solve_triangular.default: "m! n!, m! k -> m! k",
    aten._linalg_solve_ex.default: "m! n!, m! k -> m! k, m! n!, m!,",
    aten.ormqr.default: "m! n!, j!, m! k -> m! k",
    aten.triangular_solve.default: "m! k, m! n! -> m! k, m! n!",
}


def batched(node: fx.Node, text: str) -> str:
    """Return "b0 b1 m! n! -> b0 b1 m!" for "m! n! -> m!". Batch dims broadcast; an omitted output is whole."""
    before, after = (part.split(",") for part in text.split("->"))
    values, results = [edit.fake(operand) for operand in edit.operands(node)], edit.outputs(node)
    ndim = max(value.ndim - len(term.split()) for term, value in zip(before, values, strict=False))
    full = next(
        value.shape[:ndim] for term, value in zip(after, results, strict=True) if value.ndim == ndim + len(term.split())
    )
    names = [f"b{d}" for d in range(ndim)]

    def whole_term(term: str, value: torch.Tensor) -> str:
        if value.ndim < len(term.split()):
            return "z!"
        return f"{broadcast(value.shape[: value.ndim - len(term.split())], names, full)} {term}"

    sides = (zip(before, values, strict=False), zip(after, results, strict=True))
    return " -> ".join(", ".join(whole_term(*pair) for pair in side) for side in sides)


@op_rule(*FACTORS, shards="nonempty")
def factorization(node: fx.Node) -> str:
    """ "b m! n! -> b m! k!, b k! n!": each matrix separately. Not every kernel takes an empty batch."""
    return batched(node, FACTORS[node.target])


@op_rule(*SOLVERS, shards="nonempty")
def solver(node: fx.Node) -> RuleText:
    """ "b m! n!, b m! k -> b m! k": right sides are independent, and the op is linear in them."""
    text = SOLVERS[node.target]
    args, operands = edit.bound(node), edit.operands(node)
    if not args.get("left", True):
        text = text.replace("m! k", "k m!")
    right = next(i for i, term in enumerate(text.split("->")[0].split(",")) if "k" in term.split())
    matrix, sides = (edit.shape(operands[i]) for i in (0, right))
    if node.target is aten._linalg_solve_ex.default and (len(sides) == 1 or sides == matrix[:-1]):
        text = text.replace("m! k", "m!").replace("k m!", "m!")  # one right side per matrix
    single = len(edit.outputs(node)) == 1  # no pending sum is possible if other results depend on the matrix alone
    return RuleText(batched(node, text), linear=((right,),) if single else ())


@op_rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default, shards="nonempty")
def fourier(node: fx.Node) -> RuleText:
    """ "d0 d1! -> d0 f1": the transformed dims are whole; the last one may change its size."""
    ndim = edit.ndim(node)
    dims = [dim % ndim for dim in edit.arguments(node).dim]
    result = " ".join(f"f{d}" if d in dims else f"d{d}" for d in range(ndim))
    return RuleText(f"{dims_text(ndim, dims)} -> {result}", linear=((0,),))


@op_rule(aten.linalg_cross.default, shards="any")
def cross(node: fx.Node) -> RuleText:
    """ "d0 d1!, d0 d1! -> d0 d1!": the vector's dim is whole, others broadcast. Linear in each operand."""
    whole = f"d{edit.arguments(node).dim % edit.ndim(node)}"
    return RuleText(re.sub(rf"\b{whole}\b", f"{whole}!", pointwise(node)), linear=((0,), (1,)))


@op_rule(aten.renorm.default, shards="any")
def renorm(node: fx.Node) -> str:
    """ "d0! d1 d2! -> d0! d1 d2!": every slice of the dim has its own norm."""
    ndim = edit.ndim(node)
    term = " ".join(f"d{d}" if d == edit.arguments(node).dim % ndim else f"d{d}!" for d in range(ndim))
    return f"{term} -> {term}"


@op_rule(aten.trace.default, shards="any")
def trace(node: fx.Node) -> RuleText:
    """ "d0! d1! ->": the diagonal crosses both dims. Linear."""
    return RuleText("d0! d1! ->", linear=((0,),))
