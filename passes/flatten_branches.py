"""Compute both branches of a `cond` that uses planned weights, and choose between their results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_body, has_bodies, is_cond
from tpcompiler.ir.leaf_values import computed_from_leaves
from tpcompiler.ir.local import fake_result, insert_call, no_new_guards
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import BOTH, UNCUT, CanonicalProgram
from tpcompiler.ir.sizes import are_equal
from tpcompiler.ir.text import value_text
from tpcompiler.passes.apply_plan import names_of
from tpcompiler.plan.plan import Plan, PlanEntry
from tpcompiler.rules.index_range import door_ranges
from tpcompiler.rules.speculation import obstacle


def flatten_branches(program: CanonicalProgram, plan: Plan, mesh: Mesh) -> CanonicalProgram:
    """Move both branches of a cond into the graph if the plan shards a weight that one of them uses.

    Before    c = cond(p, true_graph, false_graph, [x, w])      true_graph: linear(x, w); false_graph: neg(x)
              y = c[0]                                          plan: w: S(0)
    After     a = linear(x, w)
              b = neg(x)
              y = where(p, a, b)

    The result is the same for both values of the predicate, including NaN and infinities, and every rank runs the same
    collectives. It takes the time of both branches, which the report notes. So a cond without a planned weight stays,
    as does a cond with a branch that must not run unless chosen (`rules/speculation.py`): one that writes, draws,
    asserts, or may raise. Loops stay too. `meta[UNCUT]` holds the reason, for a later error.
    """
    calls = [node for node in edit.calls(program.graph) if has_bodies(node)]
    if mesh.world_size == 1 or not calls:
        return program
    graph = edit.copy_graph(program.graph)
    inserted, at_door = set[fx.Node](), door_ranges(program, {})
    with no_new_guards(graph):
        assigned = plan.assign(names_of(program))
        leaves = dict(CanonicalProgram(program.source, graph).leaves())
        planned = {node for node, fqn in leaves.items() if _is_cut(fqn, assigned)}
        control_flow = [node for node in edit.calls(graph) if has_bodies(node)]
        for node in control_flow:
            static = computed_from_leaves(graph, planned)
            planned_operands = [used for used in edit.operands(node) if used in static]
            if not planned_operands or not is_cond(node):
                continue
            branches = _Branches(node)
            if why := branches.obstacle(at_door):
                branches.drop()
                node.meta[UNCUT] = why
            else:
                largest = max(planned_operands, key=lambda used: edit.fake(used).numel())
                weight_name = leaves.get(largest, largest.name)
                branches.choose(f"the plan cuts '{weight_name}'")
                inserted.update(branches.nodes)
                control_flow += [inner for inner in branches.nodes if has_bodies(inner)]
    _name_layers(graph, leaves, inserted)
    return CanonicalProgram(program.source, graph)


def _is_cut(fqn: str, assigned: dict[str, PlanEntry]) -> bool:
    """Return True if an entry shards the leaf, or its layer."""
    for name in (fqn, weight_of(fqn), fqn.rpartition(".")[0], layer_of(fqn)):
        if name in assigned and assigned[name].style.places:
            spec = assigned[name].style.placement
            placements = spec.values() if isinstance(spec, Mapping) else [spec]
            return bool(assigned[name].style.cut) or not all(p is None or p.is_replicate() for p in placements)
    return False


class _Branches:
    """Both branches of a cond, inserted before the call; their results are not used yet."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.predicate, *bodies, operands = cast(Any, node.args)
        both = [copy_body(node, *pair, operands) for pair in zip(("true", "false"), bodies, strict=True)]
        copies, self.results = zip(*both, strict=True)
        self.counts, self.nodes = [*map(len, copies)], list(itertools.chain(*copies))
        for copy in self.nodes:
            self._fit(copy)

    def _fit(self, copy: fx.Node) -> None:
        """Compute a copy's value from its operands outside of the branch."""
        edit.inherit_meta(copy, self.node)
        if "unbacked_bindings" in copy.meta or not isinstance(copy.target, OpOverload):
            return
        if copy.target._schema.returns:
            edit.record(copy, fake_result(copy))

    def obstacle(self, at_door: Any) -> str:
        """Return why the branches cannot both be computed, or ""."""
        if not edit.is_tensor(self.predicate):
            return "its predicate is computed from sizes"
        if why := obstacle(self.nodes, at_door):
            return f"a branch {why}"
        for user in self.node.users:
            ends = [result[user.args[1]] for result in self.results]
            if not all(map(edit.is_tensor, ends)):
                return "its branches return what is no tensor"
            values = [edit.fake(end) for end in ends]
            if not _alike(*values):
                return f"its branches return {' and '.join(map(value_text, values))}"
        return ""

    def choose(self, why: str) -> None:
        """Make users of the call take the result that the predicate chooses."""
        if self.node.users:
            for target, args in _as_scalar(self.predicate):
                self.predicate = insert_call(self.node, target, (self.predicate, *args), f"{self.node.name}_predicate")
        note = f"'{self.node.name}' at {edit.source_line(self.node)}: {' + '.join(map(str, self.counts))} ops, as {why}"
        for user in list(self.node.users):
            index: Any = user.args[1]
            alternatives = [result[index] for result in self.results]
            selected = insert_call(
                self.node, aten.where.self, (self.predicate, *alternatives), f"{self.node.name}_chosen_{index}"
            )
            selected.meta[BOTH] = note
            if edit.fake(selected).stride() != edit.fake(user).stride() and edit.fake(user).is_contiguous():
                selected = insert_call(
                    self.node, aten.clone.default, (selected,), selected.name, memory_format=torch.contiguous_format
                )
            edit.replace_uses(user, selected)
            edit.erase(user)
        bodies: list[Any] = list(self.node.args[1:3])
        edit.erase(self.node)
        for body in bodies:
            if not body.users:
                edit.erase(body)

    def drop(self) -> None:
        """Remove the copies and leave the call as it was."""
        for node in reversed(self.nodes):
            edit.erase(node)


def _as_scalar(predicate: fx.Node) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the calls that turn a predicate of one element into a bool without dims."""
    if edit.fake(predicate).dtype != torch.bool:
        yield aten.ne.Scalar, (0,)
    if edit.ndim(predicate):
        yield aten.view.default, ([],)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device) == (other.dtype, other.device) and are_equal(one.shape, other.shape)


def _name_layers(graph: fx.Graph, leaves: dict[fx.Node, str], inserted: set[fx.Node]) -> None:
    """Put ops of branches, for which torch records no modules, in the layer whose weights they use."""
    layers = {leaf: {layer_of(fqn)} for leaf, fqn in leaves.items()}
    static = computed_from_leaves(graph, set(leaves))
    for node in edit.calls(graph):
        layers_used = set[str]().union(*(layers.get(each, ()) for each in node.all_input_nodes))
        if node in static:
            layers[node] = layers_used
        elif node in inserted and len(layers_used) == 1 and (layer := layers_used.pop()):
            stack = node.meta.get("nn_module_stack") or {}
            node.meta["nn_module_stack"] = {**stack, layer: (layer, "torch.nn.modules.module.Module")}
