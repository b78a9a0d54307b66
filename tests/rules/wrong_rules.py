"""Rules that look right and are not: each must be caught when it is executed."""

from __future__ import annotations

import torch

from tests.rules.attention_samples import sdpa
from tests.rules.product_samples import ENDS, einsum, small
from tests.rules.sample import call, flags, t
from tpcompiler.rules.notation import RuleText

aten = torch.ops.aten

WRONG_ON_SPACE_AND_STRUCTURE = {
    "groups in the wrong order": (
        call(aten.conv1d.default, t(2, 4, 5), t(4, 2, 3), groups=2, text=""),
        RuleText("n (i g) s!, (o g) i k! -> n (o g) p", factors={"g": 2}),
    ),
    "input channels cut across groups": (
        call(aten.conv1d.default, t(2, 4, 5), t(4, 2, 3), groups=2, text=""),
        RuleText("n c s!, c i! k! -> n c p"),
    ),
    "groups left global": (
        call(aten.conv2d.default, t(1, 4, 3, 3), t(4, 1, 2, 2), groups=4, text=""),
        RuleText("n (g i) s! u!, (g o) i k! l! -> n (g o) p q", factors={"g": 4}),
    ),
    "a transposed bias once per rank": (
        call(aten.conv_transpose1d.default, t(2, 4, 5), t(4, 3, 2), t(3), text=""),
        RuleText("n i s!, i o k!, o -> n o p"),
    ),
    "a transposed weight read as a straight one": (
        call(aten.conv_transpose1d.default, t(2, 4, 5), t(4, 4, 2), text=""),
        RuleText("n i s!, o i k! -> n o p"),
    ),
    "a kernel cut where windows lie side by side": (
        call(aten.conv1d.default, t(2, 4, 8), t(3, 4, 4), None, [4], text=""),
        RuleText("n i (o! k), c i k -> n c o!"),
    ),
    "windows that overlap": (
        call(aten.avg_pool1d.default, t(2, 3, 6), [3], [1], [1], text=""),
        RuleText("n c s -> n c s", factors={"s": 6}),
    ),
    "an index that counts in a shard": (
        call(aten.max_pool2d_with_indices.default, t(2, 3, 4, 2), [2], text=""),
        RuleText("n c (o k!) w! -> n c o v, n c o v"),
    ),
    "a size that is left global": (
        call(aten._adaptive_avg_pool2d.default, t(2, 3, 8, 4), [4, 2], text=""),
        RuleText("n c (o k!) w! -> n c o v"),
    ),
    "an image cut under its samples": (
        call(aten.grid_sampler_2d.default, t(2, 3, 4, 4), t(2, 5, 5, 2), 0, 0, False, text=""),
        RuleText("n c h w!, n o p x! -> n c o p"),
    ),
    "a resized image cut": (
        call(aten.upsample_bilinear2d.vec, t(2, 3, 4, 4), None, False, [2.0, 2.0], text=""),
        RuleText("n c (h k!) w! -> n c (h l!) v", factors={"h": 4}),
    ),
    "repetitions within each element": (
        call(aten.repeat.default, t(6), [2], text=""),
        RuleText("d0 -> (d0 r!)", factors={"r": 2}),
    ),
    "parts that alternate": (
        call(aten.cat.default, [t(2, 4), t(2, 4)], 1, text=""),
        RuleText("d0 c, d0 c -> d0 (c n!)"),
    ),
    "the first half read as one of each two": (
        call(aten.slice.Tensor, t(2, 8), 1, 0, 4, text=""),
        RuleText("d0 (c k!) -> d0 c", factors={"k": 2}),
    ),
    "a padded dim cut": (
        call(aten.constant_pad_nd.default, t(4, 3), [0, 0, -1, 1], text=""),
        RuleText("d0 d1 -> d0 d1"),
    ),
    "a number padded to each share": (
        call(aten.constant_pad_nd.default, t(4, 3), [1, 1], 2.0, text=""),
        RuleText("d0 d1! -> d0 p", linear=((0,),)),
    ),
    "one branch pending beside a whole one": (
        call(aten.where.self, torch.tensor([True, False, True, False]), t(4), t(4), text=""),
        RuleText("d0, d0, d0 -> d0", linear=((1,),)),
    ),
    "a number filled into each share": (
        call(aten.masked_fill.Scalar, t(6), flags(6), 1.0, text=""),
        RuleText("d0, d0 -> d0", linear=((0,),)),
    ),
    "keys pending": (
        call(sdpa, t(2, 3, 4), t(2, 3, 4), t(2, 3, 4), text=""),
        RuleText("h s d!, h t! d!, h t! e -> h s e", linear=((1,),)),
    ),
    "features of queries cut": (
        call(sdpa, t(2, 3, 4), t(2, 3, 4), t(2, 3, 4), text=""),
        RuleText("h s d, h t! d, h t! e -> h s e"),
    ),
    "rows of a diagonal cut": (call(einsum, "ii->i", [t(4, 4)], text=""), RuleText("i j! -> i")),
    "tokens of groups cut": (
        call(aten._grouped_mm.default, small(16, 8), small(3, 8, 4), ENDS, text=""),
        RuleText("t k!, g! k! n!, g! -> t n!"),
    ),
    "parts of a number cut": (
        call(aten.view_as_complex.default, t(4, 2), text=""),
        RuleText("d0 p -> d0"),
    ),
    "a transformed dim cut": (
        call(aten._fft_c2c.default, torch.complex(t(4, 6), t(4, 6)), [1], 0, True, text=""),
        RuleText("d0 d1 -> d0 d1"),
    ),
    "equations of one matrix apart": (
        call(aten.linalg_solve_triangular.default, t(3, 4, 4).abs() + 1, t(3, 4, 5), upper=False, text=""),
        RuleText("b m n, b m k -> b m k"),
    ),
    "a factorization of a sum": (
        call(aten.linalg_matrix_exp.default, t(3, 4, 4), text=""),
        RuleText("b m! n! -> b m! n!", linear=((0,),)),
    ),
}
