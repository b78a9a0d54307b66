"""Every reshard takes the steps that are fastest on the machine, and the files say which: a judge knows no machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.export import export

import tpcompiler
from tests.passes.stages import Call
from tests.trust.damage import Artifact, claim
from tpcompiler.api.request import Request
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import read_claim
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.parallel.pipeline import find_placements
from tpcompiler.solver.estimate import sent_by

MESH = {"dp": 2, "tp": 2}
# Nodes of two ranks, so that tp stays on one. 16 KB over all four: 10 + 24,576 B / 1e8 = 255.8 us by one all_reduce,
# 10 + 16,384 B / 1e10 + 10 + 16,384 B / 1e8 = 185.5 us by one over each axis. 64 B: 11.0 us and 20.6 us.
NODES = """\
base: ideal
links: [{latency: 1.0e-5, bandwidth: 1.0e+10}]
nodes:
  ranks_per_node: 2
  links: [{latency: 1.0e-5, bandwidth: 1.0e+8}]
"""
NO_ALL_REDUCE = """\
base: ideal
links:
  - {latency: 1.0e-5, bandwidth: 1.0e+10}
  - {collective: all_reduce, latency: 1.0e-3, bandwidth: 1.0e+10}
"""


def converted(folder: Path, machine: str, shape: tuple[int, ...], *placed: str) -> tpcompiler.ParallelProgram:
    """The rectified input, which is placed so over dp and tp: its sum, cut as it is."""
    (folder / "m.yaml").write_text(machine)
    program = export(Call(lambda self, x: x.relu()), (torch.randn(shape),))
    inputs = dict(zip(MESH, placed, strict=True))
    outputs = {axis: "R" if each.startswith("P") else each for axis, each in inputs.items()}
    asked = {"inputs": {"x": inputs}, "outputs": [outputs]}
    made = tpcompiler.parallelize(program, MESH, {}, **asked, machine=folder / "m.yaml")
    (conversion,) = Request(program, MESH, {}, **asked, machine=folder / "m.yaml").conversions().values()
    priced = sent_by(find_placements([conversion]))
    sent = [(each.kind, tuple(each.axis.split("."))) for each in made.collectives()]
    assert [each[:2] for each in priced] == sent  # the search has priced what was inserted
    assert made.verify((torch.randn(shape),)).ok
    return made


def kinds(made: tpcompiler.ParallelProgram) -> set[tuple[str, str]]:
    return {(each.kind, each.axis) for each in made.collectives()}


@pytest.mark.slow
def test_small_values_take_one_collective_and_large_ones_the_links_of_a_node(tmp_path: Path) -> None:
    pending = "P(sum)", "P(sum)"
    small, large = converted(tmp_path, NODES, (4, 4), *pending), converted(tmp_path, NODES, (64, 64), *pending)
    assert kinds(small) == {("all_reduce", "dp.tp")}
    assert kinds(large) == {("all_reduce", "dp"), ("all_reduce", "tp")}
    assert kinds(converted(tmp_path, "base: ideal", (64, 64), *pending)) == {("all_reduce", "dp.tp")}  # fewest bytes


@pytest.mark.slow
def test_the_files_say_which_path_and_are_judged_by_it(tmp_path: Path) -> None:
    """Five rows over tp are three and two, so ranks differ on the way, which another path would not explain."""
    made = converted(tmp_path, NO_ALL_REDUCE, (10, 4), "S(0)", "P(sum)")
    assert kinds(made) == {("reduce_scatter", "tp"), ("all_gather", "tp")}
    assert len(made.converted.partition.classes) == 2
    made.save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok
    assert made.manifest().asked.machine == "m.yaml"
    artifact = Artifact.of(made)
    (change,) = {read_claim(node).change for node in changed(artifact)}
    assert change == "[S(0), P(sum)] -> [S(0), S(0)] -> [S(0), R]"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "[S(0), P(sum)] -> [S(0), R]",
            "claims to change its operand along [S(0), P(sum)] -> [S(0), R], which its coll",
        ),
        ("[S(0), P(sum)] -> [S(1), R] -> [S(0), R]", "claims to change its operand along [S(0), P(sum)] -> [S(1), R]"),
        ("[S(0), P(sum)] -> any -> [S(0), R]", "claims the sharding 'any'"),
    ],
)
def test_another_path_is_unsound(path: str, said: str, tmp_path: Path) -> None:
    artifact = Artifact.of(converted(tmp_path, NO_ALL_REDUCE, (10, 4), "S(0)", "P(sum)"))
    assert check_programs(artifact.written(), artifact.manifest).ok
    for node in changed(artifact):
        claim(node)["change"] = path
    assert said in " ".join(check_programs(artifact.written(), artifact.manifest).findings)


def changed(artifact: Artifact) -> list[torch.fx.Node]:
    nodes = (node for program in artifact.ranks for node in edit.calls(program.graph))
    return [node for node in nodes if read_claim(node).change and "getitem" not in str(node.target)]
