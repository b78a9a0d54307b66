"""Write into buffers in place: a step that adds a token need not copy a whole cache out and back."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, calls_others, declares_view, tree_flatten
from tpcompiler.runtime.place import memory_of

IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}
PRODUCTS = {aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default}


def write_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ops whose result is copied into the buffer that they read by their in-place versions.

    An op is replaced only if nothing sees the old value: it is the buffer's only reader and reads it as one operand, no
    other buffer shares the memory, and no output is a view of it.
    """
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    held = {node: attrgetter(str(node.target))(module) for node in graph.find_nodes(op="get_attr")}
    tensors = {node: value for node, value in held.items() if isinstance(value, torch.Tensor)}
    times = Counter(map(memory_of, tensors.values()))
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, write = copy.args[:2]
        value = tensors.get(buffer)
        if (
            value is not None
            and times[memory_of(value)] == 1
            and write.target in IN_PLACE
            and write.args[0] is buffer
            and set(buffer.users) == {write, copy}
            and sum(each is buffer for each in tree_flatten((write.args, write.kwargs))[0]) == 1
            and output not in (user for node in _in_its_memory(write) for user in node.users)
        ):
            write.target = IN_PLACE[write.target]
            copy.replace_all_uses_with(write)
            graph.erase_node(copy)
    module.recompile()
    return module


def _in_its_memory(node: fx.Node) -> set[fx.Node]:
    """Return the node and everything that may be a view of it, directly or through other views."""
    views, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user not in views and user.op != "output" and not _is_fresh(user.target):
                views.add(user)
                pending.append(user)
    return views


def _is_fresh(op: object) -> bool:
    """Return True if the op never returns a view. A composite op may return one without saying so in its schema."""
    return isinstance(op, OpOverload) and not declares_view(op) and (op in PRODUCTS or not calls_others(op))
