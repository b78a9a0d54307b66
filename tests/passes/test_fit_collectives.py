"""Reductions over symmetric memory: what they replace is what they mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.launch import fork_ranks
from tpcompiler._torch import all_tensors
from tpcompiler.errors import ArtifactError, UnsupportedError
from tpcompiler.ir.symm_mem import expand_collectives, is_fitted, rooms_of
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.judge.sound.written import written
from tpcompiler.parallel.program_subject import compared_calls, layout_of, on_cpu, subject_of
from tpcompiler.passes.fit_collectives import fit_collectives
from tpcompiler.runtime.artifact import MANIFEST

ONE_SHOTS = ["one_shot_all_reduce_copy"] * 2
MACHINE = "ideal"  # ranks that hold rows do no less in the norm than one that holds all
PLAN = {"*.gate": "colwise", "*.up": "colwise", "*.down": "rowwise"}
GATHERED = {"inputs": [Shard(1)], "outputs": [Shard(1)]}
WORKER = Path(__file__).parents[1] / "fitted_worker.py"


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate, self.up = nn.Linear(16, 32, bias), nn.Linear(16, 32, bias)
        self.down = nn.Linear(32, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


def exported(model: nn.Module | None = None, dtype: torch.dtype = torch.float32, **how: Any) -> ExportedProgram:
    torch.manual_seed(0)
    model = model or nn.Sequential(Block(), Block())
    return export(model.to(dtype), (torch.randn(4, 8, 16, dtype=dtype),), **how)


def made(program: ExportedProgram, world: int = 2, /, **how: Any) -> tpcompiler.ParallelProgram:
    how = {"plan": PLAN, "device_type": "cuda", "collectives": "symm_mem", **how}
    return tpcompiler.parallelize(program, world, **how)


def fitted(program: ExportedProgram) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if is_fitted(node)]


def nodes_of(program: ExportedProgram) -> dict[str, Any]:
    found = {}
    for node in program.graph.nodes:
        claim = dict((node.meta.get("custom") or {}).get("tpcompiler") or {})
        claim.pop("parts", None)
        where = (
            str(node.meta.get("stack_trace") or ""),
            [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()],
        )
        found[node.name] = node.op, node.target, str(node.args), str(node.kwargs), claim, where
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_there_and_back(world: int) -> None:
    """The very nodes, names, claims and places in the source that were there before."""
    plain = made(exported(), world, collectives="nccl", device_type="cpu").rank_program(1)
    there = fit_collectives(plain, {f"tp={world}:tp": world}, lambda node: True)
    assert fitted(there) == ONE_SHOTS
    back = expand_collectives(there)
    assert nodes_of(back) == nodes_of(plain)
    assert back.graph_signature.input_specs == plain.graph_signature.input_specs
    assert back.constants.keys() == plain.constants.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ranks", "shared"])
def test_written_checked_and_verified(layout: Any, tmp_path: Path) -> None:
    program = exported()
    parallel = made(program)
    parallel.save(tmp_path / "out", layout=layout)
    name = "program.pt2" if layout == "shared" else "rank_1.pt2"
    assert fitted(torch.export.load(tmp_path / "out" / name)) == ONE_SHOTS
    report = tpcompiler.open(tmp_path / "out").check(original=program)
    assert report.ok, report
    verdict = tpcompiler.open(tmp_path / "out").verify(program.example_inputs[0], original=program)  # type: ignore[index]
    assert verdict.ok, verdict
    lines = parallel.report().splitlines()
    counted = lines[lines.index("collectives over symmetric memory:") + 1]
    assert counted == "  2 one_shot_all_reduce_copy over symmetric memory; nothing left to NCCL"


@pytest.mark.slow
def test_in_two_processes(tmp_path: Path) -> None:
    """They run the ops as written, by an all_reduce of gloo that checks the buffers."""
    program = exported()
    parallel = made(program)
    parallel.save(tmp_path / "out")
    inputs: Any = program.example_inputs
    layout = layout_of(parallel.only)
    (name,) = (node.name for node in parallel.converted.resharded.user_inputs())
    for rank in range(2):
        torch.save([layout.cut(name, inputs[0][0], rank)], tmp_path / f"{rank}.inputs")
    ended = fork_ranks(2, WORKER, tmp_path)
    assert ended.codes == (0, 0), ended.printed
    found = [torch.load(tmp_path / f"{rank}.results") for rank in range(2)]
    assert [name.split(".")[1] for name in found[0]["called"]] == ONE_SHOTS
    with torch.no_grad():
        wanted = program.module()(*inputs[0])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    shares = zip(*(each["made"] if isinstance(each["made"], tuple) else (each["made"],) for each in found), strict=True)
    for at, (whole, parts) in enumerate(zip(wanted, shares, strict=True)):
        (output,) = [parallel.converted.resharded.output_names()[at]]
        for replica in layout.join(f"output {output}", list(parts), whole.shape):
            torch.testing.assert_close(replica, whole)


def test_declined() -> None:
    """What torch's kernels do not take stays as it is, and the report counts it."""
    counts = dict.fromkeys(["gathered", "whole numbers", "dynamic"], 0)
    gathered = made(exported(nn.Sequential(Block(bias=True))), **GATHERED)
    counts["gathered"] = len(fitted(gathered.rank_program(0)))
    half = made(exported(dtype=torch.float64))
    counts["whole numbers"] = len(fitted(half.rank_program(0)))
    dynamic = made(exported(dynamic_shapes=({0: Dim("b", max=64)},)))
    counts["dynamic"] = len(fitted(dynamic.rank_program(0)))
    assert set(counts.values()) == {0}, counts
    assert dynamic.report().splitlines()[-1] == "  none over symmetric memory; 2 all_reduce left to NCCL"
    with pytest.raises(UnsupportedError, match="symmetric memory is of GPUs, and these programs are for 'cpu'"):
        made(exported(), device_type="cpu")


