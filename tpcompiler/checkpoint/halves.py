"""Forward and backward of a rank's program as two calls; the backward also without the sums of gradients."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tpcompiler._torch import (
    GRADIENT_KINDS,
    LEAF_KINDS,
    RETURNED_KINDS,
    WRITTEN_KINDS,
    Recompute,
    aten,
    boxed,
    cut_joint,
    read_failed_guard,
    sym_hint,
)
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.backward import starts_backward
from tpcompiler.ir.buckets import ALL_REDUCE, BUCKET
from tpcompiler.ir.control_flow import copy_with_bodies, root_of
from tpcompiler.ir.draws import draws
from tpcompiler.ir.node_placement import claims_of, nodes_named
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.runtime.inputs import flatten_inputs, refuse_excluded


class Halves:
    """A rank's program, cut into its forward and its backward.

    Attributes:
        names: the parameters that have a gradient, in the order of the backward's results.
        saved_names: the values that the forward leaves to the backward; of leaves and inputs as users know them.
        collectives: the ops and groups of both halves, in order, which must be those of all ranks.
        saved_bytes: bytes that the forward leaves to the backward, without parameters, buffers and inputs.
    """

    def __init__(self, program: ExportedProgram, recompute: Recompute) -> None:
        """Cut the program.

        Raises:
            ArtifactError: the gradient of the loss, from which the backward starts, is not found.
        """
        self.program = program
        signature, graph = program.graph_signature, copy_with_bodies(program.graph_module)
        _use_operands(graph)
        output = graph.output_node()
        values: Any = output.args[0]
        self.kinds = [spec.kind for spec in signature.output_specs]
        self.names = [str(s.target) for s in signature.output_specs if s.kind is OutputKind.GRADIENT_TO_PARAMETER]
        own, gradients = (
            [value for value, kind in zip(values, self.kinds, strict=True) if (kind in GRADIENT_KINDS) is wanted]
            for wanted in (False, True)
        )
        self.count = len(own)
        held = {*edit.nodes_behind(own)}
        tangent = _find_tangent(graph, held)
        own += [value for value in _draws_of_forward(graph, tangent) if not held & {value, *value.all_input_nodes}]
        output.args = ((*own, *gradients),)
        forward = {*edit.nodes_behind(own)}
        forward |= {each for node in forward for each in node.users if each.target is operator.getitem}
        free = [at for at, spec in enumerate(signature.input_specs) if spec.kind in LEAF_KINDS]
        self.forward, self.backward = cut_joint(root_of(graph), graph, forward, tangent, len(own), free, recompute)
        self.collectives = [
            [(str(node.target), str(node.args[-1])) for node in half.graph.nodes if edit.is_collective(node)]
            for half in (self.forward, self.backward)
        ]
        self.first_saved = len(own)
        results: Any = self.forward.graph.output_node().args[0]
        placeholders = self.forward.graph.find_nodes(op="placeholder")
        names = {
            node.name: str(spec.target or spec.arg.name)
            for node, spec in zip(placeholders, signature.input_specs, strict=True)
        }
        self.saved_names = [names.get(value.name, value.name) for value in results[self.first_saved :]]
        saved = [value for value in results[self.first_saved :] if edit.is_tensor(value) and value.op != "placeholder"]
        self.saved_bytes = sum(sym_hint(edit.fake(v).numel()) * edit.fake(v).element_size() for v in saved)

    def run_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the outputs, and under "saved" what the backward takes."""
        flat, program = flatten_inputs(self.program, args, kwargs), self.program
        if guards := getattr(module, "_guards_fn", None):
            try:
                guards(*flat)
            except AssertionError as error:
                refuse_excluded(read_failed_guard(error))
                raise
        tensors = {**program.constants, **_tensors(module)}
        feed = iter(flat)
        given = [
            next(feed) if spec.kind is InputKind.USER_INPUT else tensors[str(spec.target)]
            for spec in program.graph_signature.input_specs
        ]
        by_name = {spec.arg.name: value for spec, value in zip(program.graph_signature.input_specs, given, strict=True)}
        results = self.forward(list(given))
        outputs, saved = list(results[: self.count]), list(results[self.first_saved :])
        specs = [spec for spec in program.graph_signature.output_specs if spec.kind not in GRADIENT_KINDS]
        targets = {
            at: tensors[str(spec.target)] if spec.kind is OutputKind.BUFFER_MUTATION else by_name[str(spec.target)]
            for at, spec in enumerate(specs)
            if spec.kind in WRITTEN_KINDS
        }
        memory = {_memory(target) for target in targets.values()}
        kept = [v.clone() if isinstance(v, torch.Tensor) and _memory(v) in memory else v for v in saved]
        for at, target in targets.items():
            target.copy_(outputs[at])
        returned = [v for v, spec in zip(outputs, specs, strict=True) if spec.kind in RETURNED_KINDS]
        return {"outputs": returned, "saved": kept}

    @functools.cached_property
    def last_sums(self) -> dict[str, str]:
        """The group of the sum over ranks that ends the gradient of a parameter; not of sums that also cut it."""
        values: Any = self.backward.graph.output_node().args[0]
        found = {name: made for name, value in zip(self.names, values, strict=False) if (made := _last_sum(value))}
        waits = set(found.values())
        return {
            name: str(edit.started(wait).args[-1])
            for name, wait in found.items()
            if waits.issuperset(edit.waits_of(edit.started(wait)))  # a bucket is left out as a whole
        }

    def without_sums(self, sizes: Mapping[str, int]) -> fx.GraphModule:
        """Return the backward with the operands of the last sums of some gradients, times the size of the group.

        The mean of these over the ranks is the gradient, and so is the mean of a gradient that is summed already.
        """
        copies: dict[fx.Node, fx.Node] = {}
        values: Any = self.backward.graph.output_node().args[0]
        waits = {_last_sum(values[at]): sizes[name] for at, name in enumerate(self.names) if name in sizes}
        left_out = {part for wait in waits if wait for part in (*wait.all_input_nodes, edit.started(wait))}
        graph = fx.Graph()
        for node in self.backward.graph.nodes:
            if node in waits:
                copies[node] = graph.call_function(aten.mul.Tensor, (copies[_operand(node)], waits[node]))
            elif node not in left_out:
                copies[node] = graph.node_copy(node, lambda used: copies[used])
        return boxed(self.backward, graph)


