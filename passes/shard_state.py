"""Shard parameters, buffers and constants for one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpcompiler._torch import FakeTensor
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.program import LocalProgram, ShardedProgram, tied
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import cut

Hollow = dict[Any, torch.Tensor]


def shard_state(
    program: LocalProgram, rank: int, numbers: Mapping[str, Sequence[int]], hollow: Hollow
) -> ShardedProgram:
    """Give the rank its share of every leaf, and its rank numbers.

    Before    up.weight: f32[8, 4] S(0), down.bias: f32[4] P(sum)     rank 1 of 2
    After     up.weight: f32[4, 4] (rows 4 to 8), down.bias: zeros    the sum over ranks is the bias, added once

    A shard owns its memory; a replicated leaf is the original tensor itself; tied leaves stay one tensor. `hollow`
    caches the shares of leaves without values across calls: those of equal shapes are the same.
    """
    first_of = tied(program)
    shares: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for node, fqn in program.leaves():
        first = first_of[node.name]
        if first not in shares:
            value, sharding = program.state(fqn), placement_of(node).shardings[0]
            if isinstance(value, FakeTensor) and not sharding.is_replicated:
                shares[first] = _hollow(fqn, value, edit.fake(node), hollow)
            else:
                shares[first] = _plain(_share(value, sharding, program.mesh, rank))
        state[fqn] = shares[first]
    state.update({name: torch.tensor([row]) for name, row in numbers.items()})
    return ShardedProgram(program.source, program.graph, program.mesh, rank, state)


def _share(value: torch.Tensor, sharding: Sharding, mesh: Mesh, rank: int) -> torch.Tensor:
    if sharding.is_replicated:
        return value
    part = cut(value.detach(), sharding, mesh, rank).clone()
    return (
        torch.nn.Parameter(part, requires_grad=value.requires_grad) if isinstance(value, torch.nn.Parameter) else part
    )


def _hollow(fqn: str, value: FakeTensor, local: torch.Tensor, hollow: Hollow) -> torch.Tensor:
    cache_key = fqn, tuple(local.shape)
    if cache_key not in hollow:
        is_parameter = isinstance(value, torch.nn.Parameter)
        hollow[cache_key] = torch.nn.Parameter(local, value.requires_grad) if is_parameter else local.detach()
    return hollow[cache_key]


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Return a conjugated or negated view as plain memory, because a file does not record these flags."""
    if not (value.is_conj() or value.is_neg()):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
