"""Prove a registered rule on shards, and list the placements that it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler._torch import OpOverload, tree_flatten
from tpcompiler.errors import RuleError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.judge.rules.placements import SoundWay, sound_placements
from tpcompiler.judge.rules.run_on_shards import check, check_variant, node_of
from tpcompiler.rules.infer import Refusal, options, shardings
from tpcompiler.rules.notation import Rule
from tpcompiler.rules.register import resolve_op
from tpcompiler.rules.registry import rule_of, variant_of

DEGREES = (2, 3, 4)
Inputs = Sequence[Any]  # the arguments of a call, or (arguments, keyword arguments)


@dataclass(frozen=True)
class RuleCheck:
    """The result of `check_rule`.

    Attributes:
        ran: every placement that the rule offers, as "sample 0 over 2 ranks: h cut"; all of them hold.
        missing: sound placements that the rule does not offer, as "sample 0 over 2 ranks: S(1) -> S(1)".
    """

    ran: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.ran)} placements hold", *(f"not offered, and sound: {way}" for way in self.missing)]
        return "\n".join(lines)


def check_rule(op: object, sample_inputs: Iterable[Inputs], *, degrees: Sequence[int] = DEGREES) -> RuleCheck:
    """Run every placement that the op's rule offers on shards, and every pair of cuts, and compare with the whole op.

    The op's variant, if it has one, is compared too. Give samples with sizes that differ from each other and are not
    all even, in float64 if the op accepts it.

    Args:
        op: an op that has a rule, or its name.
        sample_inputs: for each call the tuple of its arguments, or `(args, kwargs)`.

    Raises:
        RuleError: the rule is wrong (the message has the placement, the rank and the numbers), does not fit a sample,
            or
            the op has none.
    """
    ran: list[str] = []
    missing: list[str] = []
    for index, (target, args, kwargs) in enumerate(calls_of(op, sample_inputs)):
        node = node_of(target, args, kwargs)
        rule = rule_of(node)
        if rule is None:
            raise RuleError(f"{target} has no rule for sample {index}", help="register one: tpcompiler.register_rule")
        for degree in degrees:
            where = f"sample {index} over {degree} ranks"
            if variant_of(target) is not None:
                ran += [f"{where}: {what}" for what in check_variant(node, degree, args, kwargs)]
            ran += [f"{where}: {what}" for what in check(node, rule, degree)]
            missing += [f"{where}: {way}" for way in left_out(node, rule, degree, args, kwargs)]
    if not ran:
        raise RuleError(f"no sample of {op} was given", help="give the arguments of at least one call")
    return RuleCheck(tuple(ran), tuple(missing))


def calls_of(op: object, sample_inputs: Iterable[Inputs]) -> list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]:
    """Return (op, args, kwargs) for every sample.

    Raises:
        RuleError: the op does not exist, or a sample is not a tuple of arguments.
    """
    target = resolve_op(op)
    calls = []
    for given in sample_inputs:
        if isinstance(given, torch.Tensor) or not isinstance(given, Sequence):
            raise RuleError(f"a sample of {target} is a {type(given).__name__}", help="give a tuple of its arguments")
        pair = len(given) == 2 and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict)
        args, kwargs = given if pair else (given, {})
        calls.append((target, tuple(args), dict(kwargs)))
    return calls


def left_out(
    node: fx.Node, rule: Rule | None, degree: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[SoundWay]:
    """Return the sound ways to run a call, with cuts that `degree` divides, that its rule does not offer.

    Ways in which an operand might as well be whole are omitted.
    """
    assert isinstance(node.target, OpOverload)
    operands = [leaf for leaf in tree_flatten((tuple(args), dict(kwargs)))[0] if isinstance(leaf, torch.Tensor)]
    have = offered(rule, degree)
    sound = [way for way in sound_placements(node.target, args, kwargs, degree) if is_even(way, operands, degree)]
    results = {(way.inputs, way.outputs) for way in sound}
    return [way for way in sound if way.inputs not in have and not is_idle(way, results)]


def offered(rule: Rule | None, degree: int) -> set[tuple[Placement, ...]]:
    """Return the placements of the operands that a rule offers on one axis; only whole ones without a rule.

    Cuts in blocks, parts, units or spans are omitted, because no torch placement expresses them.
    """
    if rule is None:
        return set()
    mesh = Mesh((("tp", degree),))
    placements = set()
    for option in options(rule, mesh):
        both = shardings(rule, option, mesh)
        assert not isinstance(both, Refusal)
        dims = [dim for side in both for sharding in side for dim in sharding.dims]
        if not any(
            dim.parts or dim.spans or any(level.block or level.unit > 1 for level in dim.levels) for dim in dims
        ):
            placements.add(tuple(want.placements(mesh)[0] for want in both[0]))
    return placements


def is_even(way: SoundWay, operands: Sequence[torch.Tensor], degree: int) -> bool:
    pairs = zip(way.inputs, operands, strict=True)
    return all(value.shape[p.dim] % degree == 0 for p, value in pairs if isinstance(p, Shard))


def is_idle(way: SoundWay, results: set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]) -> bool:
    """Return True if everything is whole, or if one operand might be whole for the same result."""
    cut = [i for i, placement in enumerate(way.inputs) if isinstance(placement, (Shard, Partial))]
    whole = ((*way.inputs[:i], Replicate(), *way.inputs[i + 1 :]) for i in cut)
    return not cut or any((inputs, way.outputs) in results for inputs in whole)
