"""Reads and writes at positions. Indexed dims are whole unless a body covers them; all others are independent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import Size
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.rules.notation import RuleText, ShardRange
from tpcompiler.rules.pointwise import broadcast, common_shape
from tpcompiler.rules.registry import op_rule
from tpcompiler.rules.structure import at_dim, dims_text, find_slice

FIRST_AND_LAST = ((0, 2),)  # written values replace old ones, so a sum of shares is written share by share
REDUCED = {"add": "sum", "amax": "max", "amin": "min"}  # a scatter's reduction -> the Partial that shards leave


def _positions(node: fx.Node) -> tuple[list[str], list[str], list[str], list[str], list[Size]] | None:
    """Return (dims of the tensor, dims of the result, terms of the index tensors, index dims, sizes of these)."""
    args = edit.arguments(node)
    shape = edit.shape(args.self)
    tensors = [(d, index) for d, index in enumerate(args.indices) if index is not None]
    values = [edit.fake(index) for _, index in tensors]
    if not tensors or any(v.dtype in (torch.bool, torch.uint8) for v in values):
        return None  # a mask selects a data-dependent number
    sizes = common_shape([v.shape for v in values])
    index_dims = [f"i{d}" for d in range(len(sizes))]
    indexed = [d for d, _ in tensors]
    dims = [f"d{d}{'!' if d in indexed else ''}" for d in range(len(shape))]
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0
    others = [f"d{d}" for d in range(len(shape)) if d not in indexed]
    result = others[:first] + index_dims + others[first:]
    return dims, result, [broadcast(v.shape, index_dims, sizes) for v in values], index_dims, sizes


def can_look_up(node: fx.Node, dim: int) -> bool:
    """Return True if each rank may look up its part of a dim: its size is known, and any backend sums the dtype."""
    value = edit.fake(node)
    summed = value.is_floating_point() or value.dtype in (torch.int32, torch.int64)
    return summed and isinstance(value.shape[dim], int)


def _own(positions: torch.Tensor, total: int, shard: ShardRange) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions within the shard, and a mask of those outside."""
    local = torch.where(positions < 0, positions + total, positions) - shard.offset
    outside = (local < 0) | (local >= shard.size)
    return torch.where(outside, 0, local), outside


def _zeros(values: torch.Tensor, outside: torch.Tensor, inner: int = 0) -> torch.Tensor:
    """Replace values at positions outside by zeros; the last `inner` dims are no positions."""
    for _ in range(inner):
        outside = outside.unsqueeze(-1)
    return values.masked_fill(outside, 0)


@op_rule(aten.index.Tensor, aten._unsafe_index.Tensor, shards="any")
def index(node: fx.Node) -> RuleText | None:
    """ "d0 d1! d2, i0 -> d0 i0 d2": index tensors broadcast and replace the indexed dims (in front if those are apart).

    One of the indexed dims may be sharded, "d0 d1 d2, i0 -> d0 i0 d2": each rank looks up its own, Partial(sum). Linear
    in the indexed tensor.
    """
    layout = _positions(node)
    if layout is None:
        return None
    dims, result, terms, index_dims, _ = layout
    indexed = [d for d, name in enumerate(dims) if name.endswith("!")]
    sizes = edit.shape(node.args[0])  # type: ignore[arg-type]
    inner = len(result) - len(index_dims) - (result.index(index_dims[0]) if index_dims else indexed[0])

    def look_up_own(
        values: torch.Tensor, indices: Sequence[torch.Tensor | None], *, shard: ShardRange, at: int
    ) -> torch.Tensor:
        local, outside = _own(indices[at], sizes[at], shard)  # type: ignore[arg-type]
        own = [local if d == at else index for d, index in enumerate(indices)]
        return _zeros(aten.index.Tensor(values, own), outside, inner)

    local = {}
    for at in indexed:
        if can_look_up(edit.operands(node)[0], at):
            dims[at] = f"d{at}"
            local[dims[at]] = partial(look_up_own, at=at)
    text = f"{', '.join([' '.join(dims), *terms])} -> {' '.join(result)}"
    # The other op does not check positions.
    positions = {f"d{d}": (1 + at, True) for at, d in enumerate(indexed) if node.target is aten.index.Tensor}
    return RuleText(text, linear=((0,),), local=local, positions=positions)


