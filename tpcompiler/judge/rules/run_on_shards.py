"""Run one op on the shards of all ranks as its rule allows, and compare with the whole op."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, tree_map
from tpcompiler.errors import RuleError, reason
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join
from tpcompiler.judge.compare.judge import widened
from tpcompiler.judge.rules.placements import replace_arguments, same
from tpcompiler.rules.infer import Option, Refusal, follow, options, shardings
from tpcompiler.rules.notation import Rule, RuleText, Shards, Term, dim_size, extents, parse
from tpcompiler.rules.registry import call_variant, takes_pieces


class Mismatch(RuleError):
    """The shards do not join to the whole."""


def node_of(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    """Return a node for this call in a new graph; operands are stored in `meta["val"]`."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    nodes = tree_map(placeholder, (tuple(args), dict(kwargs)))
    node = graph.call_function(target, *nodes)
    node.meta["val"] = target(*args, **kwargs)
    return node


def rule_from(written: RuleText, node: fx.Node, shards: Shards = "any") -> Rule:
    """Return the rule of this text for the node, right or wrong."""
    pattern = parse(written.text)
    shapes = [tuple(edit.shape(o)) for o in edit.operands(node)] + [tuple(v.shape) for v in edit.outputs(node)]
    linear = tuple(frozenset(group) | pattern.addends for group in written.linear)
    extent = extents(pattern, shapes, written.factors, str(node.target))
    pattern = replace(pattern, whole=pattern.whole - written.windows.keys())
    how = (shards, written.reduce, written.sizes, linear, written.local, written.local_shards, False, written.counts)
    return Rule(pattern, extent, *how, written.positions, written.windows)


