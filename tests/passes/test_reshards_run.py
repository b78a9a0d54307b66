"""What reshards become, run on all ranks: every change of placements keeps the value."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.passes.stages import Call, Given, routed, with_numbers
from tpcompiler.artifact.collective_records import transfer_of
from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir import edit
from tpcompiler.ir.program import LoweredProgram, PlacedProgram
from tpcompiler.ir.shares import cut, join, read_sharding
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.passes.localize_shapes import localize_shapes
from tpcompiler.passes.lower_reshards import lower_reshards

CHANGE = Call(lambda self, x: x)
KINDS = ("R", "S(0)", "S(1)", "S(2)", "P(sum)", "P(avg)", "P(max)", "P(min)", "P(product)")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("degree", [3, 2])
def test_every_change_keeps_the_value(degree: int) -> None:
    """Even, uneven and empty shards: six values of this shape go through all pairs of placements in one program."""
    pairs: list[tuple[str, str]] = [(a, b) for a in KINDS for b in KINDS if a != b]
    value = torch.randn(4, 5, 3)
    module = Call(lambda self, xs: tuple(xs))
    inputs: Given = [a for a, _ in pairs]
    program = routed(
        module, ([value + i for i in range(len(pairs))],), degree=degree, inputs=inputs, outputs=[b for _, b in pairs]
    )
    results = simulate(*_all_ranks(program, [value + i for i in range(len(pairs))]))
    for at, (source, target) in enumerate(pairs):
        made = program.output.args[0][at].meta["tpcompiler_placement"].shardings[0]  # type: ignore[index]
        for whole in join([r.outputs[at] for r in results], made, program.mesh, value.shape):
            torch.testing.assert_close(whole, value + at, msg=lambda m, s=source, t=target: f"{s} -> {t}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 3, [2, 1]], ids=str)
def test_a_change_sends_what_the_search_pays_for(degree: int | list[int]) -> None:
    """Even, uneven and empty shards, blocks, and dims of which a part stays whole on every rank."""
    kinds = ("R", "S(0)", "S(1)", "P(sum)", "S(1, parts 3 2r)", "S(1, parts 2r 3)", "S(0, block 2)")
    shape, differs = (4, 5, 3), []
    for source, target in itertools.permutations(kinds, 2):
        program = routed(CHANGE, (torch.randn(shape),), degree=degree, inputs=[source], outputs=[target])
        calls = edit.calls(localize_shapes(lower_reshards(program, (0,), {}), {}).graph)
        sent = sum(transfer_of(call, program.mesh).wire_bytes for call in calls if edit.is_collective(call))
        ends = (read_sharding(text, program.mesh, len(shape)) for text in (source, target))
        paid = reshard_wire_bytes(*ends, shape, 4, program.mesh)
        differs += [f"{source} -> {target}: sends {sent} bytes, priced as {paid}"] if sent != paid else []
    assert differs == []


def _all_ranks(program: PlacedProgram, values: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    traces: dict[Any, Any] = {}
    ranks = range(program.mesh.world_size)
    graphs = [localize_shapes(lower_reshards(program, (rank,), traces), {}) for rank in ranks]
    places = [node.meta["tpcompiler_placement"].shardings[0] for node in program.user_inputs()]
    shares = [[cut(v, at, program.mesh, rank) for v, at in zip(values, places, strict=True)] for rank in ranks]
    return [Runnable(with_numbers(graph)) for graph in graphs], shares


class Runnable:
    """As much of an exported program as `simulate` reads."""

    def __init__(self, program: LoweredProgram) -> None:
        self.graph = program.graph
        self.graph_signature = program.source.graph_signature
        self.state_dict = program.source.state_dict
        self.constants = program.source.constants
