"""Cut a joint graph into forward and backward by torch's partitioners, which choose what is saved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import torch
from torch import fx
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy

Recompute = Literal["min-cut", "all", "none"]


def cut_joint(
    root: torch.nn.Module,
    graph: fx.Graph,
    forward: Collection[fx.Node],
    tangent: fx.Node,
    outputs: int,
    free: Collection[int],
    recompute: Recompute,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward, of the placeholders, and the backward, of what is saved and of the tangent.

    Each takes its arguments as a list, which it empties, so that a value ends with its last use. The forward's results
    are the `outputs` first ones of the graph, then what the backward takes.

    Args:
        root: holds the bodies of control flow.
        forward: the calls that the first `outputs` results need; no collective is called by both halves.
        tangent: the call that makes the gradient of the loss, of which the others are computed.
        free: positions of the placeholders that live longer than a call.
    """
    joint, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    held = graph.find_nodes(op="placeholder")
    for at, node in enumerate(held):
        copies[node] = joint.placeholder(f"primals_{at}")
    copies[tangent] = joint.placeholder("tangents_0")
    fixed = set(_fixed(graph, {held[at] for at in free}))
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output") and node is not tangent]
    for node in sorted(calls, key=lambda node: node not in forward):
        copies[node] = joint.node_copy(node, lambda used: copies[used])
        if node in forward:
            copies[node].meta["partitioner_tag"] = "is_forward"
        elif _is_collective(node):
            copies[node].meta["partitioner_tag"] = "must_be_in_backward"
        if recompute == "all" and node in forward and node not in fixed:
            copies[node].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for node in (*held, tangent):
        copies[node].meta = dict(node.meta)
    joint.output(fx.node.map_arg(graph.output_node().args[0], lambda used: copies[used]))
    module = fx.GraphModule(root, joint)
    given = [copies[node].meta.get("val") for node in (*held, tangent)]
    # only who trains needs it
    from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

    cut: Any = default_partition if recompute == "none" else min_cut_rematerialization_partition
    with config.patch(cse=False):  # it would gather a parameter once for both halves, and hold it in between
        halves = cut(module, given, num_fwd_outputs=outputs, static_lifetime_input_indices=list(free))
    names = {copies[node].name for node in forward if node in copies}
    _drop_unused(halves[0].graph, lambda node: node.name in names)
    _drop_unused(halves[1].graph, lambda node: node.name not in names)
    first, second = (boxed(half, half.graph) for half in halves)
    return first, second


def boxed(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module that takes its arguments as a list, which it empties."""
    from torch.fx.graph import _BoxedCodeGen  # only who trains needs it

    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root, graph)


def _fixed(graph: fx.Graph, leaves: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield calls whose results are saved in any case: collectives, draws, and ops on parameters that are gathered.

    To recompute the last, whole parameters would have to be saved.
    """
    whole = dict.fromkeys(leaves, False)  # what is made of leaves alone: True if by a collective
    fixed = set[fx.Node]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target, used = node.target, node.all_input_nodes
        takes_gathered = any(whole.get(each, False) for each in used)
        if used and all(each in whole for each in used):
            whole[node] = _is_collective(node) or takes_gathered
        is_part = target is operator.getitem and used[0] in fixed
        draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if _is_collective(node) or draws or takes_gathered or is_part:
            fixed.add(node)
            yield node


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _drop_unused(graph: fx.Graph, is_own: Callable[[fx.Node], bool]) -> None:
    """Remove collectives that nothing uses, of which fx keeps a wait, and draws that are the other half's."""

    def must_stay(node: fx.Node) -> bool:
        is_unused = node.op == "call_function" and (_is_collective(node) or not is_own(node))
        return not is_unused and node.is_impure()

    graph.eliminate_dead_code(must_stay)
