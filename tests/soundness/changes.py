"""Changes of the graphs of sound artifacts, each of which the check finds by another of its questions."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx

from tests.trust.damage import Artifact, aten, claim, inserted, nodes, on, region
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim


@on("rows")
def a_body_that_does_not_say_of_what(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        del claim(node)["call"]


@on("images")
def a_collective_of_no_change(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        del claim(start)["reshard"]


@on("rows")
def a_call_of_no_op(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        claim(node)["call"]["op"] = "aten::no_such_op.default"


@on("rows")
def a_call_of_what_is_not_there(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        claim(node)["call"]["args"][1] = {"node": "elsewhere"}


@on("rows")
def a_call_that_makes_other_dims(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        claim(node)["call"] = {"op": "aten::relu.default", "args": [{"node": "p_table_weight"}], "kwargs": {}}


@on("rows")
def a_body_of_another_operand_than_its_call_s(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        claim(node)["call"]["args"][1] = {"node": _another(node.graph).name}


def _another(graph: fx.Graph) -> fx.Node:
    """Ids that are others, before all calls."""
    ids = next(node for node in graph.nodes if node.name == "ids")
    other = inserted(next(edit.calls(graph)), aten.mul.Tensor, (ids, 1), ids)
    other.meta["custom"] = {"tpcompiler": {"origin": "other", "sharding": ["R"]}}
    return other


@on("rows")
def a_body_of_another_operand_on_one_rank(a: Artifact) -> None:
    first = next(node for node in edit.calls(a.last.graph) if node.target is aten.sub.Tensor)
    first.update_arg(0, _another(a.last.graph))


@on("rows")
def a_call_that_does_not_run(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        claim(node)["call"]["args"].append(3.5)


@on("uneven")
def shares_of_another_size_out_of_a_change(a: Artifact) -> None:
    for node in nodes(a, "slice_1"):
        node.update_arg(3, 6)


@on("images")
def a_value_of_another_shape_than_claimed(a: Artifact) -> None:
    first = next(node for node in edit.calls(a.ranks[0].graph) if read_claim(node).sharding == ["S(1)"])
    for node in nodes(a, first.name):
        claim(node)["sharding"] = ["R"]


@on("images")
def a_value_that_does_not_lie_as_is_said(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        value = node.meta["val"]
        node.meta["val"] = torch.empty_strided(value.shape, value.stride()[::-1], device="meta")


@on("images")
def a_cast_that_the_claim_does_not_have(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        node.meta["val"] = node.meta["val"].double()


@on("images")
def an_op_without_a_rule(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        node.target, node.args = aten.rand_like.default, node.args


@on("images")
def an_op_that_needs_its_operand_whole(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        node.target, node.args = aten.cumsum.default, (node.args[0], 1)


@on("images")
def a_sum_that_is_read_before_it_is_made(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        operand = start.args[0]
        early = inserted(start, aten.relu.default, (operand,), operand)  # type: ignore[arg-type]
        claim(early)["origin"] = "early"
        start.replace_input_with(operand, early)  # type: ignore[arg-type]


@on("images")
def a_number_read_off_a_share(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        item = inserted(node, aten._local_scalar_dense.default, (node.args[0],), node)
        item.meta["val"] = 1.0


@on("attend")
def another_op_than_the_claim_s(a: Artifact) -> None:
    for node in nodes(a, "view"):
        claim(node)["call"]["op"] = "aten::expand.default"


@on("attend")
def another_operand_than_the_claim_s(a: Artifact) -> None:
    for node, other in zip(nodes(a, "view_2"), nodes(a, "getitem_1"), strict=True):
        node.update_arg(0, other)


@on("attend")
def a_size_of_a_view_that_is_not_the_share_s(a: Artifact) -> None:
    for node in nodes(a, "view"):
        sizes = list(node.args[1])  # type: ignore[call-overload]
        claim(node)["call"]["args"][1][3] = 8
        node.update_arg(1, sizes)


@on("attend")
def the_size_of_a_share(a: Artifact) -> None:
    for before in nodes(a, "relu"):
        size = inserted(before, aten.sym_size.int, (before.args[0], 2), before)
        size.meta = {"val": 6, "custom": {}}
        more = inserted(before, operator.add, (size, 1), size)
        more.meta = {"val": 7, "custom": {}}


@on("attend")
def the_size_of_a_share_times_too_much(a: Artifact) -> None:
    for before in nodes(a, "relu"):
        size = inserted(before, aten.sym_size.int, (before.args[0], 2), before)
        size.meta = {"val": 6, "custom": {}}
        more = inserted(before, operator.mul, (size, 3), size)
        more.meta = {"val": 18, "custom": {}}


@on("uneven")
def a_change_of_two_results(a: Artifact) -> None:
    for node in nodes(a, "linear_1"):
        inner = next(n for n in edit.calls(node.graph) if region(n) and n.target is aten.cat.default)
        node.update_arg(0, inner)


@on("rows")
def a_change_that_one_rank_does_not_have(a: Artifact) -> None:
    for node in edit.calls(a.last.graph):
        if region(node) == "reshard":
            claim(node)["reshard"] = "reshard_x"


@on("images")
def a_wait_for_what_is_no_collective(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        inserted(start, next(iter(start.users)).target, (start.args[0],), start)


@on("images")
def another_dtype_than_the_call_s(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        node.target, node.kwargs = aten._to_copy.default, {"dtype": torch.float64}
        node.meta["val"] = node.meta["val"].double()
        claim(node)["call"] = _call("aten::_to_copy.default", node, {"dtype": {"torch": "float32"}})


@on("images")
def another_op_than_the_call_s(a: Artifact) -> None:
    for node in (n for program in a.ranks for n in program.graph.nodes if n.target is aten.relu.default):
        node.target = aten.sigmoid.default
        claim(node)["call"] = _call("aten::relu.default", node, {})


@on("attend")
def another_number_than_the_call_s(a: Artifact) -> None:
    for node in nodes(a, "layer_norm"):
        claim(node)["call"] = _call("aten::layer_norm.default", node, {})
        node.update_arg(4, 1e-3)


def _call(op: str, node: fx.Node, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A claim of what the node calls."""
    args = [{"node": arg.name} if isinstance(arg, fx.Node) else arg for arg in node.args]
    return {"op": op, "args": args, "kwargs": kwargs}


