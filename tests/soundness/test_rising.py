"""Integers that only make sense in an order are drawn in it where the check runs pieces of the model and of the ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.sound import findings
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.pieces import counting
from tpcompiler.judge.sound.written import read_ranks
from tpcompiler.passes.canonicalize import canonicalize

ROWS, EXPERTS = 20, 4
PLAN = {"up": "S(0)", "down": "S(0)"}
Ends = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class Experts(nn.Module):
    """Two grouped matmuls; `ends` makes of the second input where groups end, and the expert of each row."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self.ends = ends
        self.up = nn.Parameter(torch.randn(EXPERTS, 16, 32).bfloat16())
        self.bias = nn.Parameter(torch.randn(EXPERTS, 32).bfloat16())
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, 16).bfloat16())

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ends, which = self.ends(given)
        h = torch._grouped_mm(x, self.up, offs=ends)
        h = h if which is None else h + self.bias[which]
        return torch._grouped_mm(h.relu(), self.down, offs=ends)


def routed(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers counts the rows of each expert: in floats."""
    which = logits.argmax(-1).sort().values
    counts = torch.histc(which.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return counts.cumsum(0).to(torch.int32), which


CASES: dict[str, tuple[Ends, torch.Tensor]] = {
    "ends": (lambda ends: (ends, None), torch.tensor([3, 8, 8, ROWS], dtype=torch.int32)),
    "wide ends": (lambda ends: (ends.to(torch.int32), None), torch.tensor([3, 8, 8, ROWS])),
    "counts": (lambda counts: (counts.cumsum(0).to(torch.int32), None), torch.tensor([3, 5, 0, ROWS - 8])),
    "routed": (routed, torch.randn(ROWS, EXPERTS)),
}


def exported(ends: Ends, given: torch.Tensor, dynamic: bool) -> ExportedProgram:
    rows = {0: Dim("rows")}
    sizes = ({0: Dim("rows")}, rows if given.is_floating_point() else None) if dynamic else None
    return export(Experts(ends), (torch.randn(ROWS, 16).bfloat16(), given), dynamic_shapes=sizes)


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_dealt_experts(name: str, dynamic: bool) -> None:
    """Right ranks are found right, whoever says where groups end; and the same ranks are wrong for another model."""
    program = tpcompiler.parallelize(
        exported(*CASES[name], dynamic), 2, {**PLAN, "bias": "S(0)"} if name == "routed" else PLAN
    )
    for _ in range(3):  # of other random values
        assert findings(program) == []
    ranks = read_ranks(program.only)
    other = canonicalize(program.only.original())
    (relu,) = other.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.neg.default
    (finding,) = check_programs(ranks, program.manifest(), model=other).findings
    assert "on random values they differ by" in finding


def test_experts_of_another_order() -> None:
    """The negative control of the order: each rank dealt the other's groups."""
    program = tpcompiler.parallelize(exported(*CASES["ends"], False), 2, PLAN)
    ranks = read_ranks(program.only)
    other = canonicalize(program.only.original())
    for node in other.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        with other.graph.inserting_before(node):
            turned = other.graph.call_function(torch.ops.aten.flip.default, (node.args[1], [0]))
        turned.meta["val"] = node.args[1].meta["val"]
        node.args = (node.args[0], turned, *node.args[2:])
    (finding,) = check_programs(ranks, program.manifest(), model=other).findings
    assert "on random values they differ by" in finding


@pytest.mark.slow
def test_floats_that_count() -> None:
    """No random value may stand for a float that is computed from integers alone; for any other it may."""
    program = canonicalize(exported(*CASES["routed"], False))
    assert {node.name for node in counting(program.graph)} == {"_to_copy", "histc", "cumsum"}
    masked = export(Masked(), (torch.randn(4), torch.arange(4)))
    assert {node.name for node in counting(canonicalize(masked).graph)} == {"_to_copy_1", "add"}


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (x > 0).float() * x + (ids.float() + 1) * x
