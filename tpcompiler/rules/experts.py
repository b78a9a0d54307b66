"""Grouped matmuls, such as those of experts; in blocks, every rank computes the groups that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, define_op, find_op
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import sym_quotient
from tpcompiler.rules.matmul import BILINEAR
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.registry import foreign_rule, op_rule


def multiply_blocks(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str, used: float
) -> torch.Tensor:
    """Run a grouped matmul per block; rows after a block's last group are zeros.

    Args:
        x: [blocks, rows, k], each block's rows in the order of its groups.
        weight: [blocks x groups, k, n].
        ends: [blocks, groups], int32: the end of each group in its block.
        kernel: the op that computes one block.
        used: the share of a block's rows that are expected to have a group.
    """
    own = weight.reshape(*ends.shape, *weight.shape[1:])
    rows = torch.ones_like(x[0, :, 0], dtype=torch.int32).cumsum(0)  # from 1; their number is dynamic
    results = [find_op(kernel)(x[block], own[block], ends[block]) for block in range(ends.shape[0])]
    masked = [part.masked_fill((rows > ends[block, -1]).unsqueeze(-1), 0) for block, part in enumerate(results)]
    return masked[0].unsqueeze(0) if len(masked) == 1 else torch.stack(masked)


def multiply_own_blocks(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str, used: float, *, shard: Any
) -> torch.Tensor:
    """Compute the blocks that this rank holds."""
    return multiply_blocks(x, weight, ends, kernel, used)


def _fake(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, kernel: str, used: float) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


BY_BLOCK = define_op(
    "grouped_mm_by_block(Tensor x, Tensor weight, Tensor ends, str kernel, float used) -> Tensor",
    multiply_blocks,
    _fake,
)


def _multiply_own_rows(
    op: OpOverload, unit: int, left: Any, right: Any, ends: torch.Tensor, *args: Any, shard: ShardRange
) -> Any:
    """Compute the units of rows of all groups that this rank holds: the part of a group in them may be empty."""
    own = (ends - shard.offset * unit).clamp(0, shard.size * unit)
    return op(left, right, own.to(ends.dtype), *args)


@op_rule(aten._grouped_mm.default, shards="nonempty")
def grouped_mm(node: fx.Node) -> RuleText | None:
    """ "g m (k k_!), g (k k_!) (n n_!) -> g m (n n_!)": one product per group.

    If a dim is the groups in a row, offsets give their ends: "t .., g! .., g! -> t ..". The kernels need rows of whole
    16 bytes, so m, k and n are sharded between multiples of that, and so is t where it is the last dim of an operand.
    """
    left, right = (edit.fake(operand) for operand in edit.operands(node)[:2])
    if edit.arguments(node).bias is not None:
        return None
    unit = 16 // left.element_size()
    m, k, n = _in_units({"m": left.shape[-2], "k": left.shape[-1], "n": right.shape[-1]}, unit)
    (t,) = _in_units({"t": right.shape[-1] if left.ndim == 3 else left.shape[-1]}, unit)
    text = {
        (3, 3): f"g {m} {k}, g {k} {n} -> g {m} {n}",
        (2, 3): f"t {k}, g! {k} {n}, g! -> t {n}",
        (3, 2): f"g! {m} {k}, {k} {t}, g! -> {m} {t}",
        (2, 2): f"{m} {t}, {t} {n}, g! -> g! {m} {n}",
    }[left.ndim, right.ndim]
    own_rows = partial(_multiply_own_rows, aten._grouped_mm.default, 1 if right.ndim == 3 else unit)
    local = {} if left.ndim == right.ndim == 3 else {"t": own_rows}
    units = {f"{factor}_": unit for factor in "mknt"}
    return RuleText(text, factors=units, linear=BILINEAR, local=local)


@foreign_rule("transformers.grouped_mm_fallback.default", shards="any")
def looped_mm(node: fx.Node) -> RuleText:
    """ "t k, g! k n, g! -> t n": transformers' fallback for torch's kernel; all but groups may be sharded anywhere."""
    assert isinstance(node.target, OpOverload)
    local = {"t": partial(_multiply_own_rows, node.target, 1)}
    return RuleText("t k, g! k n, g! -> t n", linear=BILINEAR, local=local)


@foreign_rule("transformers.grouped_mm_fallback_backward.default", shards="any")
def looped_mm_backward(node: fx.Node) -> RuleText:
    """ "t k, g! k n, g!, t n -> t k {n}, g! k n {t}": gradients of tokens and weights, linear in the result's."""
    assert isinstance(node.target, OpOverload)
    local = {"t": partial(_multiply_own_rows, node.target, 1)}
    return RuleText("t k, g! k n, g!, t n -> t k {n}, g! k n {t}", linear=((3,),), local=local)


@op_rule(BY_BLOCK, shards="nonempty")
def blocks(node: fx.Node) -> RuleText:
    """ "d s! (k k_!), (d g!) (k k_!) (n n_!), d g! -> d s! (n n_!)": a rank computes its own blocks."""
    x, weight, _ = (edit.fake(operand) for operand in edit.operands(node))
    unit = 16 // x.element_size() if edit.arguments(node).kernel.startswith("aten") else 1
    k, n = _in_units({"k": x.shape[-1], "n": weight.shape[-1]}, unit)
    text = f"d s! {k}, (d g!) {k} {n}, d g! -> d s! {n}"
    return RuleText(text, factors={"k_": unit, "n_": unit}, linear=BILINEAR, local={"d": multiply_own_blocks})


def _in_units(sizes: Mapping[str, Size], unit: int) -> list[str]:
    """Return factors that are sharded between multiples of a unit; a size that is no multiple stays whole."""
    return [f"({f} {f}_!)" if sym_quotient(size, unit) is not None else f"{f}!" for f, size in sizes.items()]
