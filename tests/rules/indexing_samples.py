"""Calls of ops that read or write at positions."""

from __future__ import annotations

import torch

from tests.rules.sample import call, distinct, flags, ids, t

aten = torch.ops.aten

INDEXING = [
    call(aten.index.Tensor, t(5, 6, 4), [None, ids(3, below=6)], text="d0 d1 d2, i0 -> d0 i0 d2"),
    call(aten.index.Tensor, t(5, 6), [ids(4, 3, below=5) - 3], text="d0 d1, i0 i1 -> i0 i1 d1"),
    call(
        aten.index.Tensor,
        t(5, 6, 4, 3),
        [None, ids(4, 1, below=6), ids(5, below=4)],
        text="d0 d1 d2 d3, i0 1, i1 -> d0 i0 i1 d3",
    ),
    call(
        aten.index.Tensor,
        t(5, 6, 4),
        [ids(3, below=5), None, ids(3, below=4)],
        text="d0 d1 d2, i0, i0 -> i0 d1",
    ),
    call(aten.index.Tensor, t(5, 6), [flags(5)], text=None),
    call(aten._unsafe_index.Tensor, t(5, 6), [None, ids(3, below=6)], text="d0 d1, i0 -> d0 i0"),
    call(
        aten.index_put.default,
        t(5, 6, 4),
        [None, distinct(3)],
        t(5, 3, 4),
        text="d0 d1 d2, i0!, d0 i0! d2 -> d0 d1 d2",
    ),
    call(
        aten.index_put.default,
        t(5, 6, 4),
        [ids(3, below=5), None, ids(3, below=4)],
        t(3, 6),
        True,
        text="+d0 d1 d2, i0, i0, i0 d1 -> d0 d1 d2",
    ),
    call(aten.index_put.default, t(5, 6), [distinct(4)], t(6), text="d0 d1, i0!, d1 -> d0 d1"),
    call(aten.index_put.default, t(5, 6), [distinct(4)], t(4, 1), text="d0 d1, i0!, i0! 1 -> d0 d1"),
    call(aten.index_put.default, t(5, 6), [flags(5)], t(), text=None),
    call(aten._unsafe_index_put.default, t(5, 6), [distinct(4)], t(4, 6), text="d0 d1, i0!, i0! d1 -> d0 d1"),
    call(aten.index_select.default, t(5, 6), 1, ids(4, below=6), text="d0 d1, i -> d0 i"),
    call(aten.index_select.default, t(5, 6), -2, ids(4, below=5), text="d0 d1, i -> i d1"),
    call(aten.index_copy.default, t(5, 6, 4), 1, distinct(3), t(5, 3, 4), text="d0 d1 d2, i!, d0 i! d2 -> d0 d1 d2"),
    call(aten.index_copy.default, t(3, 8), -1, distinct(1), t(3, 1), text="d0 d1, i!, d0 i! -> d0 d1"),
    call(aten.index_fill.int_Scalar, t(5, 6), 1, ids(3, below=6) - 6, 2.0, text="d0 d1, i! -> d0 d1"),
    call(aten.index_fill.int_Tensor, t(5, 6), -2, ids(7, below=5), t(), text="d0 d1, i!, -> d0 d1"),
    call(
        aten.index_put.default,
        t(5, 6),
        [ids(7, 1, below=5), ids(3, below=6)],
        t(3),
        True,
        text="+d0 d1, i0 1, i1, i1 -> d0 d1",
    ),
    call(aten.index_put.default, t(5, 6), [ids(6, below=5)], t(6, 1), True, text="+d0 d1, i0, i0 1 -> d0 d1"),
    call(aten.index_put.default, t(5, 6), [ids(7, below=5)], t(), True, text="+d0 d1, i0, -> d0 d1"),
    call(aten.index_add.default, t(5, 6), 0, ids(7, below=5), t(7, 6), alpha=2, text="+d0 d1, i, i d1 -> d0 d1"),
    call(aten.index_add.default, t(5, 6, 3), -2, ids(4, below=6), t(5, 4, 3), text="+d0 d1 d2, i, d0 i d2 -> d0 d1 d2"),
    call(aten.index_reduce.default, t(5, 6), 0, ids(7, below=5), t(7, 6), "amax", text="d0 d1, i!, i! d1 -> d0 d1"),
    call(aten.gather.default, t(5, 6), 1, ids(5, 3, below=6), text="d0 d1, d0 i -> d0 i"),
    call(aten.index.Tensor, t(5, 6), [None, ids(below=6)], text="d0 d1, -> d0"),
    call(aten.index.Tensor, distinct(5, 6).short(), [ids(3, below=5)], text="d0! d1, i0 -> i0 d1"),
    call(aten.index.Tensor, distinct(5, 6), [ids(3, below=5)], text="d0 d1, i0 -> i0 d1"),
    call(aten.index_select.default, distinct(5, 6).short(), 0, ids(4, below=5), text="d0! d1, i -> i d1"),
    call(aten.gather.default, distinct(5).short(), 0, ids(3, below=5), text="d0!, i -> i"),
    call(aten.gather.default, t(5, 6), 1, ids(4, 3, below=6), text="d0! d1, i0! i -> i0! i"),
    call(aten.gather.default, t(5, 6, 4), 0, ids(3, 6, 4, below=5), text="d0 d1 d2, i d1 d2 -> i d1 d2"),
    call(
        aten.scatter.src,
        t(5, 6),
        1,
        distinct(3).expand(5, 3),
        t(5, 3),
        text="d0 d1, d0 i1!, d0 s1! -> d0 d1",
    ),
    call(aten.scatter.src, t(5, 6), 1, distinct(3).expand(4, 3), t(5, 4), text="d0! d1, i0! i1!, s0! s1! -> d0! d1"),
    call(aten.scatter.value, t(5, 6), 0, ids(2, 6, below=5), 3.0, text="d0 d1, i0! d1 -> d0 d1"),
    call(aten.scatter_add.default, t(5, 6), 1, ids(5, 4, below=6), t(5, 4), text="+d0 d1, d0 i1, d0 i1 -> d0 d1"),
    call(aten.scatter_add.default, t(5, 6), 1, ids(5, 4, below=6), t(5, 7), text="d0 d1, d0 i1!, d0 s1! -> d0 d1"),
    call(aten.scatter_add.default, t(5), 0, ids(7, below=5), t(7), text="+d0, i0, i0 -> d0"),
    call(aten.scatter_add.default, t(5, 6), 1, ids(4, 7, below=6), t(4, 7), text="+d0! d1, i0! i1, s0! i1 -> d0! d1"),
    call(
        aten.scatter.reduce,
        t(5, 6),
        0,
        ids(7, 6, below=5),
        t(7, 6),
        reduce="add",
        text="+d0 d1, i0 d1, i0 d1 -> d0 d1",
    ),
    call(
        aten.scatter.reduce,
        t(5, 6),
        0,
        ids(7, 6, below=5),
        t(7, 6),
        reduce="multiply",
        text="d0 d1, i0! d1, s0! d1 -> d0 d1",
    ),
    call(aten.scatter.value_reduce, t(5, 6), 0, ids(7, 6, below=5), 2.0, reduce="add", text="d0 d1, i0! d1 -> d0 d1"),
    *(
        call(
            aten.scatter_reduce.two,
            t(5, 6),
            1,
            ids(5, 7, below=6),
            t(5, 7),
            reduce,
            include_self=include_self,
            text="+d0 d1, d0 i1, d0 i1 -> d0 d1"
            if free and reduce == "sum"
            else "d0 d1, d0 i1, d0 i1 -> d0 d1"
            if free
            else "d0 d1, d0 i1!, d0 s1! -> d0 d1",
        )
        for reduce, include_self, free in (
            ("sum", True, True),
            ("amax", True, True),
            ("amin", True, True),
            ("sum", False, False),
            ("amax", False, False),
            ("prod", True, False),
            ("mean", True, False),
        )
    ),
    call(aten.slice_scatter.default, t(5, 6), t(5, 2), 1, 2, 4, text="d0 [x c z], d0 c -> d0 [x c z]"),
    call(aten.slice_scatter.default, t(6, 4), t(2, 4), 0, 0, 2, text="[c z] d1, c d1 -> [c z] d1"),
    call(aten.slice_scatter.default, t(5, 6), t(5, 4), -1, -4, text="d0 [x c], d0 c -> d0 [x c]"),
    call(aten.slice_scatter.default, t(5, 6), t(5, 2), 1, 1, 5, 2, text="d0 d1!, d0 s! -> d0 d1!"),
    call(aten.slice_scatter.default, t(5, 6), t(5, 6), 0, text="[c] d1, c d1 -> [c] d1"),
    call(aten.select_scatter.default, t(5, 6, 4), t(5, 4), 1, 2, text="d0 d1! d2, d0 d2 -> d0 d1! d2"),
]