def rows(count: int, **how: Any) -> tpcompiler.ParallelProgram:
    """One layer over 8 ranks, whose all_reduce is of 64 B a row."""
    torch.manual_seed(0)
    program = export(Block(), (torch.randn(count, 16),))
    return made(program, 8, plan={"gate": "colwise", "up": "colwise", "down": "rowwise"}, **how)


@pytest.mark.slow
def test_auto_takes_what_is_faster_by_the_links_of_the_machine() -> None:
    """Of P bytes over 8 H100 each sends 1.75 P: 4.8 us + 1.75 P / 75 GB/s in one shot, 16.7 us + 1.75 P / 220 GB/s by NCCL.

    They take as long at P = 11.9 us / (1.75 / 75 GB/s - 1.75 / 220 GB/s) = 773,793 bytes.
    """
    how: Any = {"collectives": "auto", "machine": "h100"}
    small, large = rows(12_000, **how), rows(12_200, **how)
    assert (fitted(small.rank_program(0)), fitted(large.rank_program(0))) == (["one_shot_all_reduce_copy"], [])
    so = "faster so on h100: up to 774 kB for all_reduce over tp"
    assert f"  1 one_shot_all_reduce_copy over symmetric memory; nothing left to NCCL; {so}\n" in small.report()
    assert f"  none over symmetric memory; 1 all_reduce left to NCCL; {so}\n" in large.report()
    assert fitted(rows(12_200, machine="h100").rank_program(0)) == ["one_shot_all_reduce_copy"]  # asked for by name
    far = rows(8, **{**how, "machine": "l40s"})
    assert "1 all_reduce left to NCCL; faster so on l40s: never for all_reduce over tp\n" in far.report()


def test_the_search_prices_what_sends() -> None:
    """33.6 MB of weights take 11.4 us to read: to cut them by 8 saves 10.0 us, and costs 4.8 us in one shot, 16.7 by NCCL."""
    layer = nn.Sequential(nn.Linear(1024, 4096, False), nn.ReLU(), nn.Linear(4096, 1024, False))
    program = export(layer, (torch.randn(1, 1024),))

    def sent(collectives: str) -> list[str]:
        found = made(program, 8, plan="auto", collectives=collectives, machine="h100")
        return [each.kind for each in found.collectives()]

    assert [sent(each) for each in ("nccl", "symm_mem", "auto")] == [[], ["all_reduce"], ["all_reduce"]]


