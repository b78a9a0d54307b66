"""Which dims of an op's operands can be cut at all, and which of these the rules offer."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx
from torch.distributed.tensor import Shard

from tests.op_db.judge import draws
from tests.op_db.record import Call
from tpcompiler._torch import OpOverload, tree_flatten
from tpcompiler.errors import RuleError
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.judge.rules.placements import sound_placements
from tpcompiler.rules.infer import Refusal, follow, merge, shardings
from tpcompiler.rules.registry import rule_of

PRIMES = (2, 3, 5, 7)


class Cut(NamedTuple):
    """One dim of one operand of a call, cut over as many ranks as give shards of one size.

    `line` names it over all calls of the op: the operand by the schema's name, the dim from the last, or as `dim` where
    the call itself names it (the `dim` of a softmax).
    """

    line: str
    operand: int
    dim: int
    degree: int


def cuts(node: fx.Node) -> Iterator[Cut]:
    """Every dim of more than one element of every operand of floats."""
    if draws(node) or not edit.outputs(node):
        return
    for index, (name, operand) in enumerate(zip(_names(node), edit.operands(node), strict=True)):
        value = operand.meta["val"]
        for dim, size in enumerate(value.shape if value.is_floating_point() and value.numel() else ()):
            degree = next((p for p in PRIMES if size % p == 0), None)
            if degree is not None:
                named = "dim" if dim in _named_dims(node, value.ndim) else f"{dim - value.ndim}"
                yield Cut(f"{node.target} {name} {named}", index, dim, degree)


def _names(node: fx.Node) -> list[str]:
    """The schema's name of every operand; those of one list share it."""
    found = []
    for name, value in edit.bound(node).items():
        found += [name for leaf in tree_flatten(value)[0] if edit.is_tensor(leaf)]
    return found


def _named_dims(node: fx.Node, ndim: int) -> set[int]:
    given = [value for name, value in edit.bound(node).items() if name.startswith("dim")]
    return {leaf % ndim for leaf in tree_flatten(given)[0] if type(leaf) is int}


def sound(node: fx.Node) -> set[Cut] | None:
    """The cuts that some placement of the other operands and of the outputs makes right, found by execution.

    None where the whole call gives nothing to compare.
    """
    wanted = list(cuts(node))
    found: set[Cut] = set()
    assert isinstance(node.target, OpOverload)
    args, kwargs = edit.map_operands(node, lambda _, operand: operand.meta["val"])
    for degree in sorted({cut.degree for cut in wanted}):
        try:
            ways = sound_placements(node.target, args, kwargs, degree)
        except (RuleError, RuntimeError, NotImplementedError):
            return None
        for cut in wanted:
            if cut.degree == degree and any(way.inputs[cut.operand] == Shard(cut.dim) for way in ways):
                found.add(cut)
    return found


def declined(call: Call, cut: Cut) -> str:
    """Why the rules do not keep this cut through the call, or nothing when they do. Pending sums are reduced."""
    mesh = Mesh((("tp", cut.degree),))
    operand = edit.operands(call.node)[cut.operand]
    dims = [WHOLE] * operand.meta["val"].ndim
    dims[cut.dim] = DimSharding.by(*mesh.names)
    known: dict[fx.Node, list[Sharding]] = {}
    for node in call.inside.nodes:
        if node.op == "placeholder":
            known[node] = [Sharding(tuple(dims))] if node.name == operand.name else _whole(node)
        elif node.target is operator.getitem:
            at = sum(isinstance(v, torch.Tensor) for v in node.args[0].meta["val"][: node.args[1]])
            known[node] = [known[node.args[0]][at]]
        else:
            made = _kept(node, [known[o][0] for o in edit.operands(node)], mesh)
            if isinstance(made, str):
                return made
            known[node] = made
    return "" if call.tracked else "written in place inside"


def _whole(node: fx.Node) -> list[Sharding]:
    return [Sharding.replicated(value.ndim) for value in edit.outputs(node)]


def _kept(node: fx.Node, given: list[Sharding], mesh: Mesh) -> list[Sharding] | str:
    """The shardings of the outputs when the operands stay as they are, or why they cannot."""
    if all(sharding.is_replicated for sharding in given):
        return _whole(node)
    try:
        rule = rule_of(node)
    except RuleError as error:
        return f"rule error: {error.message}"
    if rule is None:
        return f"no rule: {node.target}"
    options = []
    for term, sharding in zip(rule.pattern.inputs, given, strict=True):
        if not sharding.is_replicated:
            option = follow(rule, term, sharding, mesh)
            if isinstance(option, Refusal):
                return f"{node.target}: {_without_sizes(option.text)}"
            options.append(option)
    together = merge(options)
    if together is None:
        return f"{node.target}: operands are cut differently"
    both = shardings(rule, together, mesh)
    if isinstance(both, Refusal):
        return f"{node.target}: {_without_sizes(both.text)}"
    return [sharding.without_partial for sharding in both[1]]


def _without_sizes(text: str) -> str:
    return " ".join("n" if word.strip(",").isdigit() else word for word in text.split())
