"""Find by execution how one call of an op can run on shards, without asking a rule.

The call is run whole, and then once per rank on shards of its operands. A placement of the operands is sound if some
placement of every output joins the ranks' results to the whole one. The result holds for this call only: a coincidence
of its values counts as sound, so operands should be random and sizes different from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler._torch import tree_flatten, tree_unflatten
from tpcompiler.errors import RuleError
from tpcompiler.ir.dim_sharding import chunk
from tpcompiler.ir.placements import format_placement
from tpcompiler.ir.shares import REDUCE
from tpcompiler.judge.compare.judge import is_rounded, largest_magnitude

MOST = 2500  # combinations of the operands' placements to try one by one
REDRAWN = 6  # number of times that the elements are reordered
PENDING = tuple(Partial(op) for op in ("sum", "max", "min", "avg", "product"))
# A size argument, its entry to replace, the unit in which that entry is divided, and the whole argument.
Rewrite = tuple[str, int, int, tuple[int, ...]]


class SoundWay(NamedTuple):
    """A sound way to run a call: the placements of the operands and of the outputs, in order.

    `sizes` is the entry of a size argument that must be local, as (argument, entry).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    sizes: tuple[str, int] | None = None

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(format_placement, each)) for each in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}" + (f" ({self.sizes[0]}[{self.sizes[1]}] local)" if self.sizes else "")


def sound_placements(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, degree: int = 2
) -> list[SoundWay]:
    """Return every sound way to run the call on one mesh axis of `degree` ranks.

    The candidates are R, S(d) if every rank gets something, and P(sum) for floats; size arguments stay unchanged or, if
    that fails, one entry becomes local. A way must also hold with the elements of every operand in other orders, if the
    op accepts them. Nonsensical placements are tried too: a kernel that does not check its operands may crash.

    Raises:
        RuleError: two runs of the whole call differ, or its result has nothing to compare.
    """
    call = _ShardedCall(op, tuple(args), dict(kwargs or {}), degree)
    operands = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    whole = call.run(operands)
    if not all(same(a, b) for a, b in zip(whole, call.run(operands), strict=True)):
        raise RuleError(f"{op} gives another result each time", help="a rule cannot say how to cut it")
    if not any(v.numel() and not v.isnan().all() for v in whole):
        shapes = ", ".join(str(list(v.shape)) for v in operands)
        raise RuleError(f"{op} gives no numbers for {shapes}", help="give operands for which it does")
    sizes = [None, *_rewrites(op, args, dict(kwargs or {}), whole)]
    ways: dict[SoundWay, Rewrite | None] = {}
    for inputs in combinations(operands, degree):
        for rewrite in sizes:
            outputs = call.outcomes(inputs, rewrite, operands, whole, 0)
            ways.update((SoundWay(inputs, each, rewrite and rewrite[:2]), rewrite) for each in outputs)
            if outputs and any(not isinstance(placement, Replicate) for placement in inputs):
                break  # whole operands may also produce a new dim in shares
    for seed in range(1, REDRAWN + 1):
        shuffled = [_shuffled(value, seed) for value in operands]
        try:
            whole = call.run(shuffled)
        except Exception:  # the op requires an order
            continue
        ways = {way: r for way, r in ways.items() if way.outputs in call.outcomes(way.inputs, r, shuffled, whole, seed)}
    return list(ways)


