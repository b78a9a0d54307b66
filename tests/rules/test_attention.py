"""Attention as kernels of a GPU have it: the shapes alone, for nothing here can run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpcompiler.rules  # noqa: F401  (registers the rules)
from tests.rules.sample import call, node_of
from tests.rules.samples import written_of
from tpcompiler.rules.registry import rule_of

aten = torch.ops.aten
flash = aten._scaled_dot_product_flash_attention.default
efficient = aten._scaled_dot_product_efficient_attention.default
cudnn = aten._scaled_dot_product_cudnn_attention.default


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


Q, K, BIAS = meta(2, 8, 40, 64), meta(2, 8, 48, 64), meta(2, 8, 40, 48)
SELF = "b0 h s! d!, b0 h t! d!, b0 h t! e!"


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        (flash, (Q, K, K), f"{SELF} -> b0 h s! e!, b0 h x00!, x10!, , x30!"),
        (
            flash,
            (Q, meta(2, 2, 48, 64), meta(2, 2, 48, 64), 0.0, True),
            "b0 (h g) s! d!, b0 h t! d!, b0 h t! e! -> b0 (h g) s! e!, b0 (h g) x00!, x10!, , x30!",
        ),
        (efficient, (Q, K, K, None, True), f"{SELF} -> b0 h s! e!, b0 h x00!, , "),
        (efficient, (Q, K, K, BIAS, False), f"{SELF}, b0 h s! t! -> b0 h s! e!, b0 h x00!, , "),
        (cudnn, (Q, K, K, BIAS, True), f"{SELF}, b0 h s! t! -> b0 h s! e!, b0 h x00! x01!, , "),
        (flash, (Q, K, K, 0.1), None),
        (flash, (Q, K, K, 0.0, False, True), None),
    ],
)
def test_text(target: Any, args: tuple[Any, ...], text: str | None) -> None:
    node = node_of(call(target, *args, text=text))
    written = written_of(node)
    assert (written and written.text) == text
    assert (rule_of(node) is None) == (text is None)
