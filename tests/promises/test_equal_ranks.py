"""What a program claims to be replicated is the same bits on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import fx
from torch.export import ExportedProgram

from tests.promises.models import NAMES, converted, inputs_of, ranks
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.judge.compare.simulate import simulate


def replicas(programs: Sequence[ExportedProgram], name: str) -> dict[str, list[torch.Tensor]]:
    """Every rank's value of each node that claims R, and of each output that is replicated."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(_: int, node: fx.Node, value: object) -> None:
        if isinstance(value, torch.Tensor) and read_claim(node).sharding == ["R"]:
            found.setdefault(read_claim(node).origin + " " + (read_claim(node).reshard or ""), []).append(value)

    results = simulate(programs, inputs_of(name, len(programs)), seen=keep)
    program = converted(name, len(programs))
    for position, output in enumerate(program.converted.resharded.output_names()):
        if placed_shardings(program.only.manifest)[f"output {output}"].is_replicated:
            found[f"output {output}"] = [result.outputs[position] for result in results]
    return found


def apart(found: dict[str, list[torch.Tensor]]) -> list[str]:
    """The values that are not the same bits, in the same order in memory, on all ranks."""
    return [
        name
        for name, (first, *rest) in found.items()
        if any(not torch.equal(first, other) or first.stride() != other.stride() for other in rest)
    ]


@pytest.mark.slow
@pytest.mark.sweep(5)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_replicas_are_the_same_bits(name: str, world: int) -> None:
    found = replicas(ranks(name, world), name)
    assert all(len(values) == world for values in found.values())
    outputs = [key for key in found if key.startswith("output")]
    assert 0 < len(outputs) < len(found)
    assert apart(found) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "weight", "first"), [("odd", "norm.weight", "layer_norm "), ("views", "", "output 0")]
)
def test_one_other_bit_on_one_rank_is_seen(name: str, weight: str, first: str) -> None:
    """Negative control, for a value inside and for an output.

    A collective hides what comes before it: its result is the same on all ranks whatever one of them put in.
    """
    one, other = ranks(name, 2)
    other = copy.deepcopy(other)
    if weight:
        value = other.state_dict[weight]
        value.data[0] = torch.nextafter(value.data[0], torch.tensor(9.0))
    else:
        for node in other.graph.nodes:
            if "wait_tensor" in str(node.target):
                with other.graph.inserting_after(node):
                    more = other.graph.call_function(torch.ops.aten.add.Scalar, (node, 1e-6))
                node.replace_all_uses_with(more, delete_user_cb=lambda user, more=more: user is not more)
    assert first in apart(replicas([one, other], name))
