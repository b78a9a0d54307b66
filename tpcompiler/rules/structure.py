"""Ops that split dims or join them: every part is sharded separately, and parts of one size are sharded alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import statically_equal, sym_quotient
from tpcompiler.rules.notation import Dim, RuleText, ShardRange
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.windows import in_rule, sliding


def dims_text(ndim: int, whole: Collection[int]) -> str:
    """Return "d0 d1! d2": the dims of a tensor, with those in `whole` marked."""
    return " ".join(f"d{d}{'!' if d in whole else ''}" for d in range(ndim))


def at_dim(ndim: int, dim: int, word: str) -> str:
    """Return "d0 c d2": the dims of a tensor with `word` at `dim` ("": without that dim)."""
    return " ".join(word if d == dim else f"d{d}" for d in range(ndim) if d != dim or word)


@op_rule(aten.cat.default, shards="any")
def cat(node: fx.Node) -> RuleText:
    """ "d0 c, d0 c -> d0 (n c)": parts of one size are blocks of the result; others are a row, "d0 [c0 c1]".

    An empty 1-d tensor may be among tensors of any shape, such as an empty cache: "e0!, d0 c1! -> d0 c!". Parts of a
    dynamic size are whole too.
    """
    operands = [edit.fake(o) for o in edit.operands(node)]
    ndim = edit.ndim(node)
    dim = edit.arguments(node).dim % ndim
    linear = (tuple(range(len(operands))),)
    empty = [o.ndim != ndim for o in operands]
    if not any(empty) and _alike(operands, dim) and not statically_equal(operands[0].shape[dim], 0):
        terms = ", ".join([at_dim(ndim, dim, "c")] * len(operands))
        return RuleText(f"{terms} -> {at_dim(ndim, dim, '(n! c)')}", factors={"n": len(operands)}, linear=linear)
    if not any(empty) and all(isinstance(operand.shape[dim], int) for operand in operands):
        terms = ", ".join(at_dim(ndim, dim, f"c{i}") for i in range(len(operands)))
        row = " ".join(f"c{i}" for i in range(len(operands)))
        return RuleText(f"{terms} -> {at_dim(ndim, dim, f'[{row}]')}", linear=linear)
    terms = ", ".join(f"e{i}!" if gone else at_dim(ndim, dim, f"c{i}!") for i, gone in enumerate(empty))
    return RuleText(f"{terms} -> {at_dim(ndim, dim, 'c!')}", linear=linear)


def _alike(parts: Sequence[torch.Tensor], dim: int) -> bool:
    return all(statically_equal(part.shape[dim], parts[0].shape[dim]) for part in parts)


@op_rule(aten.stack.default, shards="any")
def stack(node: fx.Node) -> RuleText:
    """ "d0 d1, d0 d1 -> d0 n! d1": the operands' dims and a new one that numbers them."""
    operands = edit.operands(node)
    ndim = edit.ndim(node)
    dims = [f"d{d}" for d in range(ndim - 1)]
    names = list(dims)
    names.insert(edit.arguments(node).dim % ndim, "n!")
    terms = ", ".join([" ".join(dims)] * len(operands))
    return RuleText(f"{terms} -> {' '.join(names)}", linear=(tuple(range(len(operands))),))


SPLITS = (
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.chunk.default,
)
TAKE_APART = {*SPLITS, aten.slice.Tensor, aten.slice_copy.Tensor}


def _own_split(value: torch.Tensor, size: Size, dim: int = 0, *, shard: ShardRange, count: int) -> Any:
    if isinstance(shard.size, int) and not shard.size:  # torch splits a dim of no elements into one part
        return aten.split_with_sizes.default(value, [0] * count, dim)
    return aten.split.Tensor(value, shard.size, dim)


def is_cut_again(node: fx.Node, dim: int) -> bool:
    """Return True if another op takes a part of a split apart along the same dim, and so may need it cut otherwise."""
    pieces = (user for part, _ in edit.results(node) for user in part.users if user.target in TAKE_APART)
    return any(edit.bound(user)["dim"] % edit.ndim(edit.operands(user)[0]) == dim for user in pieces)


