"""The text of every rule, beside what a rule says besides its text."""

from __future__ import annotations

import re
from textwrap import fill

import pytest
from expecttest import assert_expected_inline

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import Sample, node_of
from tests.rules.samples import SAMPLES, written_of
from tpcompiler.rules.registry import _RULES

INDENT = {"initial_indent": "    ", "subsequent_indent": "    "}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_text(sample: Sample) -> None:
    written = written_of(node_of(sample))
    assert (None if written is None else _plain(written.text)) == sample.text


def _plain(text: str) -> str:
    """Without the spaces that empty terms leave."""
    return re.sub(r"\s+", " ", text).strip().replace(" ,", ",")


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
    index_reduce.default kthvalue.default layer_norm.default log_softmax.int logcumsumexp.default
    masked_fill.Scalar masked_fill.Tensor max.dim median.default median.dim min.dim mode.default
    nanmedian.default nanmedian.dim native_layer_norm.default rms_norm.default scatter.value
    scatter.value_reduce searchsorted.Tensor softmax.int sort.default sort.stable topk.default
    var.correction var_mean.correction
any shards; leaves P(product)
    prod.default prod.dim_int
any shards; linear in 0
    chunk.default cumsum.default div.Scalar div.Tensor mul.Scalar neg.default select.int
    slice.Tensor split.Tensor split_with_sizes.default sum.default sum.dim_IntList unbind.int
any shards; linear in 0 and 1
    add.Tensor diagonal_scatter.default select_scatter.default slice_scatter.default stack.default
    sub.Tensor
any shards; linear in 0 and 1 and 2
    cat.default
any shards; linear in 0 and 2
    _unsafe_index_put.default index_add.default index_copy.default index_put.default scatter.reduce
    scatter.src scatter_add.default scatter_reduce.two
any shards; linear in 0 or linear in 1
    bmm.default linear.default matmul.default mm.default mul.Tensor
any shards; linear in 0; own body for d0; own body for d1
    triu.default
any shards; linear in 0; own body for d1
    _unsafe_index.Tensor gather.default index.Tensor index_select.default
any shards; linear in 0; own body for d1; own body for d2
    tril.default
any shards; linear in 0; own body for v
    embedding.default
any shards; linear in 1 or linear in 2
    addmm.default baddbmm.default
any shards; own body for g
    group_norm.default
any shards; own body for n; own body for g
    native_group_norm.default
any shards; own body for v
    _embedding_bag.default _embedding_bag_forward_only.default
any shards; relayout
    _to_copy.default alias.default clone.default contiguous.default detach.default
    lift_fresh_copy.default to.dtype
any shards; relayout; linear in 0
    flatten.using_ints movedim.int permute.default squeeze.dim t.default transpose.int
    unsqueeze.default
any shards; relayout; linear in 0; counts shape
    reshape.default
any shards; relayout; linear in 0; counts size
    _unsafe_view.default expand.default view.default
any shards; relayout; linear in 0; counts sizes
    unflatten.int
any shards; relayout; linear in 0; own body for f0; own body for f1
    squeeze.default squeeze.dims
even shards
    _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default
    _native_batch_norm_legit_no_training.default flip.default roll.default
    scaled_dot_product_attention.default
even shards; linear in 0 or linear in 1
    conv1d.default conv2d.default conv3d.default convolution.default
nonempty shards
    _cdist_forward.default linalg_vector_norm.default max_pool2d_with_indices.default
    max_pool3d_with_indices.default
nonempty shards; leaves P(max)
    amax.default max.default
nonempty shards; leaves P(min)
    amin.default min.default
nonempty shards; linear in 0
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default avg_pool2d.default avg_pool3d.default
nonempty shards; linear in 0; own body for d0; own body for d1
    mean.default
nonempty shards; linear in 0; own body for d1
    mean.dim
""",
    )


def _besides(sample: Sample) -> str:
    entry, written = _RULES[sample.target], written_of(node_of(sample))
    assert written is not None
    parts = [f"{entry.shards} shards", "relayout" * entry.relayout]
    parts.append(" or ".join("linear in " + " and ".join(map(str, group)) for group in written.linear))
    parts.append(f"leaves P({written.reduce})" * (written.reduce != "sum"))
    parts += [f"counts {argument}" for argument in written.sizes]
    parts += [f"own body for {factor}" for factor in written.local]
    return "; ".join(part for part in parts if part)
