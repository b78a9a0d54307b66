"""Calls of normalisations, of bags of embeddings, and of ops that keep triangles and diagonals."""

from __future__ import annotations

import torch

from tests.rules.sample import call, ids, t

aten = torch.ops.aten

GROUPED = [
    call(aten.group_norm.default, t(4, 12, 3), 6, t(12), t(12), text="n (g c!) s0!, (g c!), (g c!) -> n (g c!) s0!"),
    call(aten.group_norm.default, t(5, 6, 2, 3), 3, text="n (g c!) s0! s1! -> n (g c!) s0! s1!"),
    call(aten.group_norm.default, t(3, 10), 5, None, t(10), 1e-3, text="n (g c!), (g c!) -> n (g c!)"),
    call(aten.group_norm.default, t(4, 6, 3), 6, t(6), text="n (g c!) s0!, (g c!) -> n (g c!) s0!"),
    call(aten.group_norm.default, t(4, 6, 3), 1, text="n (g c!) s0! -> n (g c!) s0!"),
    call(
        aten.native_group_norm.default,
        t(5, 8, 3, 2),
        t(8),
        t(8),
        5,
        8,
        6,
        4,
        1e-5,
        text="n (g c!) s0! s1!, (g c!), (g c!) -> n (g c!) s0! s1!, n g, n g",
    ),
    call(
        aten.native_group_norm.default,
        t(1, 6, 4),
        None,
        None,
        1,
        6,
        4,
        3,
        1e-5,
        text="n (g c!) s0! -> n (g c!) s0!, n g, n g",
    ),
    call(
        aten._native_batch_norm_legit.no_stats,
        t(4, 6, 3),
        t(6),
        t(6),
        True,
        0.1,
        1e-5,
        text="n! c s0!, c, c -> n! c s0!, c, c",
    ),
    call(
        aten._native_batch_norm_legit.no_stats,
        t(5, 4),
        None,
        None,
        True,
        0.1,
        1e-5,
        text="n! c -> n! c, c, c",
    ),
    call(aten._fused_rms_norm.default, t(4, 5, 6), [6], t(6), 1e-5, text="d0 d1 h0!, h0! -> d0 d1 h0!, d0 d1 1"),
    call(aten._fused_rms_norm.default, t(5, 2, 3), [2, 3], None, None, text="d0 h0! h1! -> d0 h0! h1!, d0 1 1"),
]

BAGS = [
    call(
        aten._embedding_bag.default,
        t(7, 5),
        ids(6, below=7),
        torch.tensor([0, 2, 2]),
        text="v d, i!, o! -> b! d, x0!, x1!, x2!",
    ),
    call(
        aten._embedding_bag.default,
        t(7, 6),
        ids(5, below=7),
        torch.tensor([0, 1]),
        False,
        0,
        False,
        t(5),
        text="v d, i!, o!, i! -> b! d, x0!, x1!, x2!",
    ),
    call(
        aten._embedding_bag.default,
        t(6, 4),
        torch.tensor([3, 3, 1, 5, 3, 0]),
        torch.tensor([0, 2, 2, 6]),
        False,
        1,
        False,
        None,
        True,
        3,
        text="v d, i!, o! -> b! d, x0!, x1!, x2!",
    ),
    call(
        aten._embedding_bag.default,
        t(6, 4),
        torch.tensor([3, 0, 1, 5, 3, 0]),
        torch.tensor([0, 2, 3]),
        per_sample_weights=t(6),
        padding_idx=0,
        text="v d, i!, o!, i! -> b! d, x0!, x1!, x2!",
    ),
    call(
        aten._embedding_bag.default,
        t(5, 4),
        ids(6, below=5),
        torch.tensor([0, 4]),
        mode=2,
        padding_idx=1,
        text="v! d, i!, o! -> b! d, x0!, x1!, b! d",
    ),
    call(
        aten._embedding_bag_forward_only.default,
        t(7, 5),
        ids(6, below=7),
        torch.tensor([0, 3, 3]),
        mode=1,
        text="v d, i!, o! -> b! d, x0!, x1!, x2!",
    ),
    call(
        aten._embedding_bag_forward_only.default,
        t(7, 5),
        ids(6, below=7),
        torch.tensor([0, 3, 6]),
        include_last_offset=True,
        text="v d, i!, o! -> b! d, x0!, x1!, x2!",
    ),
]

TRIANGLES = [
    call(aten.tril.default, t(6, 3, 4), -1, text="d0 d1 d2 -> d0 d1 d2"),
    call(aten.triu.default, t(5, 6), 1, text="d0 d1 -> d0 d1"),
    call(aten.triu.default, t(7, 3), -4, text="d0 d1 -> d0 d1"),
    call(aten.tril.default, t(3, 7), 5, text="d0 d1 -> d0 d1"),
    call(aten.diagonal_scatter.default, t(4, 5), t(4), text="d0! d1!, k! -> d0! d1!"),
    call(aten.diagonal_scatter.default, t(4, 5, 6), t(5, 4), 1, 0, -1, text="d0! d1 d2!, d1 k! -> d0! d1 d2!"),
]
