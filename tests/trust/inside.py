"""Damages of what is computed: arguments, sizes, masks, operands."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from tests.trust.damage import Artifact, at, claim, inserted, kind, region, shape, static
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default)


def _is_cut(node: fx.Node) -> bool:
    return any("S(" in text for text in read_claim(node).sharding or ())


@kind
def two_sizes_of_a_view_swapped(artifact: Artifact, nth: int) -> bool:
    """A view of a share has two of its sizes in the other order. (Equal ones, or one of 1, would be the same.)"""

    def where(node: fx.Node) -> bool:
        return node.target in VIEWS and _is_cut(node) and static(node) and _swap(shape(node)) is not None

    site = at(artifact.each(where), nth)
    for node in site or ():
        node.update_arg(1, _swap(shape(node)))
    return site is not None


def _swap(sizes: list[int]) -> list[int] | None:
    for i in range(len(sizes) - 1, 0, -1):
        if sizes[i] != sizes[i - 1] and 1 not in sizes[i - 1 : i + 1]:
            return [*sizes[: i - 1], sizes[i], sizes[i - 1], *sizes[i + 1 :]]
    return None


@kind
def the_whole_size_in_a_view(artifact: Artifact, nth: int) -> bool:
    """A view of a share is given the sizes of the whole, as the claim has them."""
    site = at(artifact.each(lambda n: _sizes_of_the_whole(n) is not None), nth)
    for node in site or ():
        node.update_arg(1, _sizes_of_the_whole(node))
    return site is not None


def _sizes_of_the_whole(node: fx.Node) -> list[Any] | None:
    call = read_claim(node).call
    if node.target not in VIEWS or not _is_cut(node) or call is None or -1 in call.args[1]:
        return None
    own = list(node.args[1])  # type: ignore[call-overload]
    sizes = [said if isinstance(said, int) else size for said, size in zip(call.args[1], own, strict=True)]
    return sizes if sizes != own else None


@kind
def split_sizes_shifted(artifact: Artifact, nth: int) -> bool:
    """Packed parts are taken apart one element later."""

    def where(node: fx.Node) -> bool:
        sizes = node.args[1] if len(node.args) > 1 else None
        return (
            "split" in str(node.target)
            and isinstance(sizes, (list, tuple))
            and all(isinstance(n, int) for n in sizes)
            and len(sizes) > 1
            and sizes[1] > 1
        )

    site = at(artifact.each(where), nth)
    for node in site or ():
        first, second, *rest = node.args[1]  # type: ignore[misc]
        node.update_arg(1, [first + 1, second - 1, *rest])
    return site is not None


@kind
def a_slice_of_packed_parts_shifted(artifact: Artifact, nth: int) -> bool:
    """A slice outside of all changes, of what is cut, begins and ends one element later (or earlier)."""
    site = at(artifact.each(lambda n: _room(n) != 0), nth)
    for node in site or ():
        by, bound = _room(node), edit.bound(node)
        end = min(bound["end"], shape(node.all_input_nodes[0])[bound["dim"]])
        node.args, node.kwargs = (node.args[0], bound["dim"], (bound["start"] or 0) + by, end + by), {}
    return site is not None


def _room(node: fx.Node) -> int:
    if node.target is not aten.slice.Tensor or region(node) or not _is_cut(node):
        return 0
    bound = edit.bound(node)
    size, start, end = shape(node.all_input_nodes[0])[bound["dim"]], bound["start"] or 0, bound["end"]
    if not all(isinstance(n, int) and n >= 0 for n in (size, start, end)):
        return 0
    return 1 if end < size else -1 if start > 0 else 0


def _floats(node: fx.Node) -> list[str]:
    """The arguments that are numbers of which the result surely depends: epsilons and attention's scale."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return []
    return [name for name, value in edit.bound(node).items() if name in ("eps", "scale") and isinstance(value, float)]


@kind
def another_number(artifact: Artifact, nth: int) -> bool:
    """A norm's epsilon or attention's scale is another on all ranks, in the call and in the claim."""
    site = at(artifact.each(lambda n: bool(_floats(n))), nth)
    for node in site or ():
        (name, *_) = _floats(node)
        old = edit.bound(node)[name]
        edit.set_argument(node, name, old * 1.5 + 0.5)
        call = claim(node).get("call")
        if call is not None:
            call["args"] = [old * 1.5 + 0.5 if arg == old else arg for arg in call["args"]]
    return site is not None


@kind
def another_number_on_one_rank(artifact: Artifact, nth: int) -> bool:
    """One rank multiplies (or adds, divides by) another number. (What is cast or masked away after it: by the check.)"""
    of = (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar)

    def where(node: fx.Node) -> bool:
        return node.target in of and isinstance(node.args[1], float) and not region(node)

    node = at([node for node in edit.calls(artifact.last.graph) if where(node)], nth)
    if node is not None:
        node.update_arg(1, node.args[1] * 1.5 + 0.5)  # type: ignore[operator]
    return node is not None


