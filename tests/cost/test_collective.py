"""Bytes on the wire, against the formulas and against a ring that counts what it sends."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler.cost.collective import KINDS, wire_bytes
from tpcompiler.cost.path import reshard_wire_bytes
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import read_sharding


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 1200),
        ("all_reduce", 4, 1800),
        ("all_gather", 4, 900),
        ("reduce_scatter", 4, 900),
        ("all_to_all", 4, 900),
        ("all_gather", 1, 0),
    ],
)
def test_wire_bytes_of_1200(kind: str, size: int, expected: int) -> None:
    assert kind in KINDS
    assert wire_bytes(kind, 1200, size) == expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_sends_that_much(size: int) -> None:
    """n - 1 steps of one n-th of the payload; an all_reduce is a reduce_scatter and an all_gather."""
    payload = 24 * size
    sent = sum(payload // size for _ in range(size - 1))
    assert wire_bytes("all_gather", payload, size) == wire_bytes("reduce_scatter", payload, size) == sent
    assert wire_bytes("all_reduce", payload, size) == 2 * sent
    own = payload // size  # of an all_to_all: each of the others gets its part of what a rank holds
    assert wire_bytes("all_to_all", own, size) == sum(own // size for _ in range(size - 1))


def bytes_between(source: Placement, target: Placement) -> int:
    mesh = Mesh((("tp", 4),))
    a, b = (Sharding.of(p, mesh, 2, "a test") for p in (source, target))
    return reshard_wire_bytes(a, b, (8, 16), 4, mesh)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Replicate(), Replicate(), 0),
        (Replicate(), Shard(0), 0),
        (Replicate(), Partial(), 0),
        (Shard(0), Shard(0), 0),
        (Shard(0), Replicate(), 384),
        (Shard(0), Shard(1), 96),
        (Shard(0), Partial(), 384),
        (Partial(), Replicate(), 768),
        (Partial(), Shard(1), 384),
        (Partial(), Partial(), 0),
        (Partial("max"), Replicate(), 768),
        (Partial(), Partial("max"), 768),
    ],
)
def test_a_change_of_512_bytes(source: Placement, target: Placement, expected: int) -> None:
    """Over four ranks: cutting what is whole is free, and so is to call it a share of a sum."""
    assert bytes_between(source, target) == expected


def test_other_units_go_through_the_whole_tensor() -> None:
    mesh = Mesh((("tp", 2),))
    plain, heads = (Sharding((DimSharding.by("tp", unit=unit), WHOLE)) for unit in (1, 2))
    assert reshard_wire_bytes(plain, heads, (6, 4), 4, mesh) == 48
    assert reshard_wire_bytes(heads, heads, (6, 4), 4, mesh) == 0


def test_every_axis_counts() -> None:
    mesh = Mesh((("dp", 2), ("tp", 4)))
    spec = {"dp": Shard(0), "tp": Partial()}
    source, whole = Sharding.of(spec, mesh, 2, "a test"), Sharding.replicated(2)
    assert reshard_wire_bytes(source, whole, (8, 16), 4, mesh) == 384 + 256  # what is reduced is half of it


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [("S(0, block 4)", "S(0)", 384), ("S(0, block 4)", "S(0, block 4)", 0), ("S(0, block 4)", "S(1)", 96)],
)
def test_other_blocks_are_other_elements(source: str, target: str, expected: int) -> None:
    mesh = Mesh((("tp", 4),))
    a, b = (read_sharding(text, mesh, 2) for text in (source, target))
    assert reshard_wire_bytes(a, b, (8, 16), 4, mesh) == expected
