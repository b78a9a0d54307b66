"""The ops allowed in a change of sharding: they move elements, regardless of values, and reduce them over ranks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, c10d_functional
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.sizes import is_fixed_part, statically_equal
from tpcompiler.ir.text import dtype_name
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.ordered import loses_nan
from tpcompiler.judge.sound.region import ProgramRegion
from tpcompiler.judge.sound.unsound import Unsound

END = 2**63 - 1  # a slice without an end

# Sizes alone decide which element of an operand each element of the result is. So an op that is right for distinct
# numbers is right for all numbers, of every dtype. Changes of sharding use only these.
MOVES = (
    aten.view.default,  # take apart and join blocks, units and rows of ranks
    aten.reshape.default,  # the same on other devices, where memory layout may differ
    aten._unsafe_view.default,  # torch's form of a reshape that copies
    aten.permute.default,  # moves a gathered dim into place; reorders dims as in memory
    aten.transpose.int,
    aten.unsqueeze.default,  # adds a dim of ranks, to gather along
    aten.squeeze.dim,
    aten.clone.default,  # collectives need dense memory
    aten.slice.Tensor,  # removes padding
    aten.select.int,
    aten.index_select.default,  # takes the rank's own part
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.cat.default,
    aten.stack.default,
    operator.getitem,
)
# Arguments that must not cut a dynamic dim at a fixed number, which would be right for some sizes only.
ALONG = {
    aten.slice.Tensor: ("start", "end"),
    aten.split.Tensor: ("split_size",),
    aten.split_with_sizes.default: ("split_sizes",),
    aten.select.int: ("index",),
    aten.index_select.default: ("index",),
}
FILLS: dict[Any, tuple[int, ...]] = {
    aten.new_zeros.default: (),  # padding
    aten.full_like.default: (0, 1),  # the neutral value, for all ranks except the first
}
# Allowed on the rank's numbers and on ranges: they compute the rank's own places, or compare with the first rank.
PLACES = (aten.arange.default, aten.add.Tensor, aten.eq.Scalar, aten.view.default, aten.reshape.default)
COLLECTIVES = (
    c10d_functional.all_reduce.default,
    c10d_functional.all_gather_into_tensor.default,
    c10d_functional.reduce_scatter_tensor.default,
    c10d_functional.all_to_all_single.default,
    c10d_functional.wait_tensor.default,
)
REDUCTIONS = (c10d_functional.all_reduce.default, c10d_functional.reduce_scatter_tensor.default)
SIZES = (aten.sym_size.int, aten.sym_numel.default, operator.add, operator.mul, operator.floordiv)


def check_changes(made: Folded) -> None:
    """Check that every node of a change moves elements, reduces them over ranks, or computes a size.

    Raises:
        Unsound: a node does something else, or uses a number that is right for some sizes only.
    """
    for region in made.regions.values():
        if region.call is None:
            (operand,) = (node for node in region.inputs if edit.is_tensor(node))
            dtype = edit.outputs(operand)[0].dtype
            degrees = _degrees(made.shardings[operand][0], made.shardings[region.nodes[-1]][0], made.mesh)
            places = set(region.numbers)
            _check_extrema(region)
            inside = {node for each in region.ordered for node in each.nodes}
            for node in region.nodes:
                if node.target in PLACES and places.issuperset(node.all_input_nodes):
                    places.add(node)
                elif node not in inside:
                    _check_move(node, region.name, _kept_dtype(node, dtype, places), degrees, places)


def _check_extrema(region: ProgramRegion) -> None:
    """Check that floats are reduced to extrema as integers in which NaN comes first, and such integers in no other way.

    Raises:
        Unsound: a real backend would lose NaN, or the integers would mean nothing.
    """
    encoded = {each.op for each in region.ordered if each.op}
    for node in region.nodes:
        if node.target in REDUCTIONS and (op := str(node.args[1])):
            if loses_nan(op, edit.outputs(edit.operands(node)[0])[0].dtype):
                raise Unsound(node, f"reduces floats by {op}, in which a backend may lose a rank's NaN")
            if encoded - {op}:
                raise Unsound(node, f"reduces by {op} what is encoded for {' and '.join(sorted(encoded))}")


def _kept_dtype(node: fx.Node, dtype: torch.dtype, places: Collection[fx.Node]) -> torch.dtype:
    """Return the dtype that a move must keep: that of its operands, which are integers for encoded floats."""
    taken = {each.dtype for used in node.all_input_nodes if used not in places for each in edit.outputs(used)}
    if len(taken) > 1:
        raise Unsound(node, f"mixes {' and '.join(sorted(map(dtype_name, taken)))}")
    return taken.pop() if taken else dtype


def _degrees(source: Sharding, target: Sharding, mesh: Mesh) -> set[int]:
    """Return the numbers of ranks that a pending reduction may span: one axis, or several."""
    counts = {1}
    for axis in dict(source.partial) | dict(target.partial):
        counts |= {each * mesh.degree(axis) for each in counts}
    return counts - {1}


def _check_move(
    node: fx.Node, change: str, kept: torch.dtype, degrees: Collection[int], places: Collection[fx.Node]
) -> None:
    if not (_moves(node, degrees, places) if edit.outputs(node) else _makes_size(node)):
        raise Unsound(node, f"is in {change}, and a change moves and reduces values, and does nothing else")
    for value in edit.outputs(node):
        if value.dtype != kept:
            raise Unsound(node, f"makes {dtype_name(value.dtype)} in a change of {dtype_name(kept)}")
    if (number := _fixed_number(node)) is not None:
        raise Unsound(node, f"cuts a dim at {number}, which is no fixed part of it")


def _makes_size(node: fx.Node) -> bool:
    """Return True for a size, or a size plus, times or divided by another without remainder."""
    if node.target is operator.floordiv:
        size, divisor = (edit.fake(arg) if isinstance(arg, fx.Node) else arg for arg in node.args)
        return statically_equal(edit.fake(node) * divisor, size)
    return node.target in SIZES


def _moves(node: fx.Node, degrees: Collection[int], places: Collection[fx.Node]) -> bool:
    bound = edit.bound(node) if isinstance(node.target, OpOverload) else {}
    by_place = {aten.index_select.default: "index", aten.where.self: "condition"}.get(node.target)
    if by_place is not None:  # its result does not depend on values
        others = {each for name, each in bound.items() if name != by_place and isinstance(each, fx.Node)}
        return bound[by_place] in places and others.isdisjoint(places)
    if not set(edit.operands(node)).isdisjoint(places):
        return False
    if node.target in (*MOVES, *COLLECTIVES):
        return bool(bound.get("step", 1) == 1)
    if node.target is aten.div.Tensor:  # divides an average, or a sum
        return type(bound["other"]) is int and bound["other"] in degrees
    if node.target in FILLS:
        filled = bound.get("fill_value", 0)
        return "fill_value" not in bound or (type(filled) is int and filled in FILLS[node.target])
    return False


def _fixed_number(node: fx.Node) -> Any | None:
    """Return a position at which a node cuts a dynamic dim, if that is no fixed part of it such as all or a half."""
    if node.target not in ALONG:
        return None
    bound: Mapping[str, Any] = edit.bound(node)
    size = edit.outputs(edit.operands(node)[0])[0].shape[bound["dim"]]
    for name in ALONG[node.target]:
        given = bound[name] if isinstance(bound[name], (list, tuple)) else [bound[name]]
        for each in given:
            at = edit.fake(each) if isinstance(each, fx.Node) else each
            if isinstance(size, int):
                if isinstance(at, torch.SymInt):  # any function of sizes: checked at the sizes that are tried
                    return at
            elif isinstance(at, torch.Tensor):
                return "places of the rank's own"
            elif not _is_part(at, size, name):
                return at
    return None


def _is_part(at: Any, size: torch.SymInt, name: str) -> bool:
    if isinstance(at, int) or at is None:  # 0: a rank's empty share
        return at in {"start": (None, 0), "end": (None, 0, END), "split_sizes": (0,)}.get(name, ())
    return is_fixed_part(at, size)
