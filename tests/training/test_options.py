"""Options of an optimizer's groups in a checkpoint, and the state that is made before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tpcompiler
from tests.training.test_steps import group_of_one as group_of_one
from tests.training.test_ways import Counting, batches, saved
from tests.training.ways import step
from tpcompiler.checkpoint.distributed import _make_state
from tpcompiler.errors import ArtifactError


class Noisy(torch.optim.SGD):
    """Langevin dynamics: noise in every parameter, also in those without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for value in (each for group in self.param_groups for each in group["params"]):
            value.add_(torch.randn_like(value), alpha=0.01)


def halving(values: Any, lr: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(values, lr=lr)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


OPTIONS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "a schedule": lambda values: halving(values, 0.1),
    "a rate as a tensor": lambda values: halving(values, torch.tensor(0.1)),
    "a count": lambda values: (Counting(values, True), None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_groups_are_in_the_checkpoint(name: str, tmp_path: Path, group_of_one: None) -> None:
    """Steps go on with the learning rate, and the number of steps, that the optimizer had when it was written."""
    saved(tmp_path / "out", {"tp": 1})

    def begin() -> tuple[Any, Any, Any]:
        module = tpcompiler.load(tmp_path / "out", training=True)
        return (module, *OPTIONS[name](module.parameters()))

    def advance(module: Any, optimizer: Any, schedule: Any) -> dict[str, torch.Tensor]:
        for x in batches()[:2]:
            step(module, optimizer, x)
            if schedule is not None:
                schedule.step()
        return {key: value.detach().clone() for key, value in module.named_parameters()}

    module, optimizer, schedule = begin()
    advance(module, optimizer, schedule)
    dcp.save({"all": module.distributed_state(optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    read = begin()
    dcp.load({"all": read[0].distributed_state(read[1])}, checkpoint_id=tmp_path / "checkpoint")
    if schedule is not None:
        read[2].load_state_dict(schedule.state_dict())
    torch.testing.assert_close(advance(*read), advance(module, optimizer, schedule), rtol=0, atol=0)
    groups = [{"params": [each]} for each in read[0].parameters()]
    groups[0]["eps"] = 0.5
    state = read[0].distributed_state(torch.optim.AdamW(groups))
    with pytest.raises(ArtifactError, match="in one group of the optimizer, and had different options"):
        read[0].distributed_state(torch.optim.AdamW(read[0].parameters()))["options"]["groups"] = state["options"][
            "groups"
        ]


def test_asking_for_state_changes_nothing() -> None:
    """Neither parameters nor generators, also if a step changes them without a gradient or without a rate."""
    value = nn.Parameter(torch.ones(3))
    optimizer, before = Noisy([value], lr=0.1, momentum=0.9), torch.random.get_rng_state()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    memory = value.data_ptr()
    _make_state(optimizer, [value])
    assert torch.equal(value, torch.ones(3))
    assert value.data_ptr() == memory
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        schedule.step()