class _ShardedCall:
    """A call that is run repeatedly with other operands."""

    def __init__(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], degree: int) -> None:
        self.op, self.degree = op, degree
        self.leaves, self.spec = tree_flatten((args, kwargs))

    def run(self, local: Sequence[torch.Tensor], rewrite: Rewrite | None = None, rank: int = 0) -> list[torch.Tensor]:
        feed = iter(local)
        leaves = [next(feed) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        if rewrite is not None:
            name, entry, unit, given = rewrite
            sizes = [*given[:entry], chunk(given[entry], self.degree, rank, unit)[1], *given[entry + 1 :]]
            args, kwargs = replace_arguments(self.op, args, kwargs, {name: sizes})
        return [v for v in tree_flatten(self.op(*args, **kwargs))[0] if isinstance(v, torch.Tensor)]

    def outcomes(
        self,
        inputs: Sequence[Placement],
        rewrite: Rewrite | None,
        operands: Sequence[torch.Tensor],
        whole: Sequence[torch.Tensor],
        seed: int,
    ) -> list[tuple[Placement, ...]]:
        """Return the placements of the outputs under which the ranks' results join to the whole ones."""
        pairs = zip(operands, inputs, strict=True)
        random = torch.Generator().manual_seed(seed)  # one for all: equal shares of two operands would cancel in x - y
        shares = [_shares(value, placement, self.degree, random) for value, placement in pairs]
        try:
            parts = [self.run([share[rank] for share in shares], rewrite, rank) for rank in range(self.degree)]
        except Exception:  # ops raise anything for shards that they cannot take
            return []
        if any(len(part) != len(whole) for part in parts):
            return []
        return list(product(*(_joins([part[i] for part in parts], value) for i, value in enumerate(whole))))


def _shuffled(value: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(value.device).manual_seed(seed)
    order = torch.randperm(value.numel(), generator=generator, device=value.device)
    return value.flatten()[order].view(value.shape)


def combinations(operands: Sequence[torch.Tensor], degree: int) -> Iterator[tuple[Placement, ...]]:
    """Yield combinations of the operands' placements: all, or of too many, cuts of equal sizes and all alike."""
    options: list[list[Placement]] = []
    for value in operands:
        own: list[Placement] = [Replicate()]
        own += [Shard(d) for d, size in enumerate(value.shape) if chunk(size, degree, degree - 1)[1]]
        own += [Partial()] * is_rounded(value)
        options.append(own)
    if prod(map(len, options)) <= MOST:
        yield from product(*options)
        return
    groups: dict[object, list[list[Placement]]] = {}
    for index, (value, own) in enumerate(zip(operands, options, strict=True)):
        for placement in own[1:]:
            key = value.shape[placement.dim] if isinstance(placement, Shard) else "P"
            groups.setdefault(key, [[Replicate()] for _ in operands])[index].append(placement)
    chosen: dict[tuple[Placement, ...], None] = {}
    for group in groups.values():
        while prod(map(len, group)) > MOST:  # many operands are alike
            max(group, key=len).pop()
        chosen.update(dict.fromkeys(product(*group)))
    for i in range(max(map(len, options))):
        chosen[tuple(own[min(i, len(own) - 1)] for own in options)] = None
    yield from chosen


def _shares(value: torch.Tensor, placement: Placement, degree: int, random: torch.Generator) -> list[torch.Tensor]:
    """Return one share per rank. A pending sum is split at random, so that every rank has a part."""
    if isinstance(placement, Shard):
        pieces = [chunk(value.shape[placement.dim], degree, rank) for rank in range(degree)]
        return [value.narrow(placement.dim, *piece).contiguous() for piece in pieces]
    if isinstance(placement, Partial):
        others = [
            torch.randn(value.shape, dtype=value.dtype, generator=random).to(value.device) for _ in range(degree - 1)
        ]
        return [*others, value - sum(others, torch.zeros_like(value))]
    return [value] * degree


def _joins(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> list[Placement]:
    if any(part.dtype != whole.dtype for part in parts):
        return []
    if all(part.shape == whole.shape for part in parts):
        if all(same(part, whole) for part in parts):
            return [Replicate()]
        stacked = torch.stack(list(parts))
        return [op for op in PENDING if _reduces(op, whole.dtype) and same(REDUCE[op.reduce_op](stacked), whole, parts)]
    placements: list[Placement] = []
    for dim in range(whole.ndim):
        if all(part.ndim == whole.ndim and _but(part, dim) == _but(whole, dim) for part in parts):
            if same(torch.cat(list(parts), dim), whole):
                placements.append(Shard(dim))
    return placements


def _reduces(placement: Partial, dtype: torch.dtype) -> bool:
    """Return True if the dtype supports the reduction: complex numbers have no order, integers no average."""
    if dtype.is_complex or dtype == torch.bool:
        return (placement.reduce_op in ("sum", "avg", "product")) == dtype.is_complex
    return placement.reduce_op != "avg" or dtype.is_floating_point


def _but(value: torch.Tensor, dim: int) -> list[int]:
    return [size for d, size in enumerate(value.shape) if d != dim]


def same(a: torch.Tensor, b: torch.Tensor, parts: Sequence[torch.Tensor] = ()) -> bool:
    """Return True if `a` is `b` up to the rounding of another order of summation, relative to the largest value.

    The ranks' `parts` count too: if they cancel, the rounding is that of the summands.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not is_rounded(b):
        return torch.equal(a, b)
    epsilon, scale = torch.finfo(b.dtype).eps, largest_magnitude((b, *parts))
    steps = 256 if epsilon < 1e-6 else 4  # in half precision 256 steps would be the whole number
    return torch.allclose(a, b, rtol=0, atol=max(scale, 1e-30) * steps * epsilon, equal_nan=True)


def _rewrites(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], whole: Sequence[torch.Tensor]
) -> Iterator[Rewrite]:
    """Yield entries of size arguments that may count a dim of the first output, with the units that divide them."""
    if not whole or not isinstance(op, torch._ops.OpOverload):
        return
    for position, argument in enumerate(op._schema.arguments):
        given = kwargs.get(argument.name, args[position] if position < len(args) else None)
        kind: Any = argument.real_type
        if not kind.str().startswith("SymInt["):
            continue
        for entry, size in enumerate(given if isinstance(given, (list, tuple)) else ()):
            if isinstance(size, int) and size > 1 and size in whole[0].shape:
                units = (unit for unit in range(1, size) if size % unit == 0)
                yield from ((argument.name, entry, unit, tuple(given)) for unit in units)


def replace_arguments(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace arguments of a call, named as in the op's schema; those that the call omits are added by name."""
    positional = [argument.name for argument in op._schema.arguments][: len(args)]
    own = tuple(new.get(name, argument) for name, argument in zip(positional, args, strict=True))
    return own, {**kwargs, **{name: value for name, value in new.items() if name not in positional}}
