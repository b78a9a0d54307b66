"""Calls of ops on batches of matrices, and of Fourier transforms."""

from __future__ import annotations

import torch

from tests.rules.sample import call, t

aten = torch.ops.aten


def positive(*batch: int, n: int = 3) -> torch.Tensor:
    """Symmetric, and far from singular."""
    root = t(*batch, n, n)
    return root @ root.mT + 3 * torch.eye(n, dtype=root.dtype)


# Triangles far from singular in whatever order their elements stand, and rows that change places.
TRIANGLE = t(4, 3, 3).abs() + 1
SWAPS = torch.tensor([2, 3, 3], dtype=torch.int32).expand(4, 3).contiguous()
REFLECTORS, SCALES = torch.geqrf(t(4, 5, 3))
ONES = "b0 m! n! -> b0 m! n!"

LINALG = [
    *(
        [
            call(aten.cholesky.default, positive(4), text=ONES),
            call(aten.cholesky.default, positive(), True, text="m! n! -> m! n!"),
        ]
        if hasattr(aten, "cholesky")  # torch 2.14 has it no more
        else []
    ),
    call(aten.cholesky_inverse.default, TRIANGLE, text=ONES),
    call(aten.geqrf.default, t(4, 5, 3), text="b0 m! n! -> b0 m! n!, b0 k!"),
    call(aten.linalg_cholesky_ex.default, positive(2, 4), text="b0 b1 m! n! -> b0 b1 m! n!, b0 b1"),
    call(aten._linalg_det.default, t(6, 3, 3), text="b0 m! n! -> b0, b0 m! n!, b0 m!"),
    call(aten.linalg_eig.default, t(4, 3, 3), text="b0 m! n! -> b0 m!, b0 m! n!"),
    call(aten._linalg_eigh.default, positive(4), text="b0 m! n! -> b0 m!, b0 m! n!"),
    call(aten._linalg_eigh.default, positive(4), "L", False, text="b0 m! n! -> b0 m!, z!"),
    call(aten._linalg_eigvals.default, t(4, 3, 3), text="b0 m! n! -> b0 m!"),
    call(aten.linalg_householder_product.default, REFLECTORS, SCALES, text="b0 m! n!, b0 k! -> b0 m! n!"),
    call(aten.linalg_inv_ex.default, t(5, 3, 3), text="b0 m! n! -> b0 m! n!, b0"),
    call(aten.linalg_ldl_factor_ex.default, positive(4), text="b0 m! n! -> b0 m! n!, b0 m!, b0"),
    call(aten.linalg_lu.default, t(4, 5, 3), text="b0 m! n! -> b0 m! p!, b0 m! k!, b0 k! n!"),
    call(aten.linalg_lu_factor_ex.default, t(4, 3, 5), text="b0 m! n! -> b0 m! n!, b0 k!, b0"),
    call(aten.lu_unpack.default, TRIANGLE, SWAPS, text="b0 m! n!, b0 k! -> b0 m! p!, b0 m! k!, b0 k! n!"),
    call(aten.lu_unpack.default, TRIANGLE, SWAPS, False, text="b0 m! n!, b0 k! -> b0 m! p!, z!, z!"),
    call(aten.linalg_matrix_exp.default, t(5, 3, 3), text=ONES),
    call(aten.linalg_pinv.atol_rtol_tensor, t(4, 5, 3), text="b0 m! n! -> b0 n! m!"),
    call(aten.linalg_pinv.atol_rtol_tensor, t(4, 5, 3), atol=t(4).abs(), rtol=t(), text="b0 m! n!, b0, -> b0 n! m!"),
    call(aten.linalg_qr.default, t(4, 5, 3), "complete", text="b0 m! n! -> b0 m! k!, b0 j! n!"),
    call(aten._linalg_slogdet.default, t(4, 3, 3), text="b0 m! n! -> b0, b0, b0 m! n!, b0 m!"),
    call(aten._linalg_svd.default, t(2, 4, 5, 3), text="b0 b1 m! n! -> b0 b1 m! j!, b0 b1 k!, b0 b1 l! n!"),
    call(aten._linalg_svd.default, t(4, 3, 5), True, text="b0 m! n! -> b0 m! j!, b0 k!, b0 l! n!"),
    call(aten._linalg_svd.default, t(4, 3, 5), False, False, text="b0 m! n! -> z!, b0 k!, z!"),
    call(aten.cholesky_solve.default, t(3, 5), TRIANGLE, text="m! k, b0 m! n! -> b0 m! k"),
    call(aten.linalg_ldl_solve.default, TRIANGLE, SWAPS, t(4, 3, 5), text="b0 m! n!, b0 m!, b0 m! k -> b0 m! k"),
    call(aten.linalg_lu_solve.default, TRIANGLE, SWAPS, t(2, 1, 3, 5), text="b1 m! n!, b1 m!, b0 1 m! k -> b0 b1 m! k"),
    call(
        aten.linalg_lu_solve.default,
        TRIANGLE,
        SWAPS,
        t(4, 5, 3),
        left=False,
        text="b0 m! n!, b0 m!, b0 k m! -> b0 k m!",
    ),
    call(
        aten.linalg_solve_triangular.default,
        TRIANGLE,
        t(4, 3, 6),
        upper=False,
        text="b0 m! n!, b0 m! k -> b0 m! k",
    ),
    call(
        aten._linalg_solve_ex.default, t(4, 3, 3), t(4, 3, 5), text="b0 m! n!, b0 m! k -> b0 m! k, b0 m! n!, b0 m!, b0"
    ),
    call(aten._linalg_solve_ex.default, t(4, 3, 3), t(4, 3), text="b0 m! n!, b0 m! -> b0 m!, b0 m! n!, b0 m!, b0"),
    call(aten._linalg_solve_ex.default, t(4, 3, 3), t(3), text="b0 m! n!, m! -> b0 m!, b0 m! n!, b0 m!, b0"),
    call(aten.ormqr.default, REFLECTORS, SCALES, t(4, 5, 6), text="b0 m! n!, b0 j!, b0 m! k -> b0 m! k"),
    call(aten.ormqr.default, REFLECTORS, SCALES, t(4, 6, 5), False, text="b0 m! n!, b0 j!, b0 k m! -> b0 k m!"),
    call(aten.triangular_solve.default, t(3, 5), TRIANGLE, False, text="m! k, b0 m! n! -> b0 m! k, b0 m! n!"),
]

FOURIER = [
    call(aten._fft_c2c.default, torch.complex(t(4, 5, 6), t(4, 5, 6)), [1], 0, True, text="d0 d1! d2 -> d0 f1 d2"),
    call(aten._fft_r2c.default, t(4, 5, 6), [0, 2], 0, True, text="d0! d1 d2! -> f0 d1 f2"),
    call(aten._fft_c2r.default, torch.complex(t(4, 5), t(4, 5)), [1], 2, 8, text="d0 d1! -> d0 f1"),
]

FRACTIONAL = [
    call(
        aten.fractional_max_pool2d.default,
        t(4, 3, 6, 7),
        [2, 2],
        [3, 3],
        t(4, 3, 2).sigmoid(),
        text="n c s0! s1!, n c r! -> n c o0! o1!, n c o0! o1!",
    ),
    call(
        aten.fractional_max_pool3d.default,
        t(5, 6, 6, 6),
        [2, 2, 2],
        [3, 3, 3],
        t(1, 5, 3).sigmoid(),
        text="c s0! s1! s2!, r0! c r! -> c o0! o1! o2!, c o0! o1! o2!",
    ),
]