def every_option(rule: Rule, mesh: Mesh) -> Iterator[tuple[str, Option]]:
    """Yield every option of the solver, and every option that follows from an operand's or an output's sharding."""
    for option in options(rule, mesh):
        words = [f"{factor} cut" for factor in option.cuts]
        words += [f"P through {sorted(group)}" for _, group in option.through.values()]
        yield ", ".join(words) or "whole", option
    terms = (*rule.pattern.inputs, *rule.pattern.outputs)
    for index, term in enumerate(terms):
        for dim, size in enumerate(_shape(rule, term)):
            blocks = (size // count for count in (2, 3) if size % count == 0 and size > count)
            for unit, block in itertools.product((1, 2, 3), (0, *blocks)):
                cut = DimSharding.by(*mesh.names, block=block, unit=unit)
                asked = Sharding.replicated(len(term)).with_dim(dim, cut)
                fits = (block or size) % unit == 0
                derived = follow(rule, term, asked, mesh) if fits else Refusal("")
                if isinstance(derived, Option) and not isinstance(both := shardings(rule, derived, mesh), Refusal):
                    kept = (*both[0], *both[1])[index]
                    if _layout(kept, _shape(rule, term), mesh) != _layout(asked, _shape(rule, term), mesh):
                        raise Mismatch(f"asked to keep {asked.text(mesh)} of term {index}, got {kept.text(mesh)}")
                    yield f"term {index} kept as {asked.text(mesh)}", derived


def _two_cuts(rule: Rule, mesh: Mesh) -> Iterator[tuple[str, Option]]:
    for pair in itertools.permutations(rule.factors, 2):
        option = Option({factor: DimSharding.by(axis) for factor, axis in zip(pair, mesh.names, strict=True)})
        if not isinstance(shardings(rule, option, mesh), Refusal):
            yield f"{' and '.join(pair)} cut", option


def check(node: fx.Node, rule: Rule, degree: int) -> list[str]:
    """Run every option on a mesh of one axis, and pairs of cuts on two axes; return their texts.

    Raises:
        Mismatch: the shards of an option do not join to the whole.
    """
    mesh, two = Mesh((("tp", degree),)), Mesh((("dp", 2), ("tp", degree)))
    every = [(mesh, *each) for each in every_option(rule, mesh)] + [(two, *each) for each in _two_cuts(rule, two)]
    ran = []
    for mesh, what, option in every:
        passed = [edit.fake(edit.operands(node)[i]).dtype for _, group in option.through.values() for i in group]
        if torch.bool in passed:
            continue  # a sum of booleans is never pending
        both = shardings(rule, option, mesh)
        assert not isinstance(both, Refusal)
        try:
            parts = [edit.tensors_in(value) for value in _run(node, rule, option, *both, mesh)]
            fault = _fault(parts, both[1], edit.outputs(node), mesh)
        except Exception as error:  # ops raise anything for shards that they cannot take
            fault = f"it fails on shards: {type(error).__name__}: {reason(error)}"
        if fault:
            wants, made = (", ".join(sharding.text(mesh) for sharding in each) for each in both)
            raise Mismatch(
                f"the rule of {node.target} is wrong: over {mesh.world_size} ranks, {what} ({wants} -> {made}), "
                f"{fault}",
                help="leave those operands out of linear="
                if option.through
                else f"mark what must stay whole, as in '{next(iter(option.cuts), 'h')}!'",
                operands=", ".join(str(list(edit.shape(operand))) for operand in edit.operands(node)),
            )
        ran.append(what)
    return ran


def check_variant(node: fx.Node, degree: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Compare an op with its variant in simpler ops, whole; return the texts of the runs, none if the variant declines.

    Raises:
        Mismatch: they compute different values.
    """
    whole, ran, alone = edit.outputs(node), list[str](), Mesh((("tp", 1),))
    dims = range(edit.ndim(edit.operands(node)[0]) if takes_pieces(node.target) else 0)
    for pieces in (*({dim: degree} for dim in dims), dict.fromkeys(dims, degree)):
        results = call_variant(node.target, pieces, args, kwargs)
        if results is NotImplemented:
            continue
        fault = _fault([edit.tensors_in(results)], [Sharding.replicated(v.ndim) for v in whole], whole, alone)
        if fault:
            raise Mismatch(
                f"the variant of {node.target} is wrong: {fault}", help="make of simpler ops what the op makes"
            )
        ran.append("in simpler ops")
    return ran


def _fault(
    parts: Sequence[Sequence[torch.Tensor]], made: Sequence[Sharding], whole: Sequence[torch.Tensor], mesh: Mesh
) -> str:
    """Return the first fault in the ranks' parts of the outputs; empty if they join to the whole."""
    for at, (value, sharding) in enumerate(zip(whole, made, strict=True)):
        for rank, part in enumerate(parts):
            if len(part) != len(whole):
                return f"rank {rank} makes {len(part)} tensors, not {len(whole)}"
            local = sharding.local_shape(value.shape, mesh, mesh.coordinate(rank))
            if tuple(part[at].shape) != local:
                return f"rank {rank} makes {list(part[at].shape)} for output {at}, not {list(local)}"
        wholes = join([part[at] for part in parts], sharding, mesh, value.shape)
        for rank, got in enumerate(wholes):
            if not same(got, value, [part[at] for part in parts]):
                return f"output {at} is {_difference(got, value, sharding, rank, mesh)}"
    return ""


def _difference(got: torch.Tensor, whole: torch.Tensor, sharding: Sharding, rank: int, mesh: Mesh) -> str:
    if got.shape != whole.shape or got.dtype != whole.dtype:
        return f"{got.dtype}{list(got.shape)}, not {whole.dtype}{list(whole.shape)}"
    apart = (widened(got) - widened(whole)).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    apart = apart.masked_fill(got == whole, 0)  # infinities
    place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
    holders = [r for r in range(mesh.world_size) if _holds(sharding, whole.shape, mesh, r, place)]
    by = "the sum of all ranks" if sharding.partial else f"rank {rank if sharding.is_replicated else holders[0]}"
    return (
        f"off by {apart.max().item():.3g}: at {place} it is {got[tuple(place)].item():.6g} by {by}, "
        f"and {whole[tuple(place)].item():.6g} on one device"
    )


def _holds(sharding: Sharding, shape: Sequence[int], mesh: Mesh, rank: int, place: Sequence[int]) -> bool:
    here = mesh.coordinate(rank)
    dims = zip(sharding.dims, shape, place, strict=True)
    return all(any(at in run for run in by.runs(size, mesh, here)) for by, size, at in dims)


def _shape(rule: Rule, term: Term) -> list[int]:
    return [dim_size(dim, rule.extent) for dim in term]


def _layout(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> list[Any]:
    """Return the elements that every rank has."""
    numbered = torch.arange(torch.Size(shape).numel()).view(*shape)
    return [cut(numbered, sharding, mesh, rank).tolist() for rank in range(mesh.world_size)]


def _run(
    node: fx.Node, rule: Rule, option: Option, wants: Sequence[Sharding], made: Sequence[Sharding], mesh: Mesh
) -> list[Any]:
    shares = [_shares(edit.fake(o), want, mesh) for o, want in zip(edit.operands(node), wants, strict=True)]
    results = []
    for rank in range(mesh.world_size):
        args, kwargs = edit.map_operands(node, lambda index, _, at=rank: shares[index][at])  # type: ignore[misc]
        args, kwargs = _localized(node, rule, option, args, kwargs, made[0], mesh, rank)
        body: Any = node.target
        local = made[0].local_shape(edit.outputs(node)[0].shape, mesh, mesh.coordinate(rank))
        if rule.skips_empty and 0 in local:
            results.append(edit.outputs(node)[0].new_zeros(local))
            continue
        if not option.cuts.keys().isdisjoint(rule.local):
            (body,) = {rule.local[factor] for factor in option.cuts if factor in rule.local}
            kwargs = {**kwargs, "shard": rule.range_of(option.cuts, mesh, mesh.coordinate(rank))}
        results.append(body(*args, **kwargs))
    return results


def _shares(value: torch.Tensor, want: Sharding, mesh: Mesh) -> list[torch.Tensor]:
    """Return one share per rank; a pending sum is split unevenly at random, so that every rank has a part."""
    assert all(op == "sum" for _, op in want.partial)
    first, *others = itertools.product(*(range(mesh.degree(axis)) for axis, _ in want.partial))
    dealt = {place: _noise(value) for place in others}
    dealt[first] = value - sum(dealt.values(), torch.zeros_like(value)) if others else value
    here = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    parts = [dealt[tuple(at[axis] for axis, _ in want.partial)] for at in here]
    return [cut(part, Sharding(want.dims), mesh, rank) for rank, part in enumerate(parts)]


def _noise(value: torch.Tensor) -> torch.Tensor:
    inexact = value.is_floating_point() or value.is_complex()
    lowest = -9 if value.dtype.is_signed else 0
    return torch.randn_like(value) if inexact else torch.randint_like(value, lowest, 10)


def _localized(
    node: fx.Node,
    rule: Rule,
    option: Option,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Sharding,
    mesh: Mesh,
    rank: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the size arguments that the rule names by this rank's own."""
    out = rule.pattern.outputs[0]
    local = made.local_shape(edit.outputs(node)[0].shape, mesh, mesh.coordinate(rank))
    own: dict[str, Any] = {}
    for name, term in rule.sizes.items():
        given = edit.bound(node)[name]
        if len(given) == len(local):  # an empty rank cannot infer -1; a dim of one stays one
            given = [1 if old == -1 and size == 1 else old for old, size in zip(given, local, strict=True)]
        own[name] = [local[out.index(dim)] if dim in out and dim else old for dim, old in zip(term, given, strict=True)]
    here = mesh.coordinate(rank)
    for name, groups in rule.counts.items():
        entries = [
            sum(option.cuts.get(f, WHOLE).local_size(rule.extent[f], mesh, here) for f in group) for group in groups
        ]
        own[name] = entries if isinstance(edit.bound(node)[name], (list, tuple)) else entries[0]
    return replace_arguments(node.target, args, kwargs, own)
