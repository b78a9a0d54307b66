"""A plan that is read off the model."""

from __future__ import annotations

import pytest
from torch import nn

from tests.zoo.case import hugging_face


class Model(nn.Module):
    def __init__(self, tp_plan: dict[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
        self.head = nn.Linear(2, 2)
        self.tp_plan = tp_plan


def test_entries_for_layers_that_are_not_there_are_left_out() -> None:
    plan = {
        "layers.*.0": "colwise",
        "layers.*.1": "rowwise",
        "layers.*": "replicate",
        "head": "colwise",
        "tail": "gather",
    }
    assert hugging_face(Model(plan)) == {"layers.*.0": "colwise", "layers.*": "replicate", "head": "colwise"}


def test_a_plan_for_the_head_alone_is_none() -> None:
    with pytest.raises(ValueError, match="Model has no tp_plan"):
        hugging_face(Model({"head": "colwise", "tail": "gather"}))
