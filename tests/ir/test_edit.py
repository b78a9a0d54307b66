"""The few ways in which graphs are read and changed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from tpcompiler.ir import edit

aten = torch.ops.aten


def graph_of(*shapes: tuple[int, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    nodes = []
    for at, shape in enumerate(shapes):
        node = graph.placeholder(f"x{at}")
        node.meta["val"] = torch.zeros(shape)
        nodes.append(node)
    return graph, nodes


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    return node


def test_operands_repeat_and_stand_in_lists_and_keywords() -> None:
    graph, (a, b) = graph_of((2,), (2,))
    size = graph.placeholder("size")
    size.meta["val"] = 2
    assert edit.operands(call(graph, aten.mul.Tensor, a, a)) == [a, a]
    assert edit.operands(call(graph, aten.cat.default, [a, b, a], 0)) == [a, b, a]
    assert edit.operands(call(graph, aten.linear.default, a, b, bias=a)) == [a, b, a]
    assert edit.operands(call(graph, aten.clamp.Tensor, a, None, b)) == [a, b]
    assert edit.operands(call(graph, aten.view.default, a, [size, 1])) == [a]


def test_one_of_two_equal_operands_is_replaced() -> None:
    graph, (a, b) = graph_of((2,), (2,))
    node = call(graph, aten.cat.default, [a, a], 0)
    args, kwargs = edit.map_operands(node, lambda index, old: b if index == 1 else old)
    assert (args, kwargs) == (([a, b], 0), {})


def test_outputs() -> None:
    graph, (a,) = graph_of((4,))
    node = call(graph, aten.split.Tensor, a, 2)
    node.meta["val"] = [torch.zeros(2), None, torch.zeros(2)]
    assert [list(value.shape) for value in edit.outputs(node)] == [[2], [2]]
    node.meta["val"] = 3
    assert edit.outputs(node) == ()


def test_arguments_by_name() -> None:
    graph, (a,) = graph_of((4, 2))
    node = call(graph, aten.sum.dim_IntList, a, [0], keepdim=True)
    assert edit.bound(node) == {"self": a, "dim": [0], "keepdim": True, "dtype": None}
    edit.set_argument(node, "dim", [1])
    edit.set_argument(node, "keepdim", False)
    assert (node.args, node.kwargs) == ((a, [1]), {"keepdim": False})


def test_a_copy_keeps_names_and_has_meta_of_its_own() -> None:
    graph = fx.Graph()
    node = graph.placeholder("input")  # a name that fx would change
    node.name = "input"
    node.meta["kept"] = "before"
    graph.output((node,))
    copy = edit.copy_graph(graph)
    (twin, _) = copy.nodes
    assert twin.name == "input"
    twin.meta["kept"] = "after"
    assert node.meta["kept"] == "before"


def test_what_is_inserted_serves_a_node() -> None:
    graph, (a, _) = graph_of((2,), (2,))
    a.meta.update(stack_trace="where", nn_module_stack={"k": ("layer", None)}, val=torch.zeros(2))
    first = edit.insert_after(a, aten.neg.default, (a,), "first")
    assert [node.name for node in graph.nodes] == ["x0", "x1", "first"], "placeholders stay together"
    before = edit.insert_before(first, aten.neg.default, (a,), "before")
    assert [node.name for node in graph.nodes] == ["x0", "x1", "before", "first"]
    assert before.meta == {"stack_trace": "where", "nn_module_stack": {"k": ("layer", None)}}


def test_uses_move_but_for_those_kept() -> None:
    graph, (a,) = graph_of((2,))
    one, two = call(graph, aten.neg.default, a), call(graph, aten.neg.default, a)
    new = call(graph, aten.abs.default, a)
    edit.replace_uses(a, new, keep=[new, two])
    assert (one.args, two.args, new.args) == ((new,), (a,), (a,))


@pytest.mark.parametrize("through", [True, False])
def test_graft(through: bool) -> None:
    """The body may also hand its input through."""
    graph, (a,) = graph_of((2,))
    node = call(graph, aten.neg.default, a)
    graph.output((node,))
    body = fx.Graph()
    x = body.placeholder("x")
    inner = x if through else body.call_function(aten.abs.default, (x,))
    inner.meta["val"] = torch.zeros(2)
    body.output(inner)
    made = edit.graft(node, body, [a], {"mark": 1})
    assert [str(n.target) for n in made] == ([] if through else ["aten.abs.default"])
    assert all(n.meta["mark"] == 1 for n in made)
    assert graph.output_node().args == ((made[-1] if made else a,),)


def test_graft_of_several_outputs() -> None:
    """The body's outputs stand in for the node's users, which take it apart."""
    graph, (a,) = graph_of((2,))
    node = call(graph, aten.frexp.Tensor, a)
    parts = [graph.call_function(operator.getitem, (node, 1)), graph.call_function(operator.getitem, (node, 0))]
    graph.output(tuple(parts))
    body = fx.Graph()
    x = body.placeholder("x")
    body.output([body.call_function(target, (x,)) for target in (aten.abs.default, aten.neg.default)])
    made = edit.graft(node, body, [a], {})
    assert [n.target for n in made] == [aten.abs.default, aten.neg.default]
    assert list(graph.nodes) == [a, *made, graph.output_node()]
    assert graph.output_node().args == (tuple(made),)


def test_rewrite_keeps_the_names_of_values() -> None:
    """One value, or each of several; what the body hands through has a name already."""
    graph, (a,) = graph_of((2,))
    one = call(graph, aten.neg.default, a)
    both = graph.call_function(aten.frexp.Tensor, (one,))
    parts = [graph.call_function(operator.getitem, (both, 1)), graph.call_function(operator.getitem, (both, 0))]
    graph.output(tuple(parts))
    names = [node.name for node in (one, *parts)]
    body = fx.Graph()
    x = body.placeholder("x")
    body.output(body.call_function(aten.abs.default, (body.call_function(aten.abs.default, (x,)),)))
    assert edit.rewrite(one, body, [a])[-1].name == names[0]
    body = fx.Graph()
    x = body.placeholder("x")
    body.output([body.call_function(aten.exp.default, (x,)), x])
    (made,) = edit.rewrite(both, body, both.all_input_nodes)
    assert [node.name for node in graph.output_node().all_input_nodes] == [names[1], names[0]]
    assert made.name == names[1]


TRACE = """
  File "/home/me/model.py", line 31, in forward
    x = self.up(x)
  File "/venv/lib/torch/nn/modules/linear.py", line 130, in forward
    return F.linear(input, self.weight, self.bias)
"""


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (TRACE, "model.py:31, in forward"),
        ('  File "/a/torch/x.py", line 3, in f\n', "x.py:3, in f"),
        ('  File "<eval_with_key>.7", line 9, in forward\n', ""),
        ("", ""),
        (None, ""),
        ('File "a"', ""),
        ("File , , ,\n" * 3, ""),
        (" " * 100_000 + "File", ""),
    ],
)
def test_source_lines(trace: str | None, line: str) -> None:
    (a,) = graph_of((2,))[1]
    a.meta["stack_trace"] = trace
    assert edit.source_line(a) == line


def test_module_paths() -> None:
    (a,) = graph_of((2,))[1]
    assert edit.module_path(a) == ""
    a.meta["nn_module_stack"] = {"": ("", None), "a": ("layers.0", None), "b": ("layers.0.up", None)}
    assert edit.module_paths(a) == ["layers.0", "layers.0.up"]
    assert edit.module_path(a) == "layers.0.up"
