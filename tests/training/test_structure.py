"""Changes of a loaded module that its program would not see are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tpcompiler
from tests.passes.stages import Call
from tests.training.test_steps import group_of_one as group_of_one
from tpcompiler.errors import UnsupportedError

X = torch.randn(4, 8)

CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "eval of a submodule": (lambda module: module.norm.eval(), "'norm' was set from train to eval"),
    "eval": (lambda module: module.eval(), "cannot be set to train or eval"),
    "forward hook": (lambda module: module.a.register_forward_hook(lambda *_: None), "submodule 'a' has a hook"),
    "backward hook": (lambda module: module.a.register_full_backward_hook(lambda *_: None), "submodule 'a' has a hook"),
    "parametrization": (lambda module: parametrizations.weight_norm(module.a), r"no tensor 'a\.weight' any more"),
    "functional call": (
        lambda module: torch.func.functional_call(module, {"a.bias": torch.ones(8)}, (X,)),
        r"'a\.bias' is not a parameter now",
    ),
    "copy": (copy.copy, "cannot be copied"),
    "pickle": (pickle.dumps, "cannot be copied or pickled"),
}


def test_changes_after_load(tmp_path: Path, group_of_one: None) -> None:
    model = Call(
        lambda self, x: self.norm(self.a(x)).square().mean(), a=nn.Linear(8, 8), norm=nn.BatchNorm1d(8)
    ).train()
    tpcompiler.parallelize(tpcompiler.export_training(model, (X,)), 1, {}).save(tmp_path / "out")
    for change, message in CHANGES.values():
        module = tpcompiler.load(tmp_path / "out", training=True)

        def change_and_call(module: Any = module, change: Any = change) -> None:
            change(module)
            module(X)

        with pytest.raises(UnsupportedError, match=message):
            change_and_call()
    module = tpcompiler.load(tmp_path / "out", training=True)
    module.norm.eval()
    module.norm.train()
    module.register_forward_hook(lambda module, args, loss: 3 * loss)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    torch.testing.assert_close(module(X), 3 * model(X))
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"inference_mode\(\) is on"):
        tpcompiler.load(tmp_path / "out", training=True)
