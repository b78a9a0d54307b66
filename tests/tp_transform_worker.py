"""One of 2 ranks: torch's own scenarios for its tensor-parallel transformation, through ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tpcompiler import PlanError, parallelize, tensor_parallel_transformation


class Blocks(torch.nn.Module):
    def __init__(self, count: int, bias: bool = True) -> None:
        super().__init__()
        self.mlps = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 18), torch.nn.ReLU(), torch.nn.Linear(18, 6, bias=bias))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.chunk(2, dim=1)[0]
        for mlp in self.mlps:
            x = mlp(x)
        return x + torch.ones_like(x)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 5)
        self.bn = torch.nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.fc(x))


def strategies(count: int, instances: bool) -> dict[str, Any]:
    make = (lambda c: c()) if instances else (lambda c: c)
    out: dict[str, Any] = {}
    for i in range(count):
        out |= {f"mlps.{i}.0": make(ColwiseParallel), f"mlps.{i}.2": make(RowwiseParallel)}
    return out


def check(model: torch.nn.Module, x: torch.Tensor, plan: dict[str, Any], counts: dict[str, int]) -> None:
    """Equal results, torch's collective counts, the group's own name; decomposed or not."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    exported = torch.export.export(model, (x,), strict=True)
    with torch.no_grad():
        expected = model(x)
    after = {name: value.clone() for name, value in model.named_buffers()}
    for name, value in model.named_buffers():
        value.copy_(buffers[name])
    for program in (exported, exported.run_decompositions()):
        ours = tensor_parallel_transformation(program, dist.get_rank(), dist.get_world_size(), "cpu", plan)
        calls = [n for n in ours.graph.nodes if n.op == "call_function" and "c10d" in str(n.target)]
        assert Counter(str(n.target).split(".")[1] for n in calls) == counts, calls
        assert all(n.args[-1] == dist.group.WORLD.group_name for n in calls if "wait" not in str(n.target))
        module = ours.module()
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected)
        for name, value in module.named_buffers():
            torch.testing.assert_close(value, own_share(after[name], value))
            value.copy_(own_share(buffers[name], value))


def own_share(whole: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Of a whole buffer what this rank holds: statistics of channels that are cut are cut too."""
    return whole if whole.shape == held.shape else whole.chunk(dist.get_world_size())[dist.get_rank()]


def state() -> tuple[Any, ...]:
    world = dist.distributed_c10d._world
    probe = torch.ones(1)
    dist.all_reduce(probe)
    return (
        dist.get_rank(),
        dist.get_world_size(),
        len(world.pg_map),
        dict(world.pg_names),
        world.group_count,
        probe.item(),
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    check(Blocks(2), torch.randn(10, 12), strategies(2, False), {"all_reduce": 2, "wait_tensor": 2})
    check(Blocks(1, bias=False), torch.randn(10, 12), strategies(1, True), {"all_reduce": 1, "wait_tensor": 1})
    for train in (True, False):
        model = Normed().train(train)
        torch.nn.init.normal_(model.bn.weight)
        check(model, torch.randn(7, 3), {"fc": ColwiseParallel}, {"all_gather_into_tensor": 1, "wait_tensor": 1})

    before = state()
    exported = torch.export.export(Blocks(1), (torch.randn(10, 12),))
    x = torch.randn(10, 12)
    for world in (4,):  # another size than this group's, offline beside it
        assert parallelize(exported, world, strategies(1, False)).verify((x,)).ok
        try:
            parallelize(exported, world, {"mlps.7.0": ColwiseParallel})
        except PlanError:
            pass
        else:
            raise AssertionError("a plan entry that matches nothing was accepted")
    assert state() == before
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
