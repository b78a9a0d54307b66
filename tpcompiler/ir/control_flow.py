"""Bodies of control flow (`torch.cond`, `while_loop`, `scan`, ...): graphs that one node of a graph calls.

A body is the `meta["val"]` of the `get_attr` node that names it. All its operands are replicated, so it is the same on
every rank and contains no collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import HigherOrderOperator
from tpcompiler.ir import edit

TAKEN = ("cond", "while_loop", "scan", "map_impl", "associative_scan", "flex_attention")


def has_bodies(node: fx.Node) -> bool:
    """Return True if the node calls control flow that every rank runs whole."""
    return isinstance(node.target, HigherOrderOperator) and str(node.target) in TAKEN


def is_cond(node: fx.Node) -> bool:
    """Return True if the node calls one of two bodies: `cond(predicate, true, false, operands)`."""
    return isinstance(node.target, HigherOrderOperator) and str(node.target) == "cond"


def read_bodies(graph: fx.Graph, root: torch.nn.Module) -> None:
    """Give every `get_attr` node the body that it names in `root`."""
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = functools.reduce(getattr, str(node.target).split("."), root)


def copy_with_bodies(module: fx.GraphModule) -> fx.Graph:
    """Return a copy of the module's graph whose `get_attr` nodes have the bodies that they name."""
    graph = edit.copy_graph(module.graph)
    read_bodies(graph, module)
    return graph


def copy_body(call: fx.Node, side: str, named: fx.Node, operands: Iterable[Any]) -> tuple[list[fx.Node], list[Any]]:
    """Insert the nodes of a body, named in a graph by `named`, before a call. Return them, and the body's results."""
    inputs, inserted, copies = iter(operands), list[fx.Node](), dict[fx.Node, Any]()
    for node in copy_with_bodies(edit.fake(named)).nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: copies[used])
        if node.op == "placeholder":
            copies[node] = next(inputs)
        elif node.op != "output":
            name = f"{call.name}_{side}_{node.name}"
            target = f"{name}_body" if node.op == "get_attr" else node.target
            with call.graph.inserting_before(call):
                copies[node] = call.graph.create_node(node.op, target, args, kwargs, name=name)
            copies[node].meta.update(node.meta)
            inserted.append(copies[node])
    return inserted, list(args[0])


def root_of(graph: fx.Graph) -> torch.nn.Module:
    """Return a module that holds only what the graph's `get_attr` nodes name, bodies and ops."""
    root = torch.nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), edit.fake(node))
    return root


def changed(body: fx.GraphModule, change: Callable[[fx.Node], None]) -> fx.GraphModule:
    """Return a copy of a body, and of the bodies in it, with `change` applied to every node."""
    graph = copy_with_bodies(body)
    change_bodies(graph, change)
    root = root_of(graph)
    for node in list(graph.nodes):
        change(node)
    copy = fx.GraphModule(root, graph)
    copy.meta = dict(body.meta)
    return copy


def change_bodies(graph: fx.Graph, change: Callable[[fx.Node], None]) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(edit.fake(node), fx.GraphModule):
            node.meta["val"] = changed(edit.fake(node), change)


def all_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the call nodes of the graph and of all bodies in it."""
    yield from edit.calls(graph)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(body := edit.fake(node), fx.GraphModule):
            yield from all_calls(copy_with_bodies(body))
