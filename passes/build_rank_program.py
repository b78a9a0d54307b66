"""Turn graph, signature and state of one rank into an ordinary exported program."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind

from tpcompiler._torch import aten, check_built, input_values, size_range, symbols_of, tree_flatten, tree_unflatten
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import change_bodies
from tpcompiler.ir.exported import add_constant, copy_signature, rebuilt
from tpcompiler.ir.local import KEY, fake_mode_of, insert_call
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, placement_of, write_claims
from tpcompiler.ir.program import DISPATCH, GLOBAL, PIN, ShardedProgram
from tpcompiler.ir.rank_numbers import name_rank_numbers, numbers_read
from tpcompiler.ir.shares import cut

Built = dict[Any, ExportedProgram]


def build_rank_program(
    program: ShardedProgram,
    built: Built,
    finish: Callable[[ExportedProgram], ExportedProgram] = lambda rank_program: rank_program,
) -> ExportedProgram:
    """Put the rank's graph and state behind the original calling convention.

    Before    graph with placements                  state: this rank's share
    After     ExportedProgram with the same inputs, outputs, FQNs, ranges and pytrees; each call node carries its claim
              (origin, sharding, reason, reshard) as plain data in meta["custom"], which torch.export.save keeps.
              The numbers of the rank are one more constant, which `rank_number` nodes read.

    Ranks that run one graph differ in their state: `built` caches the program of the first of them, after the passes
    that follow this one (`finish`).
    """
    if any(node.op == "get_attr" for node in program.graph.nodes):  # each rank has its own bodies of control flow
        return finish(_build(program))
    if program.graph not in built:
        built[program.graph] = finish(_build(program))
    first = built[program.graph]
    signature = copy_signature(first.graph_signature)
    constants, state = (_of_kind(signature, program, constant=constant) for constant in (True, False))
    rank_program = rebuilt(first, edit.copy_graph(first.graph), signature, {**first.constants, **constants}, state)
    rank_program.example_inputs = _local_examples(program)
    return rank_program


def _build(program: ShardedProgram) -> ExportedProgram:
    source = program.source
    graph = edit.copy_graph(program.graph)
    signature = copy_signature(source.graph_signature)
    if (name := name_rank_numbers(program)) in program.local_state:
        _read_numbers(graph, signature, program.local_state[name], name)
    values = list(graph.output_node().args[0])  # type: ignore[arg-type]
    for position, (spec, value) in enumerate(zip(signature.output_specs, values, strict=True)):
        if isinstance(value, fx.Node):
            arg = dataclasses.replace(spec.arg, name=value.name)
            signature.output_specs[position] = dataclasses.replace(spec, arg=arg)
    change_bodies(graph, _plain)
    write_claims(graph, program.mesh)
    for node in graph.nodes:
        _plain(node)
    symbols = symbols_of(node.meta.get("val") for node in graph.nodes)  # torch leaves some unused symbols
    mode = fake_mode_of(graph)
    ranges = {s: source.range_constraints[s] if s in source.range_constraints else size_range(mode, s) for s in symbols}
    # Leave out tensors that no input takes: torch keeps a tied or shared tensor under all its names.
    constants, state = (_of_kind(signature, program, constant=constant) for constant in (True, False))
    sizes = {s: ranges[s] for s in sorted(symbols, key=str)}
    rank_program = rebuilt(source, graph, signature, constants, state, sizes)
    rank_program.example_inputs = _local_examples(program)
    check_built(rank_program, shared=_shared_sizes(program))
    return rank_program


def _shared_sizes(program: ShardedProgram) -> list[Any]:
    """Return the sizes of the inputs' dims of which ranks have shares: the export's assertions are on whole inputs."""
    wholes = input_values(program.source)
    pairs = [(wholes[node.name], placement_of(node).shardings[0]) for node in program.user_inputs()]
    return [size for whole, sharding in pairs for size, cut in zip(whole.shape, sharding.dims, strict=True) if cut.axes]


def _read_numbers(graph: fx.Graph, signature: ExportGraphSignature, row: torch.Tensor, name: str) -> None:
    """Insert the rank numbers after the weights, and a look-up for every `rank_number`."""
    node = add_constant(graph, signature, name, row)
    if not (readers := numbers_read(graph)):
        return
    own = insert_call(readers[0], aten.select.int, (node, 0, 0), name)
    root = next((list(stack.items())[:1] for n in graph.nodes if (stack := n.meta.get("nn_module_stack"))), [])
    for index, each in enumerate(readers):
        each.target, each.args = aten.select.int, (own, 0, index)
        edit.record(each, edit.fake(own).select(0, 0))
    for each in (own, *readers):
        each.meta = {"val": edit.fake(each), PLACEMENT: NodePlacement(origin=name), "nn_module_stack": dict(root)}


def _plain(node: fx.Node) -> None:
    """Remove decisions about a node, and details that differ between processes."""
    # torch's from_node holds memory addresses
    for name in (PLACEMENT, PIN, GLOBAL, DISPATCH, KEY, "from_node"):
        node.meta.pop(name, None)
    if trace := node.meta.get("stack_trace"):  # torch counts the graphs that a process has run
        node.meta["stack_trace"] = re.sub(r"(<eval_with_key>)\.\d+", r"\1", trace)


def _of_kind(signature: ExportGraphSignature, program: ShardedProgram, constant: bool) -> dict[str, torch.Tensor]:
    out = {}
    for spec in signature.input_specs:
        if spec.target is not None and spec.target in program.local_state:
            is_constant = spec.kind is InputKind.CONSTANT_TENSOR or spec.persistent is False
            if is_constant == constant:
                out[spec.target] = program.local_state[spec.target]
    return out


def _local_examples(program: ShardedProgram) -> Any:
    """Return the rank's part of the export's example inputs; None if a dynamic dim has no even parts there."""
    examples = program.source.example_inputs
    inputs = [(edit.fake(node), placement_of(node).shardings[0]) for node in program.user_inputs()]
    if examples is None or all(sharding.is_replicated for _, sharding in inputs):
        return examples
    flat, spec = tree_flatten(examples)
    feed = iter(inputs)
    own = []
    for value in flat:
        if isinstance(value, torch.Tensor):
            local, sharding = next(feed)
            for dim, by in enumerate(sharding.dims):
                pieces = program.mesh.size(by.axes)
                if not isinstance(local.shape[dim], int) and value.shape[dim] % pieces:
                    return None
            value = cut(value, sharding, program.mesh, program.rank)
        own.append(value)
    return tree_unflatten(own, spec)
