"""Graph, signature and state of one rank are an ordinary exported program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim, ExportedProgram

import tpcompiler
from tests.passes.models import MEGATRON, Mlp
from tests.passes.stages import Call, local, sharded
from tpcompiler.ir.node_placement import claim_data, read_claim
from tpcompiler.passes.build_rank_program import build_rank_program

X = torch.randn(2, 4)


def built(*args: Any, **kwargs: Any) -> ExportedProgram:
    return build_rank_program(sharded(local(*args, **kwargs), kwargs.get("rank", 0)), {})


def test_names_of_the_original() -> None:
    def forward(self: Any, x: torch.Tensor, flag: bool) -> dict[str, Any]:
        self.steps.add_(1)
        return {"h": self.up(x), "flag": flag}

    last = sharded(local(Call(forward, up=nn.Linear(4, 6), steps=torch.zeros(())), (X, True), {"up": "colwise"}), 0)
    program, original = build_rank_program(last, {}), last.source
    assert [spec.arg.name for spec in program.graph_signature.input_specs] == [
        spec.arg.name for spec in original.graph_signature.input_specs
    ]
    assert program.graph_signature.buffers_to_mutate == {"add": "steps"}
    assert program.call_spec.in_spec == original.call_spec.in_spec
    assert program.call_spec.out_spec == original.call_spec.out_spec
    assert list(program.state_dict) == ["up.weight", "up.bias", "steps"]
    assert program.example_inputs is not None


def test_claims() -> None:
    """What a node is a share of, how, and why: plain data that is written with the program."""
    program = built(Mlp(), (X,), MEGATRON)
    lines = (
        f"{node.name}: {claim_data(read_claim(node))}" for node in program.graph.nodes if node.op == "call_function"
    )
    assert_expected_inline(
        "".join(f"{line}\n" for line in lines),
        """\
linear: {'origin': 'linear', 'sharding': ['S(1)'], 'reason': 'n is cut by tp, asked by the plan ("**.up": "colwise")'}
relu: {'origin': 'relu', 'sharding': ['S(1)'], 'reason': 'd1 is cut by tp'}
linear_1: {'origin': 'linear_1', 'sharding': ['P(sum)'], 'reason': 'k is cut by tp, asked by the plan ("**.down": "rowwise")'}
all_reduce: {'origin': 'linear_1', 'reshard': 'reshard', 'change': 'P(sum) -> R', 'why': 'inherent', 'reshard_reason': "each rank has a partial sum of 'linear_1'"}
wait_tensor: {'origin': 'linear_1', 'sharding': ['R'], 'reason': "each rank has a partial sum of 'linear_1'", 'reshard': 'reshard', 'change': 'P(sum) -> R', 'why': 'inherent', 'reshard_reason': "each rank has a partial sum of 'linear_1'"}
add: {'origin': 'add', 'sharding': ['R'], 'reason': 'operands are replicated'}
""",
    )


def test_nothing_of_the_compiler_is_left_on_nodes() -> None:
    program = built(Mlp(), (X,), MEGATRON)
    assert not [key for node in program.graph.nodes for key in node.meta if key.startswith("tpcompiler")]


class Shared(nn.Module):
    """Layers that share a tensor which is no buffer."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


def test_a_tensor_that_layers_share(tmp_path: Path) -> None:
    """torch keeps it under each of its names, and takes one."""
    scale, x = torch.randn(8), torch.randn(4, 8)
    exported = torch.export.export(nn.Sequential(Shared(scale), Shared(scale)), (x,))
    assert len(exported.constants) == 2
    made = tpcompiler.parallelize(exported, 2, {"*.up": "colwise", "*.down": "rowwise"})
    made.save(tmp_path / "out")
    assert len(torch.export.load(tmp_path / "out" / "rank_0.pt2").constants) == 1
    assert made.verify((x,)).ok


def _halves(_: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.unflatten(0, (-1, 2)).sum(1) + y, x * 2


HALF = Dim("half", min=2, max=64)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (Call(lambda self, x, y: (x + self.w, y * 2), w=(8, 6)), ({0: Dim.AUTO}, {0: Dim.AUTO})),
        (Call(_halves), ({0: 2 * HALF}, {0: HALF})),
    ],
    ids=["one number", "derived"],
)
def test_what_the_export_asserts_of_whole_inputs_is_not_asserted_of_shares(model: nn.Module, shapes: Any) -> None:
    args = torch.randn(8, 6), torch.randn(4, 6)
    exported = torch.export.export(model, args, dynamic_shapes=shapes)
    made = tpcompiler.parallelize(exported, 2, {}, inputs=["S(0)", None])
    assert made.verify(args).ok
    for rank, share in enumerate(args[0].chunk(2)):
        assertions = made.rank_program(rank).module().get_submodule("_guards_fn")
        assertions(share, args[1])
        with pytest.raises(AssertionError, match="Guard failed"):
            assertions(args[0][:3], args[1])
