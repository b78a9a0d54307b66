"""Machines: achieved rates, floors of kernels, and links, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tpcompiler.cost.collective import wire_bytes
from tpcompiler.ir.mesh import Mesh
from tpcompiler.runtime.records import Collectives

NCCL_BYTES = 4e8  # NCCL's buffers on each device; context and workspaces come out of the unusable share
USABLE = 0.9  # share of a device's memory
DTYPES = ("int8", "int8_weights", "float8", "float8_weights")  # of both operands of a product, or of its weights alone


class Link(NamedTuple):
    """Seconds until a collective's first byte and for each step of its ring, and the bytes/s that a rank then sends."""

    latency: float
    bandwidth: float
    hop: float = 0.0

    def seconds(self, wire_bytes: float, steps: int = 0) -> float:
        return self.latency + self.hop * steps + wire_bytes / self.bandwidth


Links = Mapping[tuple[str, int], Sequence[Link]]


class Host(NamedTuple):
    """Seconds for the host to launch an operation and a collective; 0 in a CUDA graph."""

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
        links: by kind of collective and number of ranks; "" for all other kinds, 0 for all other numbers. The fastest
            of several counts.
        product: seconds of each matrix product on top of its bytes and FLOPs.
        attention: likewise, of each attention.
        other: likewise, of each other kernel (`cost/fusion.py`).
        view: likewise, of each view, if no compiler removes views.
        fuses: True if a compiler makes kernels of several ops; else every op is a kernel.
        cache_bandwidth: bytes/s of values that another kernel just wrote; 0 if it equals the memory's.
        rows: number of rows -> the share of `flops` that products of so many rows reach; linear in between.
        dtypes: by one of `DTYPES`, the `flops`, `memory_bandwidth` and `product` that differ for its products.
        symm_mem: links of an all_reduce over symmetric memory, as `links`; other collectives have none.
        collectives: the choice for an all_reduce: `links`, `symm_mem`, or the faster one.
        ranks_per_node: ranks next to each other on one node; 0 if there is only one node.
        between_nodes: links of groups that span several nodes.
        name: the requested name: "h100", or the path of a file.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    links: Links = field(default_factory=dict, hash=False)
    product: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    view: float = 0.0
    fuses: bool = True
    cache_bandwidth: float = 0.0
    rows: Mapping[float, float] = field(default_factory=dict, hash=False)
    dtypes: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    host: Host = NO_HOST
    symm_mem: Links = field(default_factory=dict, hash=False)
    collectives: Collectives = "nccl"
    ranks_per_node: int = 0
    between_nodes: Links = field(default_factory=dict, hash=False)
    name: str = ""

    @property
    def usable_memory(self) -> int:
        """Bytes of a device that are available for weights, caches, inputs and activations."""
        return int(max(USABLE * self.memory - NCCL_BYTES, self.memory / 2))

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the fastest link."""
        return max(link.bandwidth for links in self.links.values() for link in links)

    def of(self, dtype: str) -> Machine:
        """Return the machine with the rates for products of such operands."""
        own: Mapping[str, Any] = self.dtypes.get(dtype, {})
        return replace(self, **own) if own else self

    def bandwidth_of(self, stored: bool) -> float:
        """Return bytes/s of inputs and state, which are `stored`, or of values that another kernel just wrote."""
        return self.memory_bandwidth if stored or not self.cache_bandwidth else self.cache_bandwidth

    def links_of(self, kind: str, axes: Sequence[str], mesh: Mesh) -> Sequence[Link]:
        """Return the links for a collective over these axes, by the most specific entry."""
        ranks = mesh.size(axes)
        keys = ((kind, ranks), (kind, 0), ("", ranks), ("", 0))

        def find(links: Links) -> Sequence[Link]:
            return next((links[key] for key in keys if key in links), ())

        if self.ranks_per_node and mesh.crosses(tuple(axes), self.ranks_per_node):
            return find(self.between_nodes)
        is_fitted = kind == "all_reduce" and self.collectives != "nccl"
        fitted = find(self.symm_mem) if is_fitted else ()
        return fitted if fitted and self.collectives == "symm_mem" else [*fitted, *find(self.links)]

    def collective_seconds(self, kind: str, axes: Sequence[str], wire_bytes: float, mesh: Mesh) -> float:
        """Return the seconds of a collective over these axes, by the fastest of its links."""
        steps = (mesh.size(axes) - 1) * (2 if kind == "all_reduce" else 1)
        return min(link.seconds(wire_bytes, steps) for link in self.links_of(kind, axes, mesh))

    def transfer_seconds(self, sent_bytes: float) -> float:
        """Return the seconds in which a rank sends bytes to one of another world: between nodes, if there are several.

        A transfer is taken for an exchange in a group of two.
        """
        links = self.between_nodes or self.links
        keys = (("all_to_all", 2), ("", 2), ("all_to_all", 0), ("", 0))
        found: Sequence[Link] = next((links[key] for key in keys if key in links), ())
        return min((link.seconds(sent_bytes, 1) for link in found), default=0.0)

    def using(self, collectives: Collectives) -> Machine:
        """Return the machine for programs that are converted with these collectives."""
        return self if collectives == "nccl" else replace(self, collectives=collectives)

    def prefers_symm_mem(self, kind: str, axes: Sequence[str], payload: int, mesh: Mesh) -> bool:
        """Return True if a collective of `payload` bytes is faster over symmetric memory than by NCCL."""
        sent = wire_bytes(kind, payload, mesh.size(axes))
        both = (replace(self, collectives=each) for each in ("symm_mem", "nccl"))
        fitted, plain = (each.collective_seconds(kind, axes, sent, mesh) for each in both)
        return fitted < plain

    def most_by_symm_mem(self, kind: str, axes: Sequence[str], mesh: Mesh) -> int:
        """Return the largest payload that is faster over symmetric memory, or 0."""
        least, most = 0, 1 << 40
        while most - least > 1:
            payload = (least + most) // 2
            if self.prefers_symm_mem(kind, axes, payload, mesh):
                least = payload
            else:
                most = payload
        return least

    def flops_of(self, rows: float) -> float:
        """Return the FLOP/s of products of so many rows."""
        if not self.rows:
            return self.flops
        at = sorted(self.rows)
        if rows <= at[0] or rows >= at[-1]:
            return self.flops * self.rows[at[0] if rows <= at[0] else at[-1]]
        upper = next(each for each in at if each >= rows)
        lower = at[at.index(upper) - 1]
        share = (rows - lower) / (upper - lower)
        return self.flops * (self.rows[lower] * (1 - share) + self.rows[upper] * share)
