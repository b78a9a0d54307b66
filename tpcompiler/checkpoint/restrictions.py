"""Restrictions of a module loaded for training: its submodules, copies, and optimizers that need whole parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpcompiler.checkpoint.load import MODE, TWO, refuse_mode
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.runtime.records import Manifest

# Their step of an element depends on other elements: ranks that hold shares would step in other ways.
WHOLE = {
    "LBFGS": "products of all gradients",
    "Adafactor": "means of rows and columns",
    "Muon": "products of a whole matrix",
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Structure:
    """The submodules, parameters and buffers of a module, as they were loaded.

    The module is one program: changes of its submodules would have no effect.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.modes = {name: each.training for name, each in self._submodules()}
        self.parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.names = {*self.parameters, *(name for name, _ in module.named_buffers(remove_duplicate=False))}

    def _submodules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((name, each) for name, each in self.module.named_modules() if name)

    def refuse_changes(self) -> None:
        """Refuse to call the module if it is not as it was loaded, in more than the values of its tensors.

        Raises:
            UnsupportedError: a submodule has hooks, another mode, or other tensors.
        """
        for name, each in self._submodules():
            if any(getattr(each, hooks) for hooks in HOOKS):
                raise UnsupportedError(
                    f"the submodule {name!r} has a hook, and a loaded module does not call its submodules",
                    help="remove it, and compute in the model what it computes, or put it on the loaded module",
                )
            if each.training != self.modes.get(name, each.training):
                now, before = ("train" if training else "eval" for training in (each.training, not each.training))
                raise UnsupportedError(f"the submodule {name!r} was set from {before} to {now}: {MODE}", help=TWO)
        held = dict(self.module.named_parameters(remove_duplicate=False))
        present = {*held, *(name for name, _ in self.module.named_buffers(remove_duplicate=False))}
        if missing := sorted(self.names - present):
            raise UnsupportedError(
                f"the module has no tensor {missing[0]!r} any more, which its program reads",
                help="export the model again with what was put in its place, such as a parametrization",
            )
        for name in self.parameters:
            if not isinstance(held.get(name), torch.nn.Parameter):
                raise UnsupportedError(
                    f"{name!r} is not a parameter now, as in a torch.func.functional_call, and a module loaded for "
                    "training computes gradients of its parameters alone",
                    help="copy the values into the parameters, and call the module itself",
                )


def forbid_copies_and_modes(module: Any) -> None:
    """Let the module, whose class is its own, refuse to be copied, pickled, and set to train or eval."""
    module.__deepcopy__ = type(module).__copy__ = type(module).__reduce_ex__ = _refuse_copy
    module.train = module.eval = refuse_mode


def _refuse_copy(*_: Any) -> Any:
    raise UnsupportedError(
        "a module loaded for training cannot be copied or pickled: its halves are on its own parameters",
        help="load the artifact again, and copy the values of parameters and buffers",
    )


def forbid_on_shares(module: torch.nn.Module, manifest: Manifest) -> None:
    """Let torch's optimizers that need whole parameters raise in a step with one of which this rank has a share."""
    mesh = mesh_of(manifest)
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
