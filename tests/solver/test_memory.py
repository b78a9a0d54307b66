"""What a rank holds, counted by hand, and placements that fit a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tpcompiler.api import conversions_of
from tpcompiler.cost.machine import KNOWN, Machine
from tpcompiler.cost.objective import SEARCHED
from tpcompiler.errors import ShardingError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.pipeline import solved_together
from tpcompiler.plan import Plan
from tpcompiler.solver.memory import measure_memory
from tpcompiler.solver.place import Aim
from tpcompiler.solver.solution import search


class Net(nn.Module):
    """A chain with a view, a cache that is written, and a wide value in the middle."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)).view(2, 4, 16)).view(8, 4)
        self.cache.copy_(y)
        return y + 1


def _exported() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Net(), (torch.randn(8, 4),))


def test_bytes_of_a_rank_by_hand() -> None:
    """On one rank: weights 2 * 64 numbers, the cache 32; at relu the input x (32), and 128 before and after it."""
    found = search([apply_plan(canonicalize(_exported()), Plan(), Mesh.of(1))], SEARCHED)
    memory = measure_memory(found)
    assert (memory.weights, memory.caches) == (128 * 4, 32 * 4)
    assert (memory.activations, memory.at) == ((32 + 128 + 128) * 4, "relu")
    assert dict(memory.largest) == {"up.weight": 256, "down.weight": 256, "cache": 128}


class Wide(nn.Module):
    """A bottleneck that nobody would cut for its speed: what is sent for it costs more than what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def test_a_limit_is_kept_where_it_costs_more() -> None:
    x = torch.randn(512, 64)
    program = export(Wide(), (x,))
    free = tpcompiler.parallelize(program, 2, "auto")
    assert not free.collectives()
    assert max(free.parameter_bytes()[1]) == 2 * 64 * 8 * 4
    limit = 4 * (2 * 64 * 8 + 2 * 512 * 64 + 512 * 8) - 1  # weights, what comes in and goes out, what is between
    tight = tpcompiler.parallelize(program, 2, "auto", memory=limit)
    assert max(tight.parameter_bytes()[1]) < 2 * 64 * 8 * 4
    assert tight.verify((x,)).ok
    assert any("a rank holds about" in note.text for note in tight.resharded.notes)


def test_a_plan_that_does_not_fit() -> None:
    with pytest.raises(ShardingError, match=r"more than the limit of 500 B\. .*\n.*cut more layers"):
        tpcompiler.parallelize(_exported(), 2, {"up": "replicate"}, memory=500)


def test_a_machine_that_is_given_limits_what_is_held(tmp_path: Path) -> None:
    text = (KNOWN / "h100.yaml").read_text()
    (tmp_path / "small.yaml").write_text(text.replace("memory: 8.0e+10", "memory: 5.0e+2"))
    with pytest.raises(ShardingError, match=r"more than the limit of 500 B\."):
        tpcompiler.parallelize(_exported(), 2, "auto", machine=tmp_path / "small.yaml")


def test_what_the_report_says_of_the_search() -> None:
    said = tpcompiler.parallelize(_exported(), 2, "auto").report().partition("the search for placements:\n")[2]
    lines = said.splitlines()
    assert lines[0].startswith("  one call costs ")
    assert lines[0].endswith(" us, the least of all choices that were compared")
    assert lines[1].startswith("  a rank holds about ")


def test_weights_are_gathered_where_that_is_asked_for() -> None:
    """Tokens by the thousand and little memory: the batch is cut, and weights that are held in parts are gathered."""
    x = torch.randn(4096, 64)
    program = export(Wide(), (x,))
    asked: dict[str, Any] = {"inputs": ["S(0)"], "outputs": ["S(0)"]}
    roomy = tpcompiler.parallelize(program, 4, "auto:free", **asked)
    assert not roomy.collectives()
    assert roomy.verify((x,)).ok
    held = max(roomy.parameter_bytes()[1])
    conversions = conversions_of(program, 4, Plan().with_search(), **asked)
    found, _ = solved_together(conversions, Aim(Machine.read(), gathers=True))
    memory = measure_memory(found).total - held // 4  # one of them is whole at a time
    tight = tpcompiler.parallelize(program, 4, "auto:free", memory=memory, **asked)
    assert max(tight.parameter_bytes()[1]) <= held // 2
    assert {(c.kind, c.why) for c in tight.collectives()} == {("all_gather", "fallback")}
    assert tight.verify((x,)).ok
