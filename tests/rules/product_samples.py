"""Calls of the less usual products: fused, of three operands, grouped, and contractions that name their dims."""

from __future__ import annotations

import torch

from tests.rules.sample import call, ids, t
from tpcompiler.rules.experts import BY_BLOCK

aten = torch.ops.aten
einsum, tensordot = aten.einsum.default, aten.tensordot.default
ENDS = torch.tensor([4, 12, 16], dtype=torch.int32)


def small(*shape: int) -> torch.Tensor:
    """Whole numbers in float32, of which sums of products are exact."""
    return (ids(*shape, below=9) - 4).float()


PRODUCTS_2 = [
    call(aten.addbmm.default, t(4, 5), t(3, 4, 6), t(3, 6, 5), text="+m n, b m k, b k n -> m n"),
    call(aten.addbmm.default, t(5), t(3, 4, 6), t(3, 6, 5), beta=2, alpha=3, text="+n, b m k, b k n -> m n"),
    call(aten.addmv.default, t(4), t(4, 6), t(6), beta=0.5, text="+m, m k, k -> m"),
    call(aten.addmv.default, t(1), t(4, 6), t(6), text="+1, m k, k -> m"),
    call(aten.addmv.default, t(), t(5, 6), t(6), alpha=2, text="+, m k, k -> m"),
    call(aten._int_mm.default, ids(4, 6, below=9).char(), ids(6, 5, below=9).char(), text="m k, k n -> m n"),
    call(
        aten._trilinear.default,
        t(3, 4),
        t(6, 4, 5),
        t(3, 5),
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
        text="d0 d2, d1 d2 d3, d0 d3 -> d0 d1",
    ),
    call(
        BY_BLOCK,
        small(4, 5, 16),
        small(8, 16, 8),
        torch.tensor([[1, 3], [0, 5], [4, 4], [0, 0]], dtype=torch.int32),
        "aten._grouped_mm.default",
        0.25,
        text="d s! (k k_!), (d g!) (k k_!) (n n_!), d g! -> d s! (n n_!)",
    ),
    call(
        aten._grouped_mm.default,
        small(3, 5, 16),
        small(3, 16, 12),
        text="g m! (k k_!), g (k k_!) (n n_!) -> g m! (n n_!)",
    ),
    call(
        aten._grouped_mm.default,
        small(16, 12),
        small(3, 12, 8),
        ENDS,
        text="t (k k_!), g! (k k_!) (n n_!), g! -> t (n n_!)",
    ),
    call(
        aten._grouped_mm.default,
        small(3, 8, 16),
        small(16, 16),
        ENDS,
        text="g! (m m_!) (k k_!), (k k_!) (t t_!), g! -> (m m_!) (t t_!)",
    ),
    call(
        aten._grouped_mm.default,
        small(8, 16),
        small(16, 20),
        ENDS,
        text="(m m_!) (t t_!), (t t_!) (n n_!), g! -> g! (m m_!) (n n_!)",
    ),
]

CONTRACTIONS = [
    call(einsum, "bhsd,bhtd->bhst", [t(2, 4, 3, 5), t(2, 4, 6, 5)], text="b h s d, b h t d -> b h s t"),
    call(einsum, "b s k, k h d -> b h s d", [t(2, 3, 6), t(6, 4, 5)], text="b s k, k h d -> b h s d"),
    call(einsum, "ij,jk", [t(4, 6), t(6, 5)], text="i j, j k -> i k"),
    call(einsum, "ji,Bj", [t(4, 6), t(3, 4)], text="j i, B j -> B i"),
    call(einsum, "ij->", [t(4, 6)], text="i j ->"),
    call(einsum, "ij->ji", [t(4, 6)], text="i j -> j i"),
    call(einsum, "bi,ij,bj->b", [t(3, 4), t(4, 6), t(3, 6)], text="b i, i j, b j -> b"),
    call(einsum, "bii->bi", [t(3, 5, 5)], text="b i! i! -> b i"),
    call(einsum, "bii", [t(3, 5, 5)], text="b i! i! -> b"),
    call(einsum, "ij,jk->ik", [t(4, 1), t(6, 5)], text="i 1, j k -> i k"),
    call(einsum, "ij,ij->ij", [t(1, 1), t(1, 6)], text="i 1, i j -> i j"),
    call(einsum, "...sk,...kn->...sn", [t(3, 4, 5), t(6, 3, 5, 2)], text="e0 s k, e1 e0 k n -> e1 e0 s n"),
    call(einsum, "...i,i", [t(3, 1, 5), t(5)], text="e1 e0 i, i -> e1 e0"),
    call(einsum, "a...,...b->ab", [t(3, 4, 1), t(4, 5, 6)], text="a e1 1, e1 e0 b -> a b"),
    call(einsum, ",i->i", [t(), t(5)], text=", i -> i"),
    call(tensordot, t(3, 4, 5), t(4, 5, 6), [1, 2], [0, 1], text="a0 k0 k1, k0 k1 b2 -> a0 b2"),
    call(tensordot, t(3, 4, 5), t(6, 5, 3), [-1, 0], [1, -1], text="k1 a1 k0, b0 k0 k1 -> a1 b0"),
    call(tensordot, t(3, 1), t(4, 5), [1], [0], text="a0 1, k0 b1 -> a0 b1"),
    call(tensordot, t(3), t(4), [], [], text="a0, b0 -> a0 b0"),
]
