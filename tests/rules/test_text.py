"""The text of every rule, beside what a rule says besides its text."""

from __future__ import annotations

import re
from textwrap import fill

import pytest
from expecttest import assert_expected_inline

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES, written_of
from tpcompiler._torch import MISSING
from tpcompiler.rules.registry import _RULES

INDENT = {"initial_indent": "    ", "subsequent_indent": "    "}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    written = written_of(node_of(sample))
    assert (None if written is None else _plain(written.text)) == sample.text


def _plain(text: str) -> str:
    """Without the spaces that empty terms leave."""
    return re.sub(r"\s+", " ", text).strip().replace(" ,", ",")


@pytest.mark.skipif(bool(MISSING), reason="this torch lacks an op that the text names (GONE says which)")
def test_what_a_rule_says_besides_its_text() -> None:
    """Shards, linearity, reductions, size arguments and local bodies, of the first sample of every op."""
    ops: dict[str, list[str]] = {}
    for sample in {s.target: s for s in reversed(SAMPLES) if s.text is not None and s.target in _RULES}.values():
        ops.setdefault(_besides(sample), []).append(str(sample.target).removeprefix("aten."))
    text = "".join(f"{what}\n{fill(' '.join(sorted(names)), 100, **INDENT)}\n" for what, names in sorted(ops.items()))
    assert_expected_inline(
        text,
        """\
any shards
    _fused_rms_norm.default _log_softmax.default _safe_softmax.default _softmax.default all.default
    all.dim all.dims any.default any.dim any.dims argmax.default argmin.default bucketize.Tensor
    copy.default cummax.default cummin.default cumprod.default full_like.default histc.default
    kthvalue.default log_softmax.int logcumsumexp.default masked_fill.Scalar max.dim median.default
    median.dim min.dim mode.default nanmedian.default nanmedian.dim native_layer_norm.default
    quantized_decomposed.dequantize_per_channel.default
    quantized_decomposed.dequantize_per_tensor.default
    quantized_decomposed.dequantize_per_tensor.tensor
    quantized_decomposed.dequantize_per_token.default
    quantized_decomposed.quantize_per_channel.default
    quantized_decomposed.quantize_per_tensor.default quantized_decomposed.quantize_per_tensor.tensor
    quantized_decomposed.quantize_per_token.default renorm.default
    rrelu_with_noise_functional.default searchsorted.Tensor softmax.int sort.default sort.stable
    topk.default var.correction var_mean.correction
any shards; leaves P(product)
    prod.default prod.dim_int
any shards; linear in 0
    _conj.default chunk.default conj_physical.default constant_pad_nd.default cumsum.default
    diagonal.default div.Scalar div.Tensor mul.Scalar narrow_copy.default neg.default polar.default
    repeat.default select.int select_copy.int slice.Tensor split.Tensor sum.default sum.dim_IntList
    trace.default unbind.int unbind_copy.int
any shards; linear in 0 and 1
    add.Tensor complex.default diagonal_scatter.default select_scatter.default stack.default
    sub.Tensor
any shards; linear in 0 and 1 and 2
    cat.default
any shards; linear in 0 and 1; counts start; counts end
    slice_scatter.default
any shards; linear in 0 and 2
    masked_fill.Tensor
any shards; linear in 0 and 2; own body for d0
    _unsafe_index_put.default index_add.default index_fill.int_Tensor scatter.reduce
any shards; linear in 0 and 2; own body for d1
    index_copy.default index_put.default scatter.src scatter_add.default scatter_reduce.two
any shards; linear in 0 or linear in 1
    _int_mm.default bmm.default einsum.default linalg_cross.default linear.default matmul.default
    mm.default mul.Tensor tensordot.default
any shards; linear in 0 or linear in 1 or linear in 2
    _trilinear.default
any shards; linear in 0; counts split_sizes
    split_with_sizes.default split_with_sizes_copy.default
any shards; linear in 0; counts start; counts end
    slice_copy.Tensor
any shards; linear in 0; own body for c
    split_copy.Tensor
any shards; linear in 0; own body for d0; own body for d1
    triu.default
any shards; linear in 0; own body for d1
    _unsafe_index.Tensor gather.default index.Tensor index_select.default
any shards; linear in 0; own body for d1; own body for d2
    tril.default
any shards; linear in 0; own body for v
    embedding.default
any shards; linear in 1
    rms_norm.default
any shards; linear in 1 and 2
    layer_norm.default where.self
any shards; linear in 1 and 2; own body for g
    group_norm.default
any shards; linear in 1 or linear in 2
    addbmm.default addmm.default baddbmm.default
any shards; own body for d0
    index_reduce.default scatter.value scatter.value_reduce
any shards; own body for d1
    index_fill.int_Scalar
any shards; own body for n; own body for g
    native_group_norm.default
any shards; own body for v
    _embedding_bag.default _embedding_bag_forward_only.default
any shards; relayout
    _to_copy.default to.dtype
any shards; relayout; linear in 0
    alias.default clone.default contiguous.default detach.default detach_copy.default
    flatten.using_ints lift_fresh_copy.default movedim.int permute.default permute_copy.default
    squeeze.dim t.default transpose.int unsqueeze.default view_as_complex.default
    view_as_real.default
any shards; relayout; linear in 0; counts shape
    reshape.default
any shards; relayout; linear in 0; counts size
    _unsafe_view.default expand.default view.default view_copy.default
any shards; relayout; linear in 0; counts sizes
    unflatten.int
any shards; relayout; linear in 0; own body for f0; own body for f1
    squeeze.default squeeze.dims
even shards
    _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default
    _native_batch_norm_legit_no_training.default quantized_decomposed.choose_qparams.tensor
    quantized_decomposed.choose_qparams_symmetric.tensor
even shards; linear in 0
    flip.default roll.default
nonempty shards
    _cdist_forward.default _linalg_det.default _linalg_eigh.default _linalg_eigvals.default
    _linalg_slogdet.default _linalg_solve_ex.default _linalg_svd.default
    _scaled_dot_product_flash_attention_for_cpu.default adaptive_max_pool2d.default
    adaptive_max_pool3d.default aminmax.default cholesky.default cholesky_inverse.default
    fractional_max_pool2d.default fractional_max_pool3d.default geqrf.default gru.input
    linalg_cholesky_ex.default linalg_eig.default linalg_householder_product.default
    linalg_inv_ex.default linalg_ldl_factor_ex.default linalg_lu.default linalg_lu_factor_ex.default
    linalg_matrix_exp.default linalg_pinv.atol_rtol_tensor linalg_qr.default
    linalg_vector_norm.default lstm.input lu_unpack.default max_pool1d.default max_pool2d.default
    max_pool2d_with_indices.default max_pool3d.default max_pool3d_with_indices.default
    rnn_relu.input rnn_tanh.input triangular_solve.default
nonempty shards; leaves P(max)
    amax.default max.default
nonempty shards; leaves P(min)
    amin.default min.default
nonempty shards; linear in 0
    _fft_c2c.default _fft_c2r.default _fft_r2c.default _upsample_bicubic2d_aa.default
    _upsample_bilinear2d_aa.default _weight_int4pack_mm_for_cpu.default avg_pool1d.default
    avg_pool2d.default avg_pool3d.default cholesky_solve.default col2im.default
    grid_sampler_2d.default grid_sampler_3d.default im2col.default unfold.default
    upsample_bicubic2d.default upsample_bilinear2d.default upsample_bilinear2d.vec
    upsample_nearest2d.vec upsample_trilinear3d.default
nonempty shards; linear in 0 or linear in 1
    _grouped_mm.default conv1d.default conv1d.padding conv2d.default conv3d.default conv3d.padding
    conv_tbc.default conv_transpose1d.default conv_transpose3d.input convolution.default
nonempty shards; linear in 0 or linear in 1; counts groups
    conv2d.padding conv_transpose2d.input
nonempty shards; linear in 0 or linear in 1; own body for d
    tpcompiler.grouped_mm_by_block.default
nonempty shards; linear in 0 or linear in 2
    _weight_int8pack_mm.default
nonempty shards; linear in 0; counts output_size
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default
nonempty shards; linear in 0; own body for d0; own body for d1
    mean.default
nonempty shards; linear in 0; own body for d1
    mean.dim
nonempty shards; linear in 1
    linalg_solve_triangular.default
nonempty shards; linear in 1 or linear in 2
    addmv.default
nonempty shards; linear in 2
    linalg_ldl_solve.default linalg_lu_solve.default ormqr.default
    scaled_dot_product_attention.default
nonempty shards; relayout
    view.dtype view_copy.dtype
""",
    )


def _besides(sample: Sample) -> str:
    entry, written = _RULES[sample.target], written_of(node_of(sample))
    assert written is not None
    parts = [f"{entry.shards} shards", "relayout" * entry.relayout]
    parts.append(" or ".join("linear in " + " and ".join(map(str, group)) for group in written.linear))
    parts.append(f"leaves P({written.reduce})" * (written.reduce != "sum"))
    parts += [f"counts {argument}" for argument in (*written.sizes, *written.counts)]
    parts += [f"own body for {factor}" for factor in written.local]
    return "; ".join(part for part in parts if part)
