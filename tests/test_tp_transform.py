"""The drop-in for torch's experimental transformation, in a process group and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import tpcompiler
from tests.launch import run_ranks
from tests.tp_transform_worker import Blocks, strategies
from tpcompiler.judge.compare.simulate import simulate


def test_torchs_scenarios_on_real_ranks() -> None:
    """Results, collective counts and group names; a compile inside the group for other worlds leaves it as it was."""
    run_ranks(2, Path(__file__).parent / "tp_transform_worker.py")


def test_without_a_process_group() -> None:
    model = Blocks(2)
    x = torch.randn(10, 12)
    exported = torch.export.export(model, (x,))
    programs = [
        tpcompiler.tensor_parallel_transformation(exported, rank, 4, "cpu", strategies(2, instances=True))
        for rank in range(4)
    ]
    names = {n.args[-1] for p in programs for n in p.graph.nodes if "all_reduce" in str(n.target)}
    assert names == {"tp=4:tp"}
    for result in simulate(programs, [[x]] * 4):
        torch.testing.assert_close(result.outputs[0], model(x))


def test_an_instance_means_what_its_class_means() -> None:
    exported = torch.export.export(Blocks(1), (torch.randn(10, 12),))
    plans = [{"mlps.0.0": ColwiseParallel, "mlps.0.2": RowwiseParallel}, strategies(1, instances=True)]
    texts = [str(tpcompiler.tensor_parallel_transformation(exported, 1, 2, "cpu", p).graph) for p in plans]
    assert texts[0] == texts[1]


def test_a_rank_outside_the_world() -> None:
    exported = torch.export.export(Blocks(1), (torch.randn(10, 12),))
    with pytest.raises(tpcompiler.MeshError) as raised:
        tpcompiler.tensor_parallel_transformation(exported, 2, 2, "cpu", strategies(1, False))
    assert str(raised.value) == "rank 2 is outside the mesh tp=2 of 2 ranks\n  help: use a rank from 0 to 1"