@kind
def groups_of_the_whole(artifact: Artifact, nth: int) -> bool:
    """A convolution, or a norm, in groups: of a share as many as of the whole, or one less."""

    def where(node: fx.Node) -> bool:
        return isinstance(node.target, torch._ops.OpOverload) and any(
            name in ("groups", "num_groups", "group") and isinstance(value, int) and value > 1
            for name, value in edit.bound(node).items()
        )

    site = at(artifact.each(where), nth)
    for node in site or ():
        for name in ("groups", "num_groups", "group"):
            if name in edit.bound(node):
                edit.set_argument(node, name, edit.bound(node)[name] // 2)
    return site is not None


def _masks(artifact: Artifact, target: Any) -> list[fx.Node]:
    return [n for n in edit.calls(artifact.last.graph) if n.target is target and read_claim(n).body]


@kind
def the_first_id_of_a_share_off_by_one(artifact: Artifact, nth: int) -> bool:
    """One rank takes its part of a vocabulary to begin one id later, by a number in its graph."""
    node = at(_masks(artifact, aten.sub.Tensor), nth)
    if node is not None:
        (rows,) = artifact.manifest.rank_numbers.values()
        node.update_arg(1, rows[-1][node.args[1].args[2]] + 1)  # type: ignore[union-attr,index]
    return node is not None


@kind
def the_end_of_a_share_off_by_one(artifact: Artifact, nth: int) -> bool:
    """One rank takes the last id of its part to be another's."""
    node = at(_masks(artifact, aten.ge.Scalar), nth)
    if node is not None:
        node.update_arg(1, node.args[1] - 1)  # type: ignore[operator]
    return node is not None


@kind
def a_mask_inverted(artifact: Artifact, nth: int) -> bool:
    """Ids of other ranks are looked up, the rank's own are not."""
    site = at(artifact.each(lambda n: n.target is aten.where.self and read_claim(n).body is not None), nth)
    for node in site or ():
        node.args = (node.args[0], node.args[2], node.args[1])
    return site is not None


@kind
def a_mask_left_out(artifact: Artifact, nth: int) -> bool:
    """What is found under ids of other ranks is not set to zero."""
    site = at(artifact.each(lambda n: n.target is aten.masked_fill.Scalar and read_claim(n).body is not None), nth)
    for node in site or ():
        kept = inserted(node, aten.clone.default, (node.args[0],), node)
        node.replace_all_uses_with(kept)
        edit.erase(node)
    return site is not None


def _weights(node: fx.Node) -> list[fx.Node]:
    return [used for used in node.all_input_nodes if used.op == "placeholder" and used.name.startswith("p_")]


def _pairs(artifact: Artifact) -> list[tuple[str, str]]:
    """Matrices of one shape and sharding, and other content."""
    specs = {
        s.arg.name: str(s.target) for s in artifact.last.graph_signature.input_specs if s.kind is InputKind.PARAMETER
    }
    cut = {row.name: row.sharding for row in artifact.manifest.tensors}
    found = [n for n in artifact.last.graph.nodes if n.name in specs and len(shape(n)) > 1 and n.users]
    return [
        (one.name, two.name)
        for one, two in itertools.pairwise(found)
        if shape(one) == shape(two)
        and cut[specs[one.name]] == cut[specs[two.name]]
        and not torch.equal(artifact.leaf(0, specs[one.name]), artifact.leaf(0, specs[two.name]))
    ]


def _exchange(program: torch.export.ExportedProgram, pair: tuple[str, str]) -> None:
    one, two = (next(n for n in program.graph.nodes if n.name == name) for name in pair)
    users, others = list(one.users), list(two.users)
    for user in users:
        user.replace_input_with(one, two)
    for user in (u for u in others if u not in users):
        user.replace_input_with(two, one)


@kind
def two_weights_exchanged(artifact: Artifact, nth: int) -> bool:
    """Two layers use each other's weight, on all ranks."""
    pair = at(_pairs(artifact), nth)
    for program in artifact.ranks if pair else ():
        _exchange(program, pair)  # type: ignore[arg-type]
    return pair is not None


@kind
def two_weights_exchanged_on_one_rank(artifact: Artifact, nth: int) -> bool:
    """Two layers of one rank use each other's weight."""
    pair = at(_pairs(artifact), nth)
    if pair:
        _exchange(artifact.last, pair)
    return pair is not None


@kind
def two_weights_under_each_others_name(artifact: Artifact, nth: int) -> bool:
    """The signature of one rank gives two layers each other's weight."""
    pair = at(_pairs(artifact), nth)
    specs = {spec.arg.name: spec for spec in artifact.last.graph_signature.input_specs}
    if pair:
        one, two = (specs[name] for name in pair)
        one.target, two.target = two.target, one.target
    return pair is not None


@kind
def operands_of_a_product_or_difference_swapped(artifact: Artifact, nth: int) -> bool:
    """One rank subtracts (multiplies matrices) the other way round. (x - x, or a product with itself, is left alone.)"""

    def where(node: fx.Node) -> bool:
        pair = node.args[:2]
        return (
            node.target in (aten.sub.Tensor, aten.matmul.default, aten.bmm.default)
            and not region(node)
            and all(isinstance(arg, fx.Node) for arg in pair)
            and pair[0] is not pair[1]
            and shape(pair[0]) == shape(pair[1])  # type: ignore[arg-type]
        )

    node = at([node for node in edit.calls(artifact.last.graph) if where(node)], nth)
    if node is not None:
        node.args = (node.args[1], node.args[0], *node.args[2:])
    return node is not None


@kind
def changed_in_place(artifact: Artifact, nth: int) -> bool:
    """An op changes its operand in place, and others of its users see that. (One of a single use is not seen.)"""
    of = {aten.relu.default: aten.relu_.default, aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
    of |= {aten.silu.default: aten.silu_.default, aten.sigmoid.default: aten.sigmoid_.default}

    def where(node: fx.Node) -> bool:
        operand = node.args[0] if node.args else None
        return (
            node.target in of
            and isinstance(operand, fx.Node)
            and operand.op == "call_function"
            and str(shape(operand)) == str(shape(node))
            and operand.meta["val"].dtype == node.meta["val"].dtype
            and _used_after(operand, node)
        )

    site = at(artifact.each(where), nth)
    for node in site or ():
        node.target = of[node.target]  # type: ignore[index]
    return site is not None


def _used_after(operand: fx.Node, node: fx.Node) -> bool:
    places = {n: i for i, n in enumerate(node.graph.nodes)}
    return any(places[user] > places[node] for user in operand.users)


@kind
def the_size_of_a_share_for_that_of_the_whole(artifact: Artifact, nth: int) -> bool:
    """A dynamic size of a share is not multiplied by the number of shares."""

    def where(node: fx.Node) -> bool:
        return node.target is operator.mul and isinstance(node.args[1], int) and _sym_size(node.args[0])

    site = at(artifact.each(where), nth)
    for node in site or ():
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        edit.erase(node)
    return site is not None


def _sym_size(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.sym_size.int


def _made_of(op: Callable[..., Any]) -> Callable[[fx.Node], bool]:
    return lambda node: node.target is op and isinstance(node.args[1], int) and node.args[1] > 1


@kind
def another_divisor_of_a_size(artifact: Artifact, nth: int) -> bool:
    """A size that is divided for a share is divided by one more, and its recorded value is as before."""
    site = at(artifact.each(_made_of(operator.floordiv)), nth)
    for node in site or ():
        node.update_arg(1, node.args[1] + 1)  # type: ignore[operator]
    return site is not None


@kind
def attention_that_sees_what_comes(artifact: Artifact, nth: int) -> bool:
    """Causal attention is not causal any more (or the other way round), on one rank."""
    found = [
        n for n in edit.calls(artifact.last.graph) if "is_causal" in (_schema(n)) and edit.bound(n)["attn_mask"] is None
    ]
    node = at(found, nth)
    if node is not None:
        edit.set_argument(node, "is_causal", not edit.bound(node)["is_causal"])
        if edit.bound(node)["is_causal"] is not True and len(node.args) <= 5:
            node.kwargs = {**node.kwargs, "is_causal": False}
    return node is not None


def _schema(node: fx.Node) -> list[str]:
    return list(edit.bound(node)) if isinstance(node.target, torch._ops.OpOverload) else []


@kind
def one_part_of_the_keys_in_two_turns(artifact: Artifact, nth: int) -> bool:
    """Every rank gives the same part of its steps again."""
    site = at(
        artifact.each(lambda node: node.target is aten.select.int and _is_of_turns(node) and node.args[2] == 1), nth
    )
    for node in site or ():
        node.update_arg(2, 0)
    return site is not None


def _is_of_turns(node: fx.Node) -> bool:
    return isinstance(node.args[0], fx.Node) and node.args[0].target is aten.unflatten.int


@kind
def a_sum_of_turns_that_is_not_rescaled(artifact: Artifact, nth: int) -> bool:
    """What earlier turns made counts as if no later one had a greater score."""
    site = at(artifact.each(lambda node: node.target is aten.addcmul.default and node.meta["val"].ndim == 4), nth)
    for node in site or ():
        (scaled, *_) = node.all_input_nodes
        node.update_arg(0, scaled.args[0])
    return site is not None