@op_rule(aten.index_put.default, aten._unsafe_index_put.default, shards="any")
def index_put(node: fx.Node) -> RuleText | None:
    """ "d0 d1 d2, i0!, d0 i0! d2 -> d0 d1 d2": every rank writes at the positions in its own part.

    Jointly linear, in replacing and in adding. Added values may be sharded by position, "+d0 d1 d2, i0, d0 i0 d2 -> d0
    d1 d2": each rank adds its own, and the tensor is an addend of the sum.
    """
    layout = _positions(node)
    if layout is None:
        return None
    dims, result, terms, index_dims, sizes = layout
    shape = dict(zip(index_dims, sizes, strict=True))
    shape.update({f"d{d}": size for d, size in enumerate(edit.shape(node))})
    adds = bool(edit.arguments(node).accumulate)
    local = {}
    indexed = [d for d, index in enumerate(edit.arguments(node).indices) if index is not None]
    for d in indexed:
        if isinstance(edit.shape(node)[d], int):
            dims[d] = f"d{d}"
            local[dims[d]] = partial(_put_own, at=d, total=edit.shape(node)[d])
    whole = {name: name if adds else f"{name}!" for name in index_dims}
    names = [whole.get(name, name) for name in result]
    values = edit.shape(edit.operands(node)[-1])
    value_term = broadcast(values, names, [shape[name] for name in result])
    terms = [" ".join(whole.get(word, word) for word in term.split()) for term in terms]
    into = " ".join(dims)
    text = f"{'+' * adds}{', '.join([into, *terms, value_term])} -> {into}"
    positions = {f"d{d}": (1 + at, True) for at, d in enumerate(indexed) if node.target is aten.index_put.default}
    return RuleText(text, linear=((0, len(terms) + 1),), local=local, positions=positions)


def _put_own(
    value: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    *,
    shard: ShardRange,
    at: int,
    total: int,
) -> torch.Tensor:
    """Write the values at this shard's positions."""
    local = _own_or_behind(indices[at], total, value.shape[at], shard)  # type: ignore[arg-type]
    own = [local if d == at else index for d, index in enumerate(indices)]
    return _without_place_behind(aten.index_put.default(_with_place_behind(value, at), own, values, accumulate), at)


def _write_own(
    value: torch.Tensor,
    dim: int,
    positions: torch.Tensor,
    *args: Any,
    shard: ShardRange,
    op: Any,
    total: int,
    **kwargs: Any,
) -> torch.Tensor:
    """Write along one dim at this shard's positions, by `op`."""
    local = _own_or_behind(positions, total, value.shape[dim], shard)
    return _without_place_behind(op(_with_place_behind(value, dim), dim, local, *args, **kwargs), dim)


def _own_or_behind(positions: torch.Tensor, total: int, size: int, shard: ShardRange) -> torch.Tensor:
    """Return positions within the shard; those outside become the place after it."""
    local, outside = _own(positions, total, shard)
    return torch.where(outside, size, local)


