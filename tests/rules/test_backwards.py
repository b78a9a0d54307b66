"""Backwards: all of torch's are known, the stand-ins for kernels of a GPU are right, and a wrong rule is caught."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._decomp import _core_aten_decompositions_post_autograd

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.backward_samples import BACKWARDS, UNCHECKED
from tests.rules.kernels import attend, attend_backward
from tests.rules.sample import Sample, node_of, t
from tests.rules.samples import written_of
from tpcompiler._torch import OpOverload, find_op
from tpcompiler.frontend.backwards import IN_SIMPLER_OPS
from tpcompiler.judge.rules.run_on_shards import Mismatch, check, rule_from
from tpcompiler.rules.notation import Rule, RuleText
from tpcompiler.rules.registry import _RULES

# What stays whole without a rule: its operands are gathered, and the report says so.
WHOLE = {
    "ctc_loss": "alignments of one batch share a length that only the data show",
    "(multi|multilabel)_margin_loss": "a mean over the batch inside the op",
    "fake_quantize_learnable": "of training with quantised weights",
    "embedding_bag_dense": "a part of _embedding_bag_backward, which is decomposed",
    "segment_reduce": "segments lie across any cut",
    "nested|sparse|spdiags|to_dense|to_padded": "other kinds of tensors",
    "mkldnn|mps|miopen|cudnn|lstm|gru|rnn|_overrideable|slow_conv|weight_int4": "of one backend, where torch.export "
    "takes the general op",
    "_(flash|efficient)_attention": "of ragged batches, whose forward has no rule either",
    "grid_sampler_2d_cpu_fallback|lanczos|linear_backward|matmul_backward|max_pool2d_backward|batch_norm_backward|"
    "glu_backward_jvp|masked_softmax": "in no program of torch.export",
}


def _backwards() -> Iterator[OpOverload]:
    """The functional ones that torch keeps whole in a joint program."""
    decomposed = _core_aten_decompositions_post_autograd()
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::") and "backward" in name and not name.endswith(("out", ".grad_input")):
            op = find_op(name.replace("::", ".") + ("" if "." in name else ".default"))
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            if not (op._schema.is_mutable or composite or op in decomposed or torch.Tag.pointwise in op.tags):
                yield op


def test_every_backward_of_torch_has_a_rule_or_a_reason() -> None:
    missing = [op for op in _backwards() if op not in _RULES and op not in IN_SIMPLER_OPS]
    known = re.compile("|".join(WHOLE))
    assert [str(op) for op in missing if not known.search(str(op))] == []


def test_stand_ins_are_attention() -> None:
    q, k, v, bias, grad = t(2, 4, 6, 8), t(2, 2, 5, 8), t(2, 2, 5, 8), t(2, 1, 6, 5), t(2, 4, 6, 8)
    of_torch = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, bias, False, None)[0], of_torch)
    for mask, causal in ((bias, False), (None, True)):
        operands = [each.clone().requires_grad_() for each in (q, k, v, *([] if mask is None else [mask]))]
        out, sums = attend(*operands[:3], operands[3] if mask is not None else None, causal, 0.3)
        wanted = torch.autograd.grad(out, operands, grad)
        made = attend_backward(grad, q, k, v, mask, out.detach(), sums.detach(), causal, 0.3)
        torch.testing.assert_close(made[: len(wanted)], wanted)


def _mutations(written: RuleText, rule: Rule, whole_matters: bool) -> Iterator[tuple[str, RuleText]]:
    """A sum that is forgotten, dims that are not whole any more or in another order, more operands to be linear in."""
    operands, results = written.text.split("->")
    for sums in re.findall(r"\{[^}]*\}", results):
        if all(rule.extent[factor] == 1 or factor in rule.reduced for factor in sums[1:-1].split()):
            continue
        yield f"without {sums}", replace(written, text=f"{operands}->{results.replace(sums, '')}")
    yield "in another order", replace(written, text=f"{operands}-> {_swapped(results)}")
    if whole_matters:
        if "!" in written.text:
            yield "with no dim whole", replace(written, text=written.text.replace("!", ""))
        if "," in operands:
            if (1,) not in written.linear:
                yield "linear in the second operand", replace(written, linear=((0,), (1,)))
            yield "jointly linear", replace(written, linear=((0, 1),))


def _swapped(results: str) -> str:
    """The results with the first two dims of the first in another order."""
    first, second, others = re.findall(r"(\S+) (\([^)]*\)|\S+)(.*)", results)[0]
    return f"{second} {first}{others}"


@pytest.mark.sample(6)
@pytest.mark.parametrize("sample", [sample for sample in BACKWARDS if sample.text is not None], ids=str)
def test_a_wrong_rule_is_caught(sample: Sample) -> None:
    node = node_of(sample)
    written = written_of(node)
    assert written is not None
    for what, wrong in _mutations(written, rule_from(written, node), sample.target not in UNCHECKED):
        torch.manual_seed(0)
        rule = rule_from(wrong, node, _RULES[sample.target].shards)
        with pytest.raises(Mismatch):
            assert [check(node, rule, degree) for degree in (2, 3)], what
