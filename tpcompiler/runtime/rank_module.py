"""The type of what `tpcompiler.load` returns, for type checkers and editors: no instance is made of it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.export import ExportedProgram


class RankModule(torch.nn.Module):
    """A rank's program: call it like the model. Of several programs, a dict of them by name.

    Attributes:
        exported_program: the rank's program.
        leaf_names: of each rank of a process that runs several, the names of the rank's tensors here.
        group_names: the process groups whose ranks call it together.
        saved_bytes: with `training`, what the forward leaves to the backward.
    """

    exported_program: ExportedProgram
    leaf_names: list[dict[str, str]]
    group_names: list[str]
    saved_bytes: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave out the last sums of gradients over ranks in backwards of the block; with `training`."""
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that the norm of all ranks' together is at most `max_norm`; with `training`."""
        raise NotImplementedError

    def distributed_state(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, dict[str, Any]]:
        """Return the state that torch.distributed.checkpoint saves and loads; with `training`."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> RankModule:
        """Return the program of this name, of several."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of several programs."""
        raise NotImplementedError

    def items(self) -> ItemsView[str, RankModule]:
        """Return several programs with their names."""
        raise NotImplementedError