def _with_place_behind(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Append one place along `dim`, for values that belong to other shards."""
    place = [1 if d == dim % value.ndim else size for d, size in enumerate(value.shape)]
    return torch.cat([value, value.new_zeros(place)], dim)


def _without_place_behind(value: torch.Tensor, dim: int) -> torch.Tensor:
    return value.narrow(dim, 0, value.shape[dim] - 1).clone()


@op_rule(aten.index_select.default, shards="any")
def index_select(node: fx.Node) -> RuleText | None:
    """ "d0 d1 d2, i -> d0 i d2": with the indexed dim sharded, each rank looks up its own: Partial(sum)."""
    operand, positions = edit.operands(node)
    values = edit.fake(operand)
    if not values.ndim or not edit.ndim(positions):
        return None
    dim = edit.arguments(node).dim % values.ndim
    total, inner = values.shape[dim], values.ndim - dim - 1

    def body(values: torch.Tensor, dim: int, positions: torch.Tensor, *, shard: ShardRange) -> torch.Tensor:
        local, outside = _own(positions, total, shard)
        return _zeros(aten.index_select.default(values, dim, local), outside, inner)

    free = can_look_up(operand, dim)
    out = " ".join("i" if d == dim else f"d{d}" for d in range(values.ndim))
    text = f"{dims_text(values.ndim, () if free else {dim})}, i -> {out}"
    local = {f"d{dim}": body} if free else {}
    return RuleText(text, linear=((0,),), local=local, positions={f"d{dim}": (1, False)})


@op_rule(aten.index_copy.default, aten.index_add.default, aten.index_reduce.default, shards="any")
def index_copy(node: fx.Node) -> RuleText | None:
    """ "d0 d1 d2, i!, d0 i! d2 -> d0 d1 d2"; for added values "+d0 d1 d2, i, d0 i d2 -> d0 d1 d2".

    A rank writes at its own positions, such as steps of a cache. Jointly linear in both tensors, except for the
    reductions of `index_reduce`: products, means, extrema.
    """
    ndim = edit.ndim(node)
    if not ndim or not edit.ndim(edit.operands(node)[2]):
        return None
    dim = edit.arguments(node).dim % ndim
    adds = node.target is aten.index_add.default
    positions = "i" if adds else "i!"
    source = " ".join(positions if d == dim else f"d{d}" for d in range(ndim))
    total = edit.shape(node)[dim]
    body = _copy_own if node.target is aten.index_copy.default else partial(_write_own, op=node.target, total=total)
    local = {f"d{dim}": body} if isinstance(total, int) else {}
    text = dims_text(ndim, set() if local else {dim})
    linear = () if node.target is aten.index_reduce.default else FIRST_AND_LAST
    text = f"{'+' * adds}{text}, {positions}, {source} -> {text}"
    return RuleText(text, linear=linear, local=local, positions={f"d{dim}": (1, False)})


@op_rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, shards="any")
def index_fill(node: fx.Node) -> RuleText | None:
    """ "d0 d1 d2, i! -> d0 d1 d2": each rank fills its own positions. Jointly linear in the tensor and a value."""
    ndim = edit.ndim(node)
    if not ndim:
        return None
    dim = edit.arguments(node).dim % ndim
    total = edit.shape(node)[dim]
    text = dims_text(ndim, () if isinstance(total, int) else {dim})
    positions = " ".join(["i!"] * edit.ndim(edit.operands(node)[1]))
    terms = [text, positions, ""][: len(edit.operands(node))]
    local = {f"d{dim}": partial(_write_own, op=node.target, total=total)} if isinstance(total, int) else {}
    linear = FIRST_AND_LAST if len(terms) == 3 else ()
    return RuleText(f"{', '.join(terms)} -> {text}", linear=linear, local=local, positions={f"d{dim}": (1, True)})


def _copy_own(
    value: torch.Tensor, dim: int, positions: torch.Tensor, source: torch.Tensor, *, shard: ShardRange
) -> torch.Tensor:
    """Copy the values at this shard's positions; of repeated positions the last one wins."""
    local = positions - shard.offset
    inner = [1] * (value.ndim - dim % value.ndim - 1)
    if isinstance(local.shape[0], int) and local.shape[0] == 1:  # a decoding step: one row is written or kept
        own = (local >= 0) & (local < shard.size)
        row = torch.where(own, local, 0)
        values = torch.where(own.view(-1, *inner), source, value.index_select(dim, row))
        return value.index_copy(dim, row, values)
    slots, count = torch.arange(value.shape[dim], device=value.device), torch.ones_like(local).cumsum(0)
    last = ((slots.unsqueeze(-1) == local) * count).amax(-1)  # the last one written to each slot; 0: none
    values = source.index_select(dim, (last - 1).clamp(min=0))
    return torch.where((last > 0).view(-1, *inner), values, value)


@op_rule(aten.gather.default, shards="any")
def gather(node: fx.Node) -> RuleText | None:
    """ "d0 d1, d0 i1 -> d0 i1": other dims correspond if their sizes are equal; a shorter index needs them whole.

    With the indexed dim sharded, each rank looks up its own: Partial(sum). Linear in the indexed tensor.
    """
    operand, positions = edit.operands(node)
    values = edit.fake(operand)
    if not values.ndim or edit.ndim(positions) != values.ndim:
        return None  # an empty index may have any number of dims
    dim = edit.arguments(node).dim % values.ndim
    total = values.shape[dim]

    def body(
        values: torch.Tensor, dim: int, positions: torch.Tensor, *, sparse_grad: bool = False, shard: ShardRange
    ) -> torch.Tensor:
        local, outside = _own(positions, total, shard)
        return _zeros(aten.gather.default(values, dim, local), outside)

    free = can_look_up(operand, dim)
    pairs = zip(values.shape, edit.shape(positions), strict=True)
    same = [d != dim and statically_equal(a, b) for d, (a, b) in enumerate(pairs)]
    left = " ".join(f"d{d}" if same[d] or (d == dim and free) else f"d{d}!" for d in range(values.ndim))
    right = " ".join(f"d{d}" if same[d] else "i" if d == dim else f"i{d}!" for d in range(values.ndim))
    local = {f"d{dim}": body} if free else {}
    return RuleText(f"{left}, {right} -> {right}", linear=((0,),), local=local, positions={f"d{dim}": (1, False)})


@op_rule(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    shards="any",
)
def scatter(node: fx.Node) -> RuleText | None:
    """ "d0 d1, d0 i1!, d0 s1! -> d0 d1": other dims correspond if all sizes are equal; each rank writes in its part.

    Added values may be sharded by position, "+d0 d1, d0 i1, d0 i1 -> d0 d1": the tensor is an addend of the sum. So may
    values of an extremum that includes the tensor: including it on every rank changes nothing. Jointly linear in both
    tensors if values are written or added.
    """
    shapes = [edit.shape(o) for o in edit.operands(node)]
    ndim = len(shapes[0])
    if not ndim or any(len(shape) != ndim for shape in shapes):
        return None
    dim = edit.arguments(node).dim % ndim
    way = _way(node)
    together = way in REDUCED and len(shapes) == 3 and statically_equal(shapes[1][dim], shapes[2][dim])
    terms = []
    for prefix, shape in zip("dis", shapes, strict=False):
        same = [d != dim and all(statically_equal(size, other[d]) for other in shapes) for d, size in enumerate(shape)]
        names = [f"d{d}" if same[d] else f"{prefix}{d}!" for d in range(ndim)]
        if together and prefix != "d":
            names[dim] = f"i{dim}"
        terms.append(" ".join(names))
    total, local = shapes[0][dim], {}
    lines_up = all(  # torch requires it when the body is traced
        d == dim or statically_equal(size, whole) or (isinstance(size, int) and isinstance(whole, int))
        for shape in shapes[1:]
        for d, (size, whole) in enumerate(zip(shape, shapes[0], strict=True))
    )
    if isinstance(total, int) and lines_up:
        local[f"d{dim}"] = partial(_write_own, op=node.target, total=total)
        terms[0] = terms[0].replace(f"d{dim}!", f"d{dim}")
    linear = FIRST_AND_LAST if len(shapes) == 3 and way in ("write", "add") else ()
    text = f"{'+' * (together and way == 'add')}{', '.join(terms)} -> {terms[0]}"
    reduce, positions = REDUCED[way] if together else "sum", {f"d{dim}": (1, False)}
    return RuleText(text, reduce=reduce, linear=linear, local=local, positions=positions)


def _way(node: fx.Node) -> str:
    """Return how a scatter combines values with the old ones: "write", "add", "amax", "amin", or "other"."""
    args = edit.bound(node)
    if node.target is aten.scatter_add.default:
        return "add"
    if "reduce" not in args:
        return "write"
    if not args.get("include_self", True):
        return "other"
    way = {"add": "add", "sum": "add", "amax": "amax", "amin": "amin"}
    return way.get(args["reduce"], "other")


@op_rule(aten.slice_scatter.default, shards="any")
def slice_scatter(node: fx.Node) -> RuleText:
    """ "d0 [x c z], d0 c -> d0 [x c z]": rows before and after the part may be sharded in their own way.

    With steps or dynamic sizes, "d0 d1!, d0 s! -> d0 d1!"; but of the whole dim, "d0 d1, d0 d1 -> d0 d1".
    """
    args, shape = edit.bound(node), edit.shape(node)
    dim = args["dim"] % len(shape)
    part_size = edit.shape(edit.operands(node)[1])[dim]
    is_open = not args["start"] and args["end"] in (None, sys.maxsize) and args["step"] == 1
    if is_open and isinstance(part_size, torch.SymInt) and statically_equal(part_size, shape[dim]):
        text = dims_text(len(shape), set())
        return RuleText(f"{text}, {text} -> {text}", linear=((0, 1),))
    word, factors, counts = find_slice(args, shape[dim], part_size, "") or (f"d{dim}!", {}, {})
    text = at_dim(len(shape), dim, word)
    part = at_dim(len(shape), dim, "c" if counts else "s!")
    return RuleText(f"{text}, {part} -> {text}", factors=factors, counts=counts, linear=((0, 1),))


@op_rule(aten.select_scatter.default, shards="any")
def select_scatter(node: fx.Node) -> RuleText:
    """ "d0 d1! d2, d0 d2 -> d0 d1! d2" """
    ndim = edit.ndim(node)
    dim = edit.arguments(node).dim % ndim
    text = dims_text(ndim, {dim})
    return RuleText(f"{text}, {at_dim(ndim, dim, '')} -> {text}", linear=((0, 1),))