def _use_operands(graph: fx.Graph) -> None:
    """Make empty shares depend on all operands of their op, and so on collectives that other ranks call for these.

    A rank that makes an empty share without the op would have such a collective in its backward, or in no half.
    """
    at = {node: position for position, node in enumerate(graph.nodes)}
    named = {node.name: node for node in at}
    for node, claim in list(claims_of(graph)):
        sizes = edit.shape(node) if edit.is_tensor(node) else ()
        if claim.call is None or not any(isinstance(size, int) and not size for size in sizes):
            continue
        others = [named[name] for name in sorted(nodes_named(claim.call)) if name in named]
        others = [each for each in others if edit.is_tensor(each) and at[each] < at[node]]
        if others := [each for each in others if each not in node.all_input_nodes]:
            users = list(node.users)
            with graph.inserting_after(node):
                joined = graph.call_function(aten.cat.default, ([node],))
            joined.meta = {"val": node.meta["val"]}
            with graph.inserting_before(joined):
                nothing = [graph.call_function(aten.new_zeros.default, (each, [0])) for each in others]
            for each in nothing:
                each.kwargs = {"dtype": edit.fake(node).dtype}
                each.meta = {"val": edit.fake(node).new_zeros([0])}
            joined.args = ([node, *nothing],)  # a tensor [0] adds nothing to one of any shape
            for user in users:
                user.replace_input_with(node, joined)


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in named}


def _draws_of_forward(graph: fx.Graph, tangent: fx.Node) -> list[fx.Node]:
    """Return the tensors that are drawn before the first call that depends on the gradient of the loss.

    Nothing in the forward may use them, but the draws after them need the state of the generator.
    """
    found, behind = list[fx.Node](), {tangent}
    for node in list(edit.calls(graph)):
        if node is not tangent and behind.intersection(node.all_input_nodes):
            return found
        if draws(node) and not isinstance(node.meta["val"], torch.Tensor):
            with graph.inserting_after(node):
                node = graph.call_function(operator.getitem, (node, 0))
            (drawing,) = node.all_input_nodes
            node.meta = {**drawing.meta, "val": drawing.meta["val"][0]}
            found.append(node)
        elif draws(node):
            found.append(node)
    return found


def _find_tangent(graph: fx.Graph, forward: set[fx.Node]) -> fx.Node:
    """Return the gradient of the loss by itself: of the ones that only gradients need, that which most of them need.

    A gradient may be constant, and a backward may use other ones.
    """
    ones = [node for node in edit.calls(graph) if starts_backward(node)]
    needs: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        needs[node] = {each for operand in node.all_input_nodes for each in needs[operand]}
        if node in ones and node not in forward:
            needs[node].add(node)
    gradients: Any = graph.output_node().args[0]
    counts = Counter(each for value in gradients if edit.is_tensor(value) for each in ones if each in needs[value])
    for node in sorted(counts, key=lambda each: counts[each], reverse=True)[:1]:
        return node
    raise ArtifactError(
        "the backward does not start from the gradient of the loss",
        help="export the model by tpcompiler.export_training",
    )


def _last_sum(value: fx.Node) -> fx.Node | None:
    """Return the wait for the sum over ranks that ends a gradient, apart from views and casts of all of it."""
    node = value
    while len(node.users) == 1 and len(node.all_input_nodes) == 1 and not edit.is_wait(node):
        (node,) = node.all_input_nodes
    if not edit.is_wait(node) or len(node.users) != 1:
        return None
    start = edit.started(node)
    if start.target not in (ALL_REDUCE, BUCKET) or start.args[1] != "sum":
        return None
    is_whole = statically_equal(edit.fake(_operand(node)).numel(), edit.fake(value).numel())
    return node if is_whole else None


def _operand(wait: fx.Node) -> fx.Node:
    """Return what the sum adds of which a node is the wait."""
    (part,), (operands, *_) = wait.all_input_nodes, edit.started(wait).args
    return operands[part.args[1]] if isinstance(operands, list | tuple) else operands  # type: ignore[index,return-value]