@pytest.mark.slow
def test_files_are_priced_by_what_sends_and_on_the_machine_that_they_are_for(tmp_path: Path) -> None:
    """64 KB over 8 H100: 4.8 us + 114,688 B / 75 GB/s = 6.33 us in one shot, and 17.2 us by NCCL."""
    rows(1024, machine="h100").save(tmp_path / "out", layout="shared")
    rows(1024, machine="h100", collectives="nccl").save(tmp_path / "nccl", layout="shared")
    priced = [tpcompiler.open(tmp_path / name).cost() for name in ("out", "nccl")]
    assert [each.machine for each in priced] == ["h100"] * 2
    assert [each.seconds for each in priced] == pytest.approx([4.8e-6 + 114688 / 7.5e10, 16.7e-6 + 114688 / 2.2e11])
    assert tpcompiler.open(tmp_path / "out").cost(machine="l40s").machine == "l40s"
    assert tpcompiler.open(tmp_path / "nccl").diff(tpcompiler.open(tmp_path / "out")).sent_seconds == pytest.approx(
        tuple(each.seconds for each in reversed(priced))
    )
    tpcompiler.open(tmp_path / "out").reshard(4, tmp_path / "four")
    asked = json.loads((tmp_path / "four" / MANIFEST).read_text())["asked"]
    assert (asked["machine"], asked["collectives"]) == ("h100", "symm_mem")


def _one_rank_sums_otherwise(node: Any) -> None:
    node.update_arg(2, "max")


def _another_group(node: Any) -> None:
    node.update_arg(3, "tp=2:dp")


def _other_rows(node: Any) -> None:
    node.args[0].args[0].update_arg(2, 4)


DAMAGES = {
    "the reduction": (0, _one_rank_sums_otherwise),
    "the buffer's rows": (0, _other_rows),
    "the group": (1, _another_group),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage: str) -> None:
    """The negative control of `check` and `verify`; what all ranks do alike is for `verify`."""
    at, spoil = DAMAGES[damage]
    parallel = made(exported())
    ranks = [parallel.rank_program(rank) for rank in range(2)]
    assert judged(parallel, ranks) == [True, True]
    for rank in ranks:
        spoil([node for node in rank.graph.nodes if is_fitted(node)][at])
    if damage not in ("the buffer's rows", "the group"):
        assert judged(parallel, ranks) == [False, False]
        return
    with pytest.raises(ArtifactError, match="stands for no reduction that can be told"):
        judged(parallel, ranks)


def _another_group_of_memory(path: Path) -> None:
    _change(path, lambda data: data.update(symm_mem=dict.fromkeys(data["symm_mem"], "dp=2,tp=2:dp")))


def _no_memory(path: Path) -> None:
    _change(path, lambda data: data.update(symm_mem={}))


def _a_number_for_memory(path: Path) -> None:
    """A constant of the model, which `load` would exchange for memory without values."""
    _change(path, lambda data: data["symm_mem"].update(c="dp=2,tp=2:tp"))


def _change(path: Path, change: Any) -> None:
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    (path / MANIFEST).write_text(json.dumps(data))


MEMORY = {
    "another group": (_another_group_of_memory, "rank 0 reduces over the symmetric memory"),
    "none": (_no_memory, "holds the tensor '_symm_mem_1_0', which its program does not take"),
    "a constant": (_a_number_for_memory, "the manifest has 'c' as a tensor and as symmetric memory"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", MEMORY)
def test_memory_that_is_not_what_reductions_take(damage: str, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.c = Block(), torch.arange(16.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x) * self.c  # type: ignore[no-any-return]

    spoil, text = MEMORY[damage]
    made(exported(Scaled()), {"dp": 2, "tp": 2}).save(tmp_path / "out")  # and checks the files
    spoil(tmp_path / "out")
    if damage != "another group":
        with pytest.raises(ArtifactError, match=text):
            tpcompiler.open(tmp_path / "out").check()
    else:
        first, *_ = tpcompiler.open(tmp_path / "out").check().findings
        assert text in first


def test_one_memory_for_two_groups() -> None:
    program = made(exported()).rank_program(0)
    _, two = (node for node in program.graph.nodes if is_fitted(node))
    assert len(rooms_of(program)) == 1
    two.update_arg(3, "tp=2:dp")
    with pytest.raises(ArtifactError, match=f"'{two.name}' .* stands for no reduction that can be told"):
        rooms_of(program)


def judged(parallel: tpcompiler.ParallelProgram, ranks: list[ExportedProgram]) -> list[bool]:
    """What `check` and `verify` say."""
    first = written(ranks[0], on_cpu)
    written_ranks = [replace(first, state=all_tensors(rank)) for rank in ranks]
    checked = check_programs(written_ranks, parallel.manifest(), parallel.only.original())
    subject, inputs = replace(subject_of(parallel.only), programs=ranks), parallel.only.original().example_inputs
    try:
        verified = compared_calls({"": subject}, [("", inputs[0], {})]).ok  # type: ignore[index]
    except ArtifactError:  # the ranks do not meet
        verified = False
    return [checked.ok, verified]