@op_rule(*SPLITS, shards="any")
def split(node: fx.Node) -> RuleText:
    """ "d0 (n! c) -> d0 c, d0 c": parts of one size are blocks, sharded alike; others are a row, "d0 [c0 c1]".

    If sizes are dynamic, or follow from one size or a count, unequal parts come from a whole dim.
    """
    (operand,) = edit.operands(node)
    ndim, parts_made = edit.ndim(operand), edit.outputs(node)
    dim = edit.arguments(node).dim % ndim
    if not _alike(parts_made, dim) or ("split_sizes" in edit.bound(node) and is_cut_again(node, dim)):
        parts = ", ".join(at_dim(ndim, dim, f"c{i}") for i in range(len(parts_made)))
        if "split_sizes" in edit.bound(node) and all(isinstance(part.shape[dim], int) for part in parts_made):
            row = " ".join(f"c{i}" for i in range(len(parts_made)))
            counts = {"split_sizes": tuple((f"c{i}",) for i in range(len(parts_made)))}
            return RuleText(f"{at_dim(ndim, dim, f'[{row}]')} -> {parts}", counts=counts, linear=((0,),))
        return RuleText(f"{at_dim(ndim, dim, f'd{dim}!')} -> {parts}", linear=((0,),))
    text = f"{at_dim(ndim, dim, '(n! c)')} -> {', '.join([at_dim(ndim, dim, 'c')] * len(parts_made))}"
    counted = "split_sizes" in edit.bound(node)
    return RuleText(
        text,
        sizes={"split_sizes": (("c",),) * len(parts_made)} if counted else {},
        factors={"n": len(parts_made)},
        linear=((0,),),
        local={"c": partial(_own_split, count=len(parts_made))} if "split_size" in edit.bound(node) else {},
        local_shards="any",
    )


def find_slice(
    args: Mapping[str, Any], size: Size, made: Size, prefix: str
) -> tuple[str, dict[str, int], dict[str, tuple[Dim, ...]]] | None:
    """Return "[x c z]", its sizes, and the counts of the slice's arguments, for a contiguous slice c.

    Return None if the slice has steps, is empty, or has dynamic sizes.
    """
    start = args["start"] or 0
    if args["step"] != 1 or not all(isinstance(each, int) for each in (start, size, made)) or not made:
        return None
    first = min(max(start + size if start < 0 else start, 0), size)
    row = {f"{prefix}x": first, "c": made, f"{prefix}z": size - first - made}
    before = (f"{prefix}x",) * (first > 0)
    return f"[{' '.join(name for name in row if row[name])}]", row, {"start": (before,), "end": ((*before, "c"),)}


@op_rule(aten.slice.Tensor, aten.slice_copy.Tensor, shards="any")
def slice_(node: fx.Node) -> RuleText:
    """ "d0 [_x c _z] -> d0 c": the remainders on both sides may be sharded too.

    The whole dim: "d0 d1 -> d0 d1"; one of every k: "d0 (c k!) -> d0 c"; a dynamic dim: "d0 d1! -> d0 c".
    """
    (operand,) = edit.operands(node)
    args = edit.bound(node)
    ndim = edit.ndim(operand)
    dim = args["dim"] % ndim
    size, part_size = edit.shape(operand)[dim], edit.shape(node)[dim]
    start, end, step = args["start"] or 0, args["end"], args["step"]
    word, factors = f"d{dim}!", dict[str, int]()
    counts = dict[str, tuple[Dim, ...]]()
    # An end at or after the last element cuts nothing off a shorter shard either.
    if end is None or (isinstance(end, int) and end >= (size if isinstance(size, int) else 2**62)):
        if start == 0 and step == 1:
            return RuleText(f"{dims_text(ndim, ())} -> {dims_text(ndim, ())}", linear=((0,),))
        if (
            isinstance(start, int)
            and isinstance(step, int)
            and 0 <= start < step
            and sym_quotient(size, step) is not None
        ):
            word, factors = "(c k!)", {"k": step}
    if slice_text := find_slice(args, size, part_size, "_"):
        word, factors, counts = slice_text
    text = f"{at_dim(ndim, dim, word)} -> {at_dim(ndim, dim, 'c')}"
    return RuleText(text, factors=factors, linear=((0,),), counts=counts)


