"""Options of an optimizer's groups, such as the learning rate, as an entry of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tpcompiler.errors import ArtifactError

OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")  # how a step is computed, not what it computes
NO_OPTIONS = ("params", "param_names")


class GroupOptions(dict[str, Any]):
    """`{"groups": (names of parameters, options) of each group}`; setting "groups" sets the optimizer's options.

    torch.distributed.checkpoint replaces what is no tensor, and never writes into it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self.optimizer, self.names = optimizer, names
        groups = tuple((tuple(self._names_of(group)), _options(group)) for group in optimizer.param_groups)
        super().__init__(groups=groups)

    def __setitem__(self, key: str, value: Any) -> None:
        """Set the options of each group to those that its parameters have in a checkpoint.

        Raises:
            ArtifactError: the parameters of a group had different options.
        """
        super().__setitem__(key, value)
        options = {name: own for names, own in value for name in names}
        for group in self.optimizer.param_groups:
            known = [name for name in self._names_of(group) if name in options]
            for name in known[1:]:
                if not _is_equal(options[name], options[known[0]]):
                    raise ArtifactError(
                        f"the parameters {known[0]!r} and {name!r} are in one group of the optimizer, and had "
                        f"different options when the checkpoint was written: {options[known[0]]} and {options[name]}",
                        help="make the optimizer with the groups that it had then",
                    )
            for option, each in options[known[0]].items() if known else ():
                old = group.get(option)
                if isinstance(old, torch.Tensor):
                    with torch.no_grad():
                        old.copy_(torch.as_tensor(each))  # a scheduler may hold it
                else:
                    group[option] = each

    def _names_of(self, group: Mapping[str, Any]) -> Iterable[str]:
        return (self.names[value] for value in group["params"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: each.detach().cpu() if isinstance(each, torch.Tensor) else each
        for key, each in group.items()
        if key not in (*NO_OPTIONS, *OF_THE_MACHINE) and _is_plain(each)
    }


def _is_plain(value: Any) -> bool:
    """Return False for values that are code, such as functions, which a checkpoint cannot hold."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | torch.Tensor)


def _is_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(each), torch.as_tensor(other[key]))
        if isinstance(each, torch.Tensor) or isinstance(other[key], torch.Tensor)
        else each == other[key]
        for key, each in one.items()
    )
