"""Run one op on the shards of all ranks as its rule allows, and compare with the whole op."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import DimSharding, Sharding
from tpcompiler.ir.shares import cut, join
from tpcompiler.rules.infer import Option, Refusal, follow, options, shardings
from tpcompiler.rules.notation import Rule, RuleText, ShardRange, extents, parse


class Mismatch(AssertionError):
    """The shards do not make the whole."""


def rule_from(written: RuleText, node: fx.Node, shards: str = "any") -> Rule:
    """The rule that this text would be for the node, right or wrong."""
    pattern = parse(written.text)
    shapes = [tuple(o.meta["val"].shape) for o in edit.operands(node)] + [tuple(v.shape) for v in edit.outputs(node)]
    linear = tuple(frozenset(group) | pattern.addends for group in written.linear)
    extent = extents(pattern, shapes, written.factors, "a test")
    return Rule(pattern, extent, shards, written.reduce, written.sizes, linear, written.local, False)  # type: ignore[arg-type]


def every_option(rule: Rule, mesh: Mesh) -> Iterator[tuple[str, Option]]:
    """All that the solver may choose, and all that following an operand's or an output's sharding leads to."""
    for option in options(rule, mesh):
        said = [f"{factor} cut" for factor in option.cuts]
        said += [f"P through {sorted(group)}" for _, group in option.through.values()]
        yield ", ".join(said) or "whole", option
    terms = (*rule.pattern.inputs, *rule.pattern.outputs)
    for index, term in enumerate(terms):
        for dim, size in enumerate(_shape(rule, term)):
            blocks = (size // count for count in (2, 3) if size % count == 0 and size > count)
            for unit, block in itertools.product((1, 2, 3), (0, *blocks)):
                dims = list(Sharding.replicated(len(term)).dims)
                dims[dim] = DimSharding(mesh.names, unit, block)
                fits = (block or size) % unit == 0
                found = follow(rule, term, Sharding(tuple(dims)), mesh) if fits else Refusal("")
                if isinstance(found, Option) and not isinstance(both := shardings(rule, found, mesh), Refusal):
                    asked, kept = Sharding(tuple(dims)), (*both[0], *both[1])[index]
                    if _layout(kept, _shape(rule, term), mesh) != _layout(asked, _shape(rule, term), mesh):
                        raise Mismatch(f"asked to keep {asked.text(mesh)} of term {index}, got {kept.text(mesh)}")
                    yield f"term {index} kept as {asked.text(mesh)}", found


def check(node: fx.Node, rule: Rule, degree: int) -> list[str]:
    """Run every option on a mesh of one axis; what was run.

    Raises:
        Mismatch: an option whose shards do not make the whole.
    """
    mesh = Mesh((("tp", degree),))
    ran = []
    for what, option in every_option(rule, mesh):
        both = shardings(rule, option, mesh)
        assert not isinstance(both, Refusal)
        try:
            parts = [edit_outputs(value) for value in _run(node, rule, option, *both, mesh)]
            for at, (whole, made) in enumerate(zip(edit.outputs(node), both[1], strict=True)):
                for got in join([part[at] for part in parts], made, mesh, whole.shape):
                    torch.testing.assert_close(got, whole, rtol=1e-9, atol=1e-9, equal_nan=True)
        except Exception as error:
            raise Mismatch(f"{node.target} over {degree}, {what}: {error}") from error
        ran.append(what)
    return ran


def edit_outputs(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [v for v in value if isinstance(v, torch.Tensor)]


def _shape(rule: Rule, term: Sequence[Sequence[str]]) -> list[int]:
    return [torch.Size([rule.extent[f] for f in dim]).numel() for dim in term]


def _layout(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> list[Any]:
    """Which elements every rank holds."""
    numbered = torch.arange(torch.Size(shape).numel()).view(*shape)
    return [cut(numbered, sharding, mesh, rank).tolist() for rank in range(mesh.world_size)]


def _run(
    node: fx.Node, rule: Rule, option: Option, wants: Sequence[Sharding], made: Sequence[Sharding], mesh: Mesh
) -> list[Any]:
    shares = [_shares(o.meta["val"], want, mesh) for o, want in zip(edit.operands(node), wants, strict=True)]
    results = []
    for rank in range(mesh.world_size):
        args, kwargs = edit.map_operands(node, lambda index, _, at=rank: shares[index][at])  # type: ignore[misc]
        args, kwargs = _localized(node, rule, args, kwargs, made[0], mesh, rank)
        body = node.target
        for factor, by in option.cuts.items():
            if factor in rule.local:
                total = rule.extent[factor]
                offset, size = by.share(total, mesh, mesh.coordinate(rank))
                body, kwargs = rule.local[factor], {**kwargs, "shard": ShardRange(offset, size, size / total)}
        results.append(body(*args, **kwargs))  # type: ignore[operator]
    return results


def _shares(value: torch.Tensor, want: Sharding, mesh: Mesh) -> list[torch.Tensor]:
    """One share per rank; a pending sum is dealt unevenly at random, so that no rank holds nothing."""
    if not want.partial:
        return [cut(value, want, mesh, rank) for rank in range(mesh.world_size)]
    ((_, op),) = want.partial
    assert op == "sum"
    others = [_noise(value) for _ in range(mesh.world_size - 1)]
    return [*others, value - sum(others, torch.zeros_like(value))]


def _noise(value: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(value) if value.is_floating_point() else torch.randint_like(value, -9, 10)


def _localized(
    node: fx.Node, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sharding, mesh: Mesh, rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Size arguments that the rule names, as this rank's own."""
    out = rule.pattern.outputs[0]
    local = made.local_shape(edit.outputs(node)[0].shape, mesh, mesh.coordinate(rank))
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    args = tuple(args)
    for name, term in rule.sizes.items():
        given = edit.bound(node)[name]
        entries = [local[out.index(dim)] if dim in out and dim else old for dim, old in zip(term, given, strict=True)]
        if names.index(name) < len(args):
            args = (*args[: names.index(name)], entries, *args[names.index(name) + 1 :])
        else:
            kwargs = {**kwargs, name: entries}
    return args, kwargs
