"""Optimizers whose step of an element depends on other elements: ranks that hold shares would step in other ways."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import row_sharding
from tpcompiler.runtime.records import Manifest

WHOLE = {
    "LBFGS": "products of all gradients",
    "Adafactor": "means of rows and columns",
    "Muon": "products of a whole matrix",
}


def forbid_on_shares(module: torch.nn.Module, manifest: Manifest) -> None:
    """Let torch's optimizers that need whole parameters raise in a step with one of which this rank has a share."""
    mesh = Mesh.of(manifest.mesh, manifest.factors)
    cut = {row.name for row in manifest.tensors if _is_cut(row, mesh)}
    shares = {id(value): name for name, value in module.named_parameters() if name in cut}
    if shares:
        hook = register_optimizer_step_pre_hook(functools.partial(_refuse, shares))
        weakref.finalize(module, hook.remove)


def _is_cut(row: Any, mesh: Mesh) -> bool:
    return any(mesh.size(by.axes) > 1 for by in row_sharding(row, mesh).dims)


def _refuse(shares: Mapping[int, str], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise UnsupportedError for an optimizer that needs the whole of one of these parameters."""
    bases = [each.__name__ for each in type(optimizer).__mro__ if f"{each.__module__}.".startswith("torch.optim.")]
    kind = next((each for each in bases if each in WHOLE), None)
    given = (id(each) for group in optimizer.param_groups for each in group["params"])
    name = next((shares[each] for each in given if each in shares), None)
    if kind is not None and name is not None:
        raise UnsupportedError(
            f"{kind} steps by {WHOLE[kind]}, and each rank holds a share of {name!r}",
            help="take an optimizer that steps each element by itself, such as AdamW, or replicate the parameters",
        )
