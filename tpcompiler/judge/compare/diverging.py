"""Find the first value of a program that is wrong on some rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.node_placement import Claim, claims_of
from tpcompiler.ir.shares import join, read_sharding
from tpcompiler.judge.compare.judge import FLOOR, SPREAD, is_rounded, largest_difference, scale_and_noise
from tpcompiler.judge.compare.simulate import Seen, simulate


class Run(NamedTuple):
    """Programs with the flat inputs and the written buffers that a call of them starts from, one each."""

    programs: Sequence[Any]
    inputs: Sequence[Sequence[Any]]
    state: Sequence[Mapping[str, torch.Tensor]]

    def watch(self, seen: Seen) -> None:
        """Run the programs in lock step, and call `seen(rank, node, value)` for every value."""
        simulate(self.programs, self.inputs, state=self.state, seen=seen)


def find_first_diverging(single: Run, exact: Run, ranks: Run, mesh: Mesh) -> str | None:
    """Return the first value whose claim (origin and sharding) is wrong, by name and source.

    Args:
        single: the program whose nodes the claims name as origins, on one device.
        exact: the same in float64, which tells how far rounding takes each value.
        ranks: all ranks.
        mesh: the mesh of the claims.
    """
    wanted: dict[str, torch.Tensor] = {}
    errors: dict[str, tuple[float, float]] = {}

    def keep(_: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and node.op == "call_function":
            wanted[node.name] = value.cpu()

    single.watch(keep)

    def measure(_: int, node: fx.Node, value: Any) -> None:
        if node.name in wanted and is_rounded(wanted[node.name]):
            errors[node.name] = scale_and_noise(wanted[node.name], value.cpu())

    exact.watch(measure)
    # Padding of uneven shards appears in some graphs only and shifts the names of later nodes; claims stay the same.
    claims = [_claimed(program.graph) for program in ranks.programs]
    parts: dict[Any, dict[int, Any]] = {}

    def collect(rank: int, node: fx.Node, value: Any) -> None:
        if node in claims[rank] and isinstance(value, torch.Tensor):
            parts.setdefault(claims[rank][node][0], {})[rank] = value.cpu()

    ranks.watch(collect)
    for node, (name, claim) in claims[0].items():
        have = parts.get(name, {})
        origin = claim.origin or ""
        if len(have) != len(ranks.programs) or origin not in wanted:
            continue
        want = wanted[origin]
        text = (claim.sharding or [""])[0]
        try:
            sharding = read_sharding(text, mesh, want.ndim)
            if sharding.has_spans:  # its shares overlap, and may leave elements out
                continue
            whole = join([have[r] for r in sorted(have)], sharding, mesh, want.shape)
        except (RuntimeError, ValueError):
            return f"'{node.name}' ({node.target}, claimed {text}) has shapes that do not fit together"
        if not want.numel():
            continue
        scale, noise = errors.get(origin, (1.0, 0.0))
        limit = max(SPREAD * noise, FLOOR * 1.2e-7)
        if any(largest_difference(w, want) / scale > limit for w in whole):
            reason = claim.reshard_reason or claim.reason or ""
            return f"'{node.name}' ({node.target}, claimed {text}); {reason}"
    return None


def _claimed(graph: fx.Graph) -> dict[fx.Node, tuple[Any, Claim]]:
    """Return every node that claims a sharding, with a name that is the same in the graphs of all ranks."""
    counts: Counter[Any] = Counter()
    found = {}
    for node, claim in claims_of(graph):
        if claim.sharding:
            key = (claim.origin, claim.reshard, *claim.sharding)
            found[node] = (*key, counts[key]), claim
            counts[key] += 1
    return found
