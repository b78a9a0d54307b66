"""Write into buffers where they are: a step that adds a token need not copy a whole cache out and back."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten, calls_others
from tpcompiler.runtime.place import memory_of

IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}
PRODUCTS = {aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default}


def write_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Change the ops whose result is copied into the very buffer that they took, if nothing else sees the old value.

    Nothing does if the op is the buffer's only reader, no other buffer has its memory, and no output shares it.
    """
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    held = {node: _tensor(module, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    times = Counter(memory_of(value) for value in held.values() if value is not None)
    for copied in graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, made = copied.args[:2]
        value = held.get(buffer)
        if (
            value is not None
            and times[memory_of(value)] == 1
            and made.target in IN_PLACE
            and made.args[0] is buffer
            and set(buffer.users) == {made, copied}
            and output not in (user for node in _in_its_memory(made) for user in node.users)
        ):
            made.target = IN_PLACE[made.target]
            copied.replace_all_uses_with(made)
            graph.erase_node(copied)
    module.recompile()
    return module


def _tensor(module: fx.GraphModule, name: str) -> torch.Tensor | None:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part)
    return found if isinstance(found, torch.Tensor) else None


def _in_its_memory(node: fx.Node) -> set[fx.Node]:
    """The node, and what may be a view of it, of a view of it, and so on."""
    found, left = {node}, [node]
    while left:
        for user in left.pop().users:
            if user not in found and user.op != "output" and not _is_fresh(user.target):
                found.add(user)
                left.append(user)
    return found


def _is_fresh(op: object) -> bool:
    """Whether what it makes is no view. An op that is made of others may give one, and its schema does not say so."""
    if not isinstance(op, OpOverload) or any(result.alias_info is not None for result in op._schema.returns):
        return False
    return op in PRODUCTS or not calls_others(op)