@op_rule(
    aten.narrow_copy.default,
    aten.select.int,
    aten.select_copy.int,
    aten.unbind.int,
    aten.unbind_copy.int,
    shards="any",
)
def take_rows(node: fx.Node) -> RuleText:
    """ "d0 d1! d2 -> d0 d2", once for each row; a result of several rows has them as "c"."""
    (operand,) = edit.operands(node)
    ndim = edit.ndim(operand)
    dim = edit.arguments(node).dim % ndim
    taken = at_dim(ndim, dim, "c" if node.target is aten.narrow_copy.default else "")
    results = ", ".join([taken] * len(edit.outputs(node)))
    return RuleText(f"{dims_text(ndim, {dim})} -> {results}", linear=((0,),))


@op_rule(aten.diagonal.default, shards="any")
def diagonal(node: fx.Node) -> RuleText:
    """ "d0! d1! d2 -> d2 n": a diagonal crosses every row and column."""
    (operand,) = edit.operands(node)
    ndim, args = edit.ndim(operand), edit.arguments(node)
    gone = {args.dim1 % ndim, args.dim2 % ndim}
    others = " ".join(f"d{d}" for d in range(ndim) if d not in gone)
    return RuleText(f"{dims_text(ndim, gone)} -> {others} n", linear=((0,),))


@op_rule(aten.constant_pad_nd.default, shards="any")
def pad(node: fx.Node) -> RuleText:
    """ "d0 d1! -> d0 p1": dims without padding are free. Linear for zeros, which every share can have.

    The first and the last ranks pad their shares of "p1", and get elements from other ranks.
    """
    (operand,) = edit.operands(node)
    args = edit.arguments(node)
    ndim = edit.ndim(operand)
    counts = list(args.pad)
    padded = {ndim - 1 - at // 2 for at, count in enumerate(counts) if not (isinstance(count, int) and count == 0)}
    result = " ".join(f"p{d}" if d in padded else f"d{d}" for d in range(ndim))
    zero = isinstance(args.value, (int, float)) and args.value == 0
    pads = {ndim - 1 - at // 2: count for at, count in enumerate(counts) if at % 2 == 0}
    sizes = {d: (edit.shape(operand)[d], edit.shape(node)[d], pads[d]) for d in padded}
    windows = {
        f"p{d}": sliding(f"d{d}", d, size, 1, 1, before)
        for d, (size, made, before) in sorted(sizes.items())
        if all(type(each) is int for each in (size, made, before))
    }
    linear = ((0,),) if zero else ()
    return RuleText(f"{dims_text(ndim, padded)} -> {result}", linear=linear, **in_rule(windows, _pad_share))


def _pad_share(x: torch.Tensor, pad: Sequence[int], value: Any = 0, *, shard: ShardRange) -> torch.Tensor:
    """Pad this rank's share, where it is at an end of a dim that others share."""
    pads = list(pad)
    for frame in shard.frames:
        last = 2 * (x.ndim - 1 - frame.at)
        pads[last : last + 2] = frame.before, frame.behind
    return aten.constant_pad_nd.default(x, pads, value)  # type: ignore[no-any-return]


@op_rule(aten.flip.default, aten.roll.default)
def in_place_dims(node: fx.Node) -> RuleText:
    """Dims that are flipped or rolled are whole (all dims for a roll without dims)."""
    ndim = edit.ndim(node)
    args = edit.arguments(node)
    dims = args.dims
    whole = {d % ndim for d in dims} if dims and ndim else set(range(ndim))
    return RuleText(f"{dims_text(ndim, whole)} -> {dims_text(ndim, whole)}", linear=((0,),))