@on("rows")
def a_look_up_in_a_share(a: Artifact) -> None:
    for node in nodes(a, "masked_fill"):
        placeholders = {n.name: n for n in node.graph.nodes if n.op == "placeholder"}
        operands = (placeholders["p_table_weight"], placeholders["ids"])
        plain = inserted(node, aten.embedding.default, operands, node)
        plain.meta["custom"] = {"tpcompiler": {"origin": "plain", "sharding": ["P(sum)"]}}


@on("images")
def a_sum_that_is_said_to_be_made(a: Artifact) -> None:
    for start in nodes(a, "all_reduce"):
        product = start.args[0]
        assert isinstance(product, fx.Node)
        again = inserted(start, product.target, product.args, product)
        claim(again).update(origin="again", sharding=["R"])


@on("choose")
def another_branch_on_one_rank(a: Artifact) -> None:
    body = copy.deepcopy(a.last.graph_module.true_graph_0)
    for node in body.graph.nodes:
        if node.target is aten.add.Tensor:
            node.update_arg(1, 2)
    a.last.graph_module.true_graph_0 = body


@on("choose")
def a_collective_in_a_branch(a: Artifact) -> None:
    for program in a.ranks:
        body = copy.deepcopy(program.graph_module.true_graph_0)
        (node,) = (n for n in body.graph.nodes if n.target is aten.sin.default)
        inserted(node, torch.ops._c10d_functional.all_reduce.default, (node.args[0], "sum", "tp=2:tp"), node)
        program.graph_module.true_graph_0 = body


@on("uneven")
def two_starts_of_one_size_in_the_other_order(a: Artifact) -> None:
    """Only the starts, and not the waits: the values would be each other's."""
    first, second = (n for n in a.last.graph.nodes if "all_gather" in str(n.target))
    needed = [second]
    while (operand := needed[-1].args[0]) is not None and isinstance(operand, (fx.Node, list, tuple)):
        node = operand if isinstance(operand, fx.Node) else operand[0]
        if node.op == "placeholder":
            break
        needed.append(node)
    for node in reversed([n for used in needed for n in (used, *_zeros(used))]):
        first.prepend(node)


def _zeros(node: fx.Node) -> list[fx.Node]:
    return [used for used in node.all_input_nodes if used.target is aten.new_zeros.default]
