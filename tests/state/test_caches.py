"""KV caches and statistics: cut like what is written to them, without a collective, and kept from call to call."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind

import tpcompiler
from tests.compared import compare
from tests.launch import called
from tests.runtime.commands import right
from tests.state.models import PLAN, WRITES, Llama, Normed, call
from tests.zoo.case import randomise
from tpcompiler import ParallelProgram
from tpcompiler.judge.compare.judge import FLOOR, SPREAD
from tpcompiler.parallel.program_subject import layout_of
from tpcompiler.runtime.inputs import write_tensors

# A prompt in two chunks, then four tokens one by one.
CALLS = [call(2, 0, 4), call(2, 4, 2), *(call(2, 6 + step, 1) for step in range(4))]


@cache
def exported(write: str, dynamic: bool = False) -> ExportedProgram:
    tokens = Dim("tokens", min=1, max=16)
    shapes = {"tokens": {1: tokens}, "position": {0: tokens}} if dynamic else None
    return torch.export.export(randomise(Llama(2, write)), call(2, 0, 4)[0], dynamic_shapes=shapes)


@cache
def converted(write: str, world: int, dynamic: bool = False) -> ParallelProgram:
    return tpcompiler.parallelize(exported(write, dynamic), world, PLAN)


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("write", WRITES)
def test_a_cache_is_cut_by_heads_for_free(write: str, world: int) -> None:
    """Two all_reduce a layer, one for the embedding, the logits that the plan gathers; four calls on one cache."""
    program = converted(write, world)
    calls = [call(2, 4 * chunk, 4) for chunk in range(4)]
    report = program.verify(*calls[0], then=calls[1:])
    assert report.ok, str(report)
    assert Counter(c.kind for c in program.collectives()) == {"all_reduce": 3, "all_gather": 1}
    caches = [row for row in program.manifest().tensors if row.kind == "buffer"]
    assert [row.sharding for row in caches] == ["S(1)"] * 2


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [2, 4])
def test_chunked_prefill_and_four_steps(world: int) -> None:
    report = converted("index_copy", world, dynamic=True).verify(*CALLS[0], then=CALLS[1:])
    assert report.ok, str(report)
    assert len(report.outputs) == len(CALLS) * 3  # logits and two caches each


def test_a_lost_write_is_caught() -> None:
    """Negative control: a rank that forgets what it wrote is right in the first call and wrong in the next."""
    program = converted("index_copy", 2, dynamic=True)
    programs = [program.rank_program(rank) for rank in range(2)]
    programs[1] = _forgetful(programs[1], "layers.0.values")
    layout = layout_of(program.only)
    report = compare(
        program.only.original(), programs, *CALLS[0], layout, ["tokens", "position"], ["output"], then=[CALLS[1]]
    )
    bad = [d.name for d in report.outputs if not d.ok]
    assert bad[0] == "call 1: layers.0.values"
    assert "call 1: output" not in bad
    assert "call 2: output" in bad


def _forgetful(program: ExportedProgram, buffer: str) -> ExportedProgram:
    damaged = copy.deepcopy(program)
    specs = damaged.graph_signature.output_specs
    (at,) = (i for i, s in enumerate(specs) if s.kind is OutputKind.BUFFER_MUTATION and s.target == buffer)
    output = damaged.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    name = next(s.arg.name for s in damaged.graph_signature.input_specs if s.target == buffer)
    values[at] = next(node for node in damaged.graph.nodes if node.name == name)
    output.args = (tuple(values),)
    return damaged


def test_module_keeps_the_cache_in_real_processes(tmp_path: Path) -> None:
    """Saved, loaded and called six times by `module()` on two gloo ranks."""
    program = converted("index_copy", 2, dynamic=True)
    program.save(tmp_path / "out")
    got = called([[args for args, _ in CALLS]] * 2, tmp_path)
    single = exported("index_copy", True).module()
    exact = copy.deepcopy(exported("index_copy", True).module()).double()
    with torch.no_grad():
        for step, (args, _) in enumerate(CALLS):
            want = single(*args)
            best = exact(*args)
            scale = best.abs().max()
            limit = max(SPREAD * float((want - best).abs().max() / scale), FLOOR * torch.finfo(torch.float32).eps)
            for rank in range(2):
                assert float((got[rank][step] - want).abs().max() / scale) <= limit, (step, rank)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_batch_norm_statistics_are_cut_and_kept(world: int) -> None:
    """Channels are cut through the convolution and the norm; each rank keeps the statistics of its own."""
    model = randomise(Normed()).train()
    inputs = [torch.randn(4, 3, 9, 9) for _ in range(3)]
    program = tpcompiler.parallelize(
        torch.export.export(model, (inputs[0],)), world, {"first": "colwise", "second": "rowwise"}
    )
    report = program.verify((inputs[0],), then=[((x,), {}) for x in inputs[1:]])
    assert report.ok, str(report)
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    rows = {row.name: row.sharding for row in program.manifest().tensors}
    assert rows["norm.running_mean"] == rows["norm.running_var"] == rows["norm.weight"] == "S(0)"
    assert "call 3: norm.num_batches_tracked" in [d.name for d in report.outputs]


@pytest.mark.slow
def test_a_cache_as_an_input_takes_the_placement_that_is_given() -> None:
    """Caches that the caller holds: cut where `inputs=` says so, what is put in is gathered in every call where not."""

    class Held(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(2, position, self.k(x).view(2, 3, 4, 2).transpose(1, 2))
            return cache.square().sum((1, 3))

    inputs = (torch.randn(2, 3, 8), torch.randn(2, 4, 6, 2), torch.tensor([1, 2, 4]))
    model = torch.export.export(randomise(Held()), inputs)
    cut = tpcompiler.parallelize(model, 2, {"k": "colwise"}, inputs={"cache": "S(1)"})
    assert cut.verify(inputs).ok
    assert [(c.kind, c.why) for c in cut.collectives()] == [("all_reduce", "inherent")]
    whole = tpcompiler.parallelize(model, 2, {"k": "colwise"})
    assert whole.verify(inputs).ok
    assert ("all_gather", "plan-demanded") in [(c.kind, c.why) for c in whole.collectives()]


class Rows(torch.nn.Module):
    """Writes a step of a batch into the first rows of a cache."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.k, self.o = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(rows, 4, 6, 2))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        self.cache[:batch, :, position] = self.k(x).view(batch, 1, 4, 2).transpose(1, 2)
        return self.o(self.cache[:batch].cumsum(2)[:, :, -1].flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "batch", "mesh", "sharding"),
    [
        (4, 2, {"dp": 2}, "S(0, parts 2 2r)"),
        (5, 3, {"dp": 2}, "S(0, parts 3 2r)"),
        (2, 2, {"dp": 2}, "S(0)"),
        (4, 2, {"dp": 2, "tp": 2}, "[S(0, parts 2 2r), S(1)]"),
    ],
)
def test_a_cache_with_more_rows_than_the_batch(
    rows: int, batch: int, mesh: dict[str, int], sharding: str, tmp_path: Path
) -> None:
    """The rows that the batch takes are cut with it; the others are whole, and no rank gathers any."""
    calls = [(torch.randn(batch, 1, 8), torch.tensor([step])) for step in range(3)]
    model = torch.export.export(randomise(Rows(rows)), calls[0])
    plan = {"k": "colwise", "o": "rowwise"} if "tp" in mesh else {}
    program = tpcompiler.parallelize(model, mesh, plan, inputs={"x": {"dp": "S(0)"}}, outputs=[{"dp": "S(0)"}])
    assert Counter(c.kind for c in program.collectives()) == ({"all_reduce": 1} if plan else {})
    (row,) = (row for row in program.manifest().tensors if row.name == "cache")
    assert row.sharding == sharding
    report = program.verify(calls[0], then=calls[1:])
    assert report.ok, str(report)
    program.save(tmp_path / "out")  # and checks the files


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mesh", "plan", "sharding"),
    [
        ({"dp": 2}, {}, "R"),
        ({"dp": 2, "tp": 2}, {"k": "colwise", "o": "rowwise"}, "[R, S(1)]"),
    ],
)
def test_a_dynamic_batch_in_a_larger_cache_is_gathered(mesh: dict[str, int], plan: Any, sharding: str) -> None:
    """A cut of its first rows would move with the batch; the reason names the slice, whatever another axis cuts."""
    inputs = (torch.randn(2, 1, 8), torch.tensor([0]))
    shapes = ({0: Dim("batch", min=2, max=4)}, None)
    model = torch.export.export(randomise(Rows(4)), inputs, dynamic_shapes=shapes)
    boundary: Any = {"inputs": {"x": {"dp": "S(0)"}}, "outputs": [{"dp": "S(0)"}]}
    program = tpcompiler.parallelize(model, mesh, plan, machine="h100", **boundary)
    (gather,) = (each for each in program.collectives() if each.axis == "dp")
    assert gather.kind == "all_gather"
    assert "'slice_scatter' (it needs the dim of 2*s" in gather.reason, gather.reason
    (row,) = (row for row in program.manifest().tensors if row.name == "cache")
    assert row.sharding == sharding
    assert program.verify(inputs).ok


@pytest.mark.slow
def test_the_command_line_proves_a_sequence_of_calls(tmp_path: Path) -> None:
    program = converted("index_copy", 2, dynamic=True)
    program.save(tmp_path / "out")
    torch.export.save(program.only.original(), tmp_path / "model.pt2")
    files = []
    for number, ((tokens, position), _) in enumerate(CALLS[:3]):
        files += ["--inputs", tmp_path / f"{number}.safetensors"]
        write_tensors(files[-1], {"tokens": tokens, "position": position})
    said = right("verify", tmp_path / "out", "--against", tmp_path / "model.pt2", *files)
    assert said.startswith("equal: ")
    assert "ok  call 3: layers.0.keys: rel err" in said
