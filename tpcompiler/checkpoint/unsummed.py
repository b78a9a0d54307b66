"""Gradients that are not summed over ranks yet: those of backwards in `no_sync`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpcompiler._torch import c10d_functional
from tpcompiler.ir.buckets import BUCKET
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.runtime.agree import named_failures
from tpcompiler.runtime.records import Manifest
from tpcompiler.runtime.turns import taking_turns
from tpcompiler.runtime.world import own_rank

Group = tuple[str, int]  # name and size


class Unsummed:
    """The parameters whose gradient is the mean of those that the ranks of a group hold; of programs that share them.

    A rank holds its own part of a sum, times the size of the group. So the mean is right of all that is equal on all
    ranks, such as gradients that are summed already, and of what is linear: zeros, scales, sums.
    """

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.groups = {name: ranks for manifest in manifests for name, ranks in manifest.groups.items()}
        self.parameters: dict[tuple[torch.nn.Parameter, Group], None] = {}
        hook = register_optimizer_step_pre_hook(functools.partial(_before_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def add(self, parameters: Iterable[tuple[torch.nn.Parameter, Group]]) -> None:
        """Note parameters to whose gradients a backward adds parts of sums."""
        self.parameters |= dict.fromkeys(parameters)

    @torch.no_grad()
    def sum(self, only: Collection[int] | None = None) -> None:
        """Replace the gradients by their means, in place, or those of some by their `id`; all ranks must call it."""
        chosen = [key for key in self.parameters if only is None or id(key[0]) in only]
        if not chosen:
            return
        buckets: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter, group in chosen:
            gradient = parameter if parameter.grad is None else parameter.grad
            buckets.setdefault((group, gradient.dtype), []).append(parameter)
        with taking_turns(self.groups), named_failures(self.groups):
            for ((name, size), _), parameters in buckets.items():
                parts = [torch.zeros_like(p) if p.grad is None else p.grad / size for p in parameters]
                sums = BUCKET([part.contiguous() for part in parts], "sum", name)
                for parameter, each in zip(parameters, sums, strict=True):
                    made = c10d_functional.wait_tensor.default(each)
                    if parameter.grad is not None:
                        parameter.grad.copy_(made)
        for key in chosen:
            del self.parameters[key]

    def sum_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum what an optimizer would use: ranks that step by their own parts have other parameters from then on."""
        self.sum({id(each) for group in optimizer.param_groups for each in group["params"]})


def _before_step(
    reference: weakref.ref[Unsummed], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Sum gradients before a step, and again behind each call of its closure, whose backwards may leave out sums."""
    unsummed = reference()
    if unsummed is None:
        return None
    unsummed.sum_for(optimizer)
    at = next((at for at, each in enumerate(args) if at and callable(each)), None)
    closure = kwargs.get("closure") if at is None else args[at]
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def summing(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        unsummed.sum_for(optimizer)
        return result

    if at is None:
        return args, {**kwargs, "closure": summing}
    return (*args[:at], summing, *args[at + 1 :]), kwargs


def groups_of_sums(last_sums: Mapping[str, str], manifest: Manifest) -> dict[str, Group]:
    """Return the groups over which gradients can be summed later: those whose ranks hold the same of the parameter."""
    mesh, rank = mesh_of(manifest), own_rank(manifest)
    rows = {row.name: row for row in manifest.tensors}

    def share(name: str, rank: int) -> list[Any]:
        row, here = rows[name], mesh.coordinate(rank)
        return [by.runs(size, mesh, here) for by, size in zip(row_sharding(row, mesh).dims, row.shape, strict=True)]

    found = {}
    for name, group in last_sums.items():
        ranks = next(own for own in manifest.groups[group] if rank in own)
        if all(share(name, other) == share(name, rank) for other in ranks):
            found[name] = (group, len(ranks))
    return found
