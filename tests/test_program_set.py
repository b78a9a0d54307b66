"""Several programs over one set of weights: a prompt and a step of one model with a cache."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.launch import called
from tests.passes.stages import Call
from tests.state.models import PLAN, WIDTH, Llama, call
from tests.zoo.case import randomise
from tpcompiler import InputsError, ParallelProgram, PlanError, ProgramError
from tpcompiler.checkpoint.leaves import placed_shardings
from tpcompiler.cost.collective import wire_bytes

PROMPT, *STEPS = call(2, 0, 4), call(2, 4, 1), call(2, 5, 1)
CALLS = [("prefill", *PROMPT), *(("decode", *step) for step in STEPS)]


@cache
def exported() -> dict[str, ExportedProgram]:
    model = randomise(Llama(2, "index_copy"))
    return {"prefill": export(model, PROMPT[0]), "decode": export(model, STEPS[0][0])}


@cache
def converted(world: int) -> ParallelProgram:
    return tpcompiler.parallelize(exported(), world, PLAN)


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_step_reads_what_the_prompt_wrote(world: int) -> None:
    """8 ranks share 4 kv heads, in both programs alike."""
    programs = converted(world)
    report = programs.verify(CALLS)
    assert report.ok, str(report)
    assert {d.name.partition(":")[0] for d in report.outputs} == {
        "call 1 (prefill)",
        "call 2 (decode)",
        "call 3 (decode)",
    }
    for (name, program), tokens in zip(programs.items(), (4, 1), strict=True):
        sent = program.collectives()
        *sums, logits = sent
        if world < 8:
            assert [c.kind for c in sent] == ["all_reduce"] * 3 + ["all_gather"], name
        else:  # pairs of ranks have a kv head each: sums over pairs, then over the four of them, send less
            by_one = 3 * wire_bytes("all_reduce", 2 * tokens * WIDTH * 4, world)
            assert sum(c.wire_bytes for c in sums) < by_one, name
            assert logits.kind == "all_gather"
    prefill, decode = (placed_shardings(program.only.manifest) for program in programs.values())
    leaves = [fqn for _, fqn in programs["prefill"].converted.resharded.leaves()]
    assert [decode[fqn] for fqn in leaves] == [prefill[fqn] for fqn in leaves]


def test_a_step_without_its_prompt_is_another_answer() -> None:
    """Negative control: were the cache not shared, the first step's answer would show it."""
    model = randomise(Llama(2, "index_copy"))
    alone, after = copy.deepcopy(model), copy.deepcopy(model)
    after(*PROMPT[0])
    assert not torch.allclose(alone(*STEPS[0][0]), after(*STEPS[0][0]), atol=1e-2)


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", ["ranks", "shared"])
def test_one_directory_on_real_processes(layout: Literal["ranks", "shared"], tmp_path: Path) -> None:
    world = 2
    programs = converted(world)
    programs.save(tmp_path / "out", layout=layout)
    file = "rank_0.pt2" if layout == "ranks" else "rank_0.safetensors"
    sizes = {name: (tmp_path / "out" / name / file).stat().st_size for name in programs}
    _, held = programs["prefill"].parameter_bytes()
    assert sizes["prefill"] > held[0]
    assert sizes["decode"] < sizes["prefill"] - 0.9 * held[0]  # its weights are in the other file
    model = randomise(Llama(2, "index_copy"))
    with torch.no_grad():
        expected = [model(*args) for _, args, *_ in CALLS]
    results = called([[(name, *args) for name, args, *_ in CALLS]] * world, tmp_path)
    for own in results:
        for got, want in zip(own, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.slow
def test_a_free_leaf_that_two_programs_want_otherwise_is_placed_alike() -> None:
    """Alone, the second program would cut the table by its columns."""
    table = nn.Parameter(torch.randn(8, 8))

    def looks(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x) * self.scale)
        return made

    def adds(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(self.up(x)) * self.scale[:8].sum() + self.scale.mean()
        return made

    parts = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8), "scale": nn.Parameter(torch.randn(12)), "table": table}
    x = torch.randn(3, 8)
    models = {name: randomise(Call(forward, **parts)) for name, forward in (("one", looks), ("two", adds))}
    plan = {"up": "colwise", "down": "rowwise"}
    programs = {name: export(model, (x,)) for name, model in models.items()}
    alone = [
        placed_shardings(tpcompiler.parallelize(program, 2, plan).only.manifest)["scale"]
        for program in programs.values()
    ]
    assert alone[0] != alone[1]
    together = tpcompiler.parallelize(programs, 2, plan)
    assert len({placed_shardings(program.only.manifest)["scale"] for program in together.values()}) == 1
    assert together.verify([("one", (x,)), ("two", (x,))]).ok


def test_what_is_refused() -> None:
    programs = exported()
    with pytest.raises(ProgramError, match="several programs need a name each, got \\['a', 'a'\\]"):
        tpcompiler.parallelize([("a", programs["prefill"]), ("a", programs["decode"])], 2, PLAN)
    other = export(randomise(Llama(2, "index_copy"), seed=1), STEPS[0][0])
    with pytest.raises(ProgramError, match=r"'.*' is \[.*\] of torch.float32 in program 'prefill' and"):
        tpcompiler.parallelize({"prefill": programs["prefill"], "decode": other}, 2, PLAN)
    with pytest.raises(PlanError, match="do not say of which program they are"):
        tpcompiler.parallelize(programs, 2, PLAN, inputs=["R"])
    with pytest.raises(InputsError, match="there is no program 'encode'\n  help: call one of prefill, decode"):
        converted(2).verify([("encode", PROMPT[0])])


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize(("features", "world"), [(4, 3), (2, 4)])
def test_a_rank_without_a_share(features: int, world: int, tmp_path: Path) -> None:
    """Its empty tensors lie in the file of each program, the others in the first's."""
    model = randomise(nn.Sequential(nn.Linear(8, features), nn.Linear(features, 8)))
    x, y = torch.randn(5, 8), torch.randn(2, 8)
    programs = {"prefill": export(model, (x,)), "decode": export(model, (y,))}
    made = tpcompiler.parallelize(programs, world, {"0": "colwise", "1": "rowwise"})
    assert made.verify([("prefill", (x,)), ("decode", (y,))]).ok
    made.save(tmp_path / "out")  # and checks the files
    for own in called([[("prefill", x), ("decode", y)]] * world, tmp_path):
        for got, given in zip(own, (x, y), strict=True):
            torch.testing.assert_close(got, model(given))
