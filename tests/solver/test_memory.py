"""What a rank holds, counted by hand, and placements that fit a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tpcompiler.api.request import Request, read_plan
from tpcompiler.cost.machine_file import read_machine
from tpcompiler.cost.objective import Objective
from tpcompiler.errors import ShardingError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.parallel.converted_program import convert_programs
from tpcompiler.passes.apply_plan import apply_plan
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.plan.plan import Plan
from tpcompiler.solver.estimate import measure_memory
from tpcompiler.solver.search import search
from tpcompiler.solver.task import Task

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting


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
    found = search(Task([apply_plan(canonicalize(_exported()), Plan(), Mesh.of(1))], Objective.of(read_machine())))
    memory = measure_memory(found)
    assert (memory.weights, memory.caches) == (128 * 4, 32 * 4)
    assert (memory.activations, memory.at) == ((32 + 128 + 128) * 4, "relu")
    assert dict(memory.largest) == {"up.weight": 256, "down.weight": 256, "cache": 128}


class Cached(nn.Module):
    """A cache that `load` writes in place, where a step adds a token."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 1024, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(1, at, x)
        return self.cache.sum(1)


def test_a_cache_that_is_written_in_place_counts_once() -> None:
    program = export(Cached(), (torch.randn(1, 1, 4), torch.tensor([3])))
    memory = measure_memory(
        search(Task([apply_plan(canonicalize(program), Plan(), Mesh.of(1))], Objective.of(read_machine())))
    )
    assert memory.caches == 1024 * 4 * 4
    assert memory.activations == 4 * 4 + 8 + 4 * 4  # x, at, and the sum


def test_the_peak_is_at_an_op_of_the_program() -> None:
    """Columns that are gathered at the end, which a pin asks for."""
    program = export(nn.Sequential(nn.Linear(8, 64, bias=False)), (torch.randn(4, 8),))
    planned = apply_plan(canonicalize(program), read_plan({"0": "colwise"}), Mesh.of(2))
    memory = measure_memory(search(Task([planned], Objective.of(read_machine()))))
    assert memory.at == "linear"
    assert memory.activations == (4 * 8 + 4 * 32 + 4 * 64) * 4  # the input, the share, and the whole


class Wide(nn.Module):
    """Layers that nobody would cut for their speed: what is sent for them takes longer than to read all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def total_of(program: ExportedProgram, mesh: int, *, gathers: bool = False, **asked: Any) -> int:
    """Bytes of a rank under the placements that the search finds without a limit."""
    request = Request(program, mesh, "auto:free" if gathers else "auto", **asked)
    found, _ = convert_programs(request.conversions())
    return measure_memory(found).total


@pytest.mark.slow
def test_a_limit_is_kept_where_it_costs_more() -> None:
    x = torch.randn(512, 64)
    program = export(Wide(), (x,))
    free = tpcompiler.parallelize(program, 2, "auto")
    assert not free.collectives()
    assert max(free.parameter_bytes()[1]) == 2 * 64 * 64 * 4
    tight = tpcompiler.parallelize(program, 2, "auto", memory=total_of(program, 2) - 1)
    assert max(tight.parameter_bytes()[1]) < 2 * 64 * 64 * 4
    assert tight.verify((x,)).ok
    assert any("a rank holds about" in note.text for note in tight.converted.resharded.notes)


class Blocks(nn.Module):
    """Four equal blocks, each of which a rank can hold half of for one all_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(256, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_no_more_layers_are_cut_than_a_limit_asks_for(cut: int) -> None:
    """All blocks are worth the same price of a byte, at which all or none of them would be cut."""
    x, machine = torch.randn(8, 64), "h100"  # whose latencies no block is worth
    program, half = export(Blocks(), (x,)), 2 * 64 * 256 * 4 // 2
    found, _ = convert_programs(Request(program, 2, machine=machine).conversions())
    limit = measure_memory(found).total - cut * half
    made = tpcompiler.parallelize(program, 2, "auto", machine=machine, memory=limit)
    assert max(made.parameter_bytes()[1]) == (8 - cut) * half
    assert made.verify((x,)).ok


def test_a_plan_that_does_not_fit() -> None:
    with pytest.raises(ShardingError, match=r"more than the limit of 1 kB\. .*\n.*cut more layers"):
        tpcompiler.parallelize(_exported(), 2, {"up": "replicate"}, memory="1kB")


def test_a_machine_that_is_given_limits_what_is_held(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("base: h100\nmemory: 1.0e+3\n")
    with pytest.raises(ShardingError, match=r"more than the limit of 500 B\."):
        tpcompiler.parallelize(_exported(), 2, "auto", machine=tmp_path / "small.yaml")


def test_weights_are_gathered_where_that_is_asked_for() -> None:
    """Tokens by the thousand and little memory: the batch is cut, and weights that are held in parts are gathered."""
    x = torch.randn(4096, 64)
    program = export(Wide(), (x,))
    asked: dict[str, Any] = {"inputs": ["S(0)"], "outputs": ["S(0)"]}
    roomy = tpcompiler.parallelize(program, 4, "auto:free", **asked)
    assert not roomy.collectives()
    assert roomy.verify((x,)).ok
    held = max(roomy.parameter_bytes()[1])
    memory = total_of(program, 4, gathers=True, **asked) - held // 4  # one of them is whole at a time
    tight = tpcompiler.parallelize(program, 4, "auto:free", memory=memory, **asked)
    assert max(tight.parameter_bytes()[1]) <= held // 2
    assert {(c.kind, c.why) for c in tight.collectives()} == {("all_gather", "fallback")}
    assert tight.verify((x,)).ok
