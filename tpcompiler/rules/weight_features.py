"""Input and output features: the role of a weight's dims in its layer, read off the rules of the ops."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal

from torch import fx

from tpcompiler._torch import aten
from tpcompiler.ir import edit
from tpcompiler.ir.backward import is_backward
from tpcompiler.rules.notation import Rule, Term
from tpcompiler.rules.registry import rule_of


def feature_dims(leaf: Sequence[fx.Node], side: Literal["out", "in"], static: Set[fx.Node], module: str) -> set[int]:
    """Return the dims of a leaf that are its layer's output (or input) features.

    Output features occur in the weight and the result but in no activation; input features are summed over. The leaf is
    followed through views, casts and other values computed from leaves alone to the ops that take activations. If some
    of these ops are inside `module`, only those count, because a tied weight has another role in each of its layers.

    Args:
        leaf: the placeholders of the tensor (several if it is tied).
        static: nodes that are computed from leaves alone (`computed_from_leaves`).
    """
    inside: set[int] = set()
    anywhere: set[int] = set()
    stack: list[tuple[fx.Node, list[int | None]]] = [(node, [*range(edit.ndim(node))]) for node in leaf]
    while stack:
        node, origin = stack.pop()
        for user in node.users:
            rule = rule_of(user) if user.op == "call_function" and edit.outputs(user) else None
            if rule is None or is_backward(user):
                continue  # a backward sums over what its forward makes, and the other way round
            if user in static or _chooses_weights(user, node):  # a view, a split, a cast, a scale of an int8 weight
                pairs = zip(edit.operands(user), rule.pattern.inputs, strict=True)
                terms = [term for operand, term in pairs if operand is node]
                source = {f: origin[d] for term in terms for d, dim in enumerate(term) for f in dim}
                for result, term in _results(user, rule):
                    stack.append((result, [_only([source.get(f) for f in dim]) for dim in term]))
                continue
            dims = {at for d in _positions(node, user, rule, side, static) if (at := origin[d]) is not None}
            anywhere |= dims
            inside |= dims if module in edit.module_paths(user) else set()
    return inside or anywhere


def is_addend(leaf: Sequence[fx.Node], static: Set[fx.Node]) -> bool:
    """Return True if every op that takes the leaf (or a view) with an activation adds it, as a layer adds its bias."""
    values, is_added = list(leaf), list[bool]()
    for value in values:
        for user in value.users:
            if user in static:
                values.append(user)
            elif rule := rule_of(user) if edit.outputs(user) else None:
                addends = {operand for at, operand in enumerate(edit.operands(user)) if at in rule.pattern.addends}
                is_added.append(user.target is aten.add.Tensor or value in addends)
    return bool(is_added) and all(is_added)


def _chooses_weights(user: fx.Node, node: fx.Node) -> bool:
    """Return True if a look-up takes a matrix per row, such as an expert's, so that its result is still a weight."""
    return user.target is aten.index.Tensor and user.args[0] is node and edit.ndim(node) > 2


def _results(user: fx.Node, rule: Rule) -> list[tuple[fx.Node, Term]]:
    """Return the op's results, each with its term; several outputs are their `getitem` nodes."""
    if edit.is_tensor(user):
        return [(user, rule.pattern.outputs[0])]
    return [(part, rule.pattern.outputs[part.args[1]]) for part in user.users]  # type: ignore[index]


def _only(dims: Sequence[int | None]) -> int | None:
    """Return the leaf's dim that corresponds to a dim: the only one among its factors, provided it is the outer one.

    The inner factor may belong to no dim of the leaf, such as the eight numbers unpacked from each row.
    """
    leaf_dims = {dim for dim in dims if dim is not None}
    return dims[0] if len(leaf_dims) == 1 else None


def _positions(node: fx.Node, user: fx.Node, rule: Rule, side: str, static: Set[fx.Node]) -> set[int]:
    """Return the dims of operand `node` that are features of this side for the op."""
    pairs = list(zip(edit.operands(user), rule.pattern.inputs, strict=True))
    others = [term for operand, term in pairs if operand not in static and operand is not node]
    active = {f for term in others for dim in term for f in dim}
    features = rule.reduced - rule.pattern.whole if side == "in" else rule.made - active
    return {d for operand, term in pairs if operand is node for d, dim in enumerate(term) if features.intersection(dim)}
