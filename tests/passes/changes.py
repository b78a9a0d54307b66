"""A hand-made program of changes of sharding, one for every input, run on all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import fx
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from tests.passes.stages import with_numbers
from tpcompiler._torch import FakeTensorMode
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.path import WIRE
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import PLACEMENT, NodePlacement, Reshard, placement_of
from tpcompiler.ir.program import PlacedProgram, reshard
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut, join
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.passes.choose_paths import choose_paths
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lower_reshards

Pair = tuple[Sharding, Sharding]


def program_of(pairs: Sequence[Pair], mesh: Mesh, value: torch.Tensor, machine: Machine = WIRE) -> PlacedProgram:
    """`return reshard(x0), reshard(x1), ...`: values like this one, each with its change."""
    graph, mode = fx.Graph(), FakeTensorMode()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(pairs))]
    made = [graph.call_function(reshard, (x,), name=f"y{i}") for i, x in enumerate(inputs)]
    graph.output(tuple(made))
    for x, y, (source, target) in zip(inputs, made, pairs, strict=True):
        for node, sharding in ((x, source), (y, target)):
            node.meta["val"] = mode.from_tensor(value)
            node.meta[PLACEMENT] = NodePlacement((sharding,), (sharding,), "", "inherent")
        change = Reshard(y.name, source, target, "inherent", "")
        y.meta[PLACEMENT] = replace(placement_of(y), reshard=change)
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(name=x.name), None) for x in inputs],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=y.name), None) for y in made],
    )
    source_program: Any = SimpleNamespace(graph_signature=signature, state_dict={}, constants={})
    return choose_paths(PlacedProgram(source_program, graph, mesh, ()), machine)


def wrong_changes(pairs: Sequence[Pair], mesh: Mesh, value: torch.Tensor, machine: Machine = WIRE) -> list[str]:
    """The changes after which the ranks' shares, joined, are not the whole value, bit for bit."""
    program, ranks = program_of(pairs, mesh, value, machine), range(mesh.world_size)
    traces: dict[Any, Any] = {}
    runs = []
    for rank in ranks:
        local = with_numbers(localize_shapes(lower_reshards(program, (rank,), traces), {}))
        runs.append(SimpleNamespace(graph=local.graph, **vars(program.source)))
    shares = [[cut(value, source, mesh, rank) for source, _ in pairs] for rank in ranks]
    results = simulate(cast(Any, runs), shares)
    wrong = []
    for at, (source, target) in enumerate(pairs):
        try:
            wholes = join([result.outputs[at] for result in results], target, mesh, value.shape)
            same = all(torch.equal(whole, value) for whole in wholes)
        except ValueError as error:
            same = False
            print(error)
        if not same:
            wrong.append(f"{source.text(mesh)} -> {target.text(mesh)}")
    return wrong
