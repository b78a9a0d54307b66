"""A loaded module in training is one program: changes of its submodules after `load` would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tpcompiler.errors import UnsupportedError
from tpcompiler.runtime.load_programs import MODE, TWO, refuse_mode

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Structure:
    """The submodules, parameters and buffers of a module, as they were loaded."""

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
