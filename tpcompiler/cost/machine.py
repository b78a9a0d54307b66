"""What a machine achieves: rates, floors of kernels, and links, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpcompiler.ir.mesh import Mesh

NCCL_BYTES = 4e8  # its buffers on each device; context and workspaces come out of the share that stays free
USABLE = 0.9  # of a device's memory


class Link(NamedTuple):
    """Seconds until the first byte of a collective, and for each step of its ring; bytes/s that a rank then sends."""

    latency: float
    bandwidth: float
    hop: float = 0.0

    def seconds(self, wire_bytes: float, steps: int = 0) -> float:
        return self.latency + self.hop * steps + wire_bytes / self.bandwidth


Links = Mapping[tuple[str, int], Sequence[Link]]


class Host(NamedTuple):
    """Seconds that the host takes to launch an operation and a collective; none in a CUDA graph."""

    operation: float = 0.0
    collective: float = 0.0


NO_HOST = Host()


@dataclass(frozen=True)
class Machine:
    """One device, and the links to others.

    Attributes:
        flops: FLOP/s of large matrix products.
        memory_bandwidth: bytes/s of products that read their weights once.
        memory: bytes of a device.
        links: by kind of collective and number of ranks; "" for all other kinds, 0 for all other numbers. Of several,
            the fastest counts.
        product: seconds that each matrix product takes on top of its bytes and FLOPs.
        attention: the same of an attention.
        other: the same of any other kernel (`cost/kernels.py`).
        view: the same of a view, where no compiler takes it away.
        fuses: a compiler makes kernels of several ops; without one every op is a kernel.
        cache_bandwidth: bytes/s of what another kernel has just written; 0 if it is as all memory.
        rows: the share of `flops` that products of so many rows reach; between two of them it is linear.
        ranks_per_node: ranks that are next to each other on one node; 0 if there is no other node.
        between_nodes: the links of groups that have ranks on several nodes.
        name: as it was asked for: "h100", or the path of a file.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    links: Links = field(default_factory=dict)
    product: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    view: float = 0.0
    fuses: bool = True
    cache_bandwidth: float = 0.0
    rows: Mapping[float, float] = field(default_factory=dict)
    host: Host = NO_HOST
    ranks_per_node: int = 0
    between_nodes: Links = field(default_factory=dict)
    name: str = ""

    @property
    def usable_memory(self) -> int:
        """Bytes of a device that a rank's weights, caches, inputs and activations may take."""
        return int(max(USABLE * self.memory - NCCL_BYTES, self.memory / 2))

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the fastest link."""
        return max(link.bandwidth for links in self.links.values() for link in links)

    def bandwidth_of(self, stored: bool) -> float:
        """Bytes/s of inputs and state, which are `stored`, or of what another kernel has just written."""
        return self.memory_bandwidth if stored or not self.cache_bandwidth else self.cache_bandwidth

    def links_of(self, kind: str, axes: Sequence[str], mesh: Mesh) -> Sequence[Link]:
        """The links that a collective over these axes may take: the most particular ones."""
        links, ranks = self.links, mesh.size(axes)
        if self.ranks_per_node and mesh.crosses(tuple(axes), self.ranks_per_node):
            links = self.between_nodes
        keys = ((kind, ranks), (kind, 0), ("", ranks), ("", 0))
        return next(links[key] for key in keys if key in links)

    def collective_seconds(self, kind: str, axes: Sequence[str], wire_bytes: float, mesh: Mesh) -> float:
        """Seconds of a collective over these axes, by the fastest of its links."""
        steps = (mesh.size(axes) - 1) * (2 if kind == "all_reduce" else 1)
        return min(link.seconds(wire_bytes, steps) for link in self.links_of(kind, axes, mesh))

    def flops_of(self, rows: float) -> float:
        """FLOP/s of products of so many rows."""
        if not self.rows:
            return self.flops
        at = sorted(self.rows)
        if rows <= at[0] or rows >= at[-1]:
            return self.flops * self.rows[at[0] if rows <= at[0] else at[-1]]
        upper = next(each for each in at if each >= rows)
        lower = at[at.index(upper) - 1]
        share = (rows - lower) / (upper - lower)
        return self.flops * (self.rows[lower] * (1 - share) + self.rows[upper] * share)
