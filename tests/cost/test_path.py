"""The cheapest path between shardings, against torch's own plan of the same change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Shard

# Private, and only here: nothing public says which steps `redistribute` takes.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached, _TransformInfo

from tests.ir.drawn import GRID, Cut, cuts, levels
from tests.long import some
from tests.torchs_changes import traced_mesh
from tpcompiler.cost import path
from tpcompiler.cost.collective import wire_bytes
from tpcompiler.cost.machine import Link, Machine
from tpcompiler.cost.path import WIRE, Step, cheapest_path, reshard_wire_bytes, steps_along, steps_between
from tpcompiler.ir.dim_sharding import WHOLE, DimSharding
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import format_placement
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import read_sharding

SHAPE, ITEM = (16, 24, 8), 4
MESHES = [Mesh((("dp", 2), ("tp", 2))), Mesh((("dp", 2), ("tp", 4)))]
KINDS = ("R", "S(0)", "S(1)", "S(2)", "P(sum)")
TEXTS = [f"[{dp}, {tp}]" for dp in KINDS for tp in KINDS] + [f"[S({d}), S({d}, outside dp)]" for d in range(3)]


def path_text(steps: Sequence[Step], mesh: Mesh) -> str:
    """Print the path as torch prints its own: `S(0)S(0)->RS(0)->RR`."""
    states = [steps[0].source, *(step.target for step in steps)]
    return "->".join("".join(format_placement(p) for p in state.placements(mesh)) for state in states)


@lru_cache
def torchs(mesh: Mesh) -> DeviceMesh:
    return traced_mesh([degree for _, degree in mesh.axes], mesh.names)


def spec(sharding: Sharding, mesh: Mesh) -> DTensorSpec:
    order = tuple(
        ShardOrderEntry(d, tuple(mesh.names.index(axis) for axis in cut.axes))
        for d, cut in enumerate(sharding.dims)
        if cut.axes
    )
    meta = TensorMeta(torch.Size(SHAPE), torch.empty(SHAPE, device="meta").stride(), torch.float32)
    return DTensorSpec(torchs(mesh), sharding.placements(mesh), meta, shard_order=cast(ShardOrder, order))


def torch_wire_bytes(source: Sharding, target: Sharding, mesh: Mesh, *, searched: bool) -> int:
    """What torch's steps send: its default plan, or the shortest path that it searches when told to."""
    steps = _gen_transform_infos_non_cached(spec(source, mesh), spec(target, mesh), searched)
    now, total = list(source.placements(mesh)), 0
    for step in steps:
        before = local_bytes(now, mesh)
        assert now[step.mesh_dim] == step.src_dst_placements[0]
        now[step.mesh_dim] = step.src_dst_placements[1]
        kind = kind_of(step)
        if kind is not None:
            degree = mesh.axes[step.mesh_dim][1]
            padded = {
                "all_gather": before * degree,
                "reduce_scatter": local_bytes(now, mesh) * degree,
            }  # to even shards
            total += wire_bytes(kind, padded.get(kind, before), degree)
    assert tuple(now) == target.placements(mesh)
    return total


def kind_of(step: _TransformInfo) -> str | None:
    """The collective of a step; S(i) -> S(j) as torch does it on a GPU (on CPU it gathers)."""
    source, target = step.src_dst_placements
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Shard) else "all_reduce" if target.is_replicate() else None
    if isinstance(source, Shard):
        return "all_to_all" if isinstance(target, Shard) else "all_gather"
    return None


def local_bytes(placements: list[Placement], mesh: Mesh) -> int:
    here = Sharding.of(dict(zip(mesh.names, placements, strict=True)), mesh, len(SHAPE), "a test")
    return torch.Size(here.local_shape(SHAPE, mesh, mesh.coordinate(0))).numel() * ITEM


def more_than_torch(mesh: Mesh, ours: dict[tuple[str, str], int]) -> list[str]:
    """The changes for which torch sends less than we do."""
    found = []
    for (a, b), sent in ours.items():
        source, target = read_sharding(a, mesh, 3), read_sharding(b, mesh, 3)
        for searched in (False, True):
            its = torch_wire_bytes(source, target, mesh, searched=searched)
            if sent > its:
                found.append(f"{a} -> {b}: {sent}, torch {'searched' if searched else 'by default'} {its}")
    return found


def all_bytes(mesh: Mesh) -> dict[tuple[str, str], int]:
    states = {text: read_sharding(text, mesh, 3) for text in TEXTS}
    pairs = some(itertools.product(TEXTS, repeat=2), 5)
    return {(a, b): reshard_wire_bytes(states[a], states[b], SHAPE, ITEM, mesh) for a, b in pairs}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.slow)], ids=str)
def test_never_more_bytes_than_torch(mesh: Mesh) -> None:
    assert more_than_torch(mesh, all_bytes(mesh)) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 3, 2)], ids=str)
def test_nor_of_uneven_and_empty_shards(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SHAPE", shape)
    assert more_than_torch(MESHES[0], all_bytes(MESHES[0])) == []


def test_a_path_that_sends_more_is_found() -> None:
    """Negative control: a gather where torch exchanges (unless it searches), a reduction where it scatters."""
    through_whole = {("[S(0), R]", "[S(1), R]"): 6144, ("[R, P(sum)]", "[R, S(0)]"): 12288}
    assert more_than_torch(MESHES[0], through_whole) == [
        "[S(0), R] -> [S(1), R]: 6144, torch by default 3072",
        "[R, P(sum)] -> [R, S(0)]: 12288, torch by default 6144",
        "[R, P(sum)] -> [R, S(0)]: 12288, torch searched 6144",
    ]


def described(
    source: str, target: str, mesh: Mesh = MESHES[1], shape: tuple[int, ...] = SHAPE, machine: Machine = WIRE
) -> str:
    a, b = (read_sharding(text, mesh, len(shape)) for text in (source, target))
    steps = steps_between(a, b, shape, ITEM, mesh, machine)
    kinds = ", ".join(f"{step.kind} over {'.'.join(step.axes)} ({step.wire_bytes})" for step in steps)
    return f"{path_text(steps, mesh)}\n    {kinds}\n"


def test_paths() -> None:
    pairs = [
        ("[S(0), S(0)]", "[R, R]"),
        ("[S(0), S(0)]", "[R, S(0)]"),
        ("[S(0), S(0)]", "[S(0), S(0, outside dp)]"),
        ("[S(0), S(1)]", "[S(1), S(0)]"),
        ("[P(sum), P(sum)]", "[R, R]"),
        ("[P(sum), P(sum)]", "[S(0), S(1)]"),
        ("[P(sum), P(avg)]", "[R, R]"),
        ("[S(0), P(sum)]", "[R, S(0)]"),
        ("[S(0), R]", "[R, P(sum)]"),
    ]
    assert_expected_inline(
        "".join(described(*pair) for pair in pairs),
        """\
S(0)S(0)->RR
    all_gather over dp.tp (10752)
S(0)S(0)->RR->RS(0)
    all_gather over dp.tp (10752), slice over tp (0)
S(0)S(0)->RR->RS(0)->S(0)S(0)
    all_gather over dp.tp (10752), slice over tp (0), slice over dp (0)
S(0)S(1)->S(0)S(0)->S(1)S(1)->S(1)S(0)
    all_to_all over tp (1152), all_to_all over dp.tp (1344), all_to_all over tp (1152)
P(sum)P(sum)->RR
    all_reduce over dp.tp (21504)
P(sum)P(sum)->S(0)S(1)
    reduce_scatter over dp.tp (10752)
P(sum)P(avg)->RP(avg)->RR
    all_reduce over dp (12288), all_reduce over tp (18432)
S(0)P(sum)->RP(sum)->RS(0)
    all_gather over dp (6144), reduce_scatter over tp (9216)
S(0)R->S(0)P(sum)->RP(sum)
    hold over tp (0), all_gather over dp (6144)
""",
    )


# Nodes of four ranks, so that tp stays on one: 4e11 bytes/s there, 4e10 between them, and 10 us for every collective.
NODES = Machine(
    1.0,
    math.inf,
    1.0,
    {("", 0): [Link(1e-5, 4e11)]},
    ranks_per_node=4,
    between_nodes={("", 0): [Link(1e-5, 4e10)]},
)
SLOW = {("all_to_all", 0): [Link(1e-3, 4e11)]}


def test_axes_that_are_cut_together_are_gathered_together() -> None:
    """96 rows over 2 x 4 ranks; the order of the axes does not matter.

    One gather sends 7/8 of the 96 x 8 floats. Nodes of four ranks take two where that is faster: 3/4 of the 48 rows of a
    node on its own link, and half of all rows between the nodes. Of 97 rows one gather sends 7 shares of 13, and two
    send 3 of 13 and one of 49.
    """
    rows, wide = (96, 8), (96, 100_000)
    assert 96 * 8 * 4 * 7 // 8 == 2688
    assert (48 * 100_000 * 4 * 3 // 4, 96 * 100_000 * 4 // 2) == (14_400_000, 19_200_000)
    assert (3 * 13 * 8 * 4, 49 * 8 * 4) == (1248, 1568)
    assert_expected_inline(
        "".join(
            described(*ends, shape=rows)
            for ends in [
                ("[S(0), S(0)]", "[R, R]"),
                ("[S(0), S(0, outside dp)]", "[R, R]"),
                ("[P(sum), P(sum)]", "[S(0), S(0, outside dp)]"),
                ("[S(0), S(1)]", "[R, R]"),
            ]
        )
        + described("[S(0), S(0)]", "[R, R]", shape=rows, machine=NODES)
        + described("[S(0), S(0)]", "[R, R]", shape=wide, machine=NODES)
        + described("[S(0), S(0)]", "[R, R]", shape=(97, 8)),
        """\
S(0)S(0)->RR
    all_gather over dp.tp (2688)
S(0)S(0)->RR
    all_gather over dp.tp (2688)
P(sum)P(sum)->S(0)S(0)
    reduce_scatter over dp.tp (2688)
S(0)S(1)->RR
    all_gather over dp.tp (2688)
S(0)S(0)->RR
    all_gather over dp.tp (2688)
S(0)S(0)->S(0)R->RR
    all_gather over tp (14400000), all_gather over dp (19200000)
S(0)S(0)->S(0)R->RR
    all_gather over tp (1248), all_gather over dp (1568)
""",
    )


def test_two_collectives_must_gain_more_than_measured_times_differ() -> None:
    """Over 2 x 4 ranks, 3 and 7 us against 10.2 us for one: too little; against 11 us enough."""

    def kinds(joint: float) -> list[tuple[str, ...]]:
        links = {("all_reduce", ranks): [Link(latency, 1e15)] for ranks, latency in ((2, 3e-6), (4, 7e-6), (8, joint))}
        machine = Machine(1.0, 1e12, 1.0, {("", 0): [Link(3e-6, 1e15)], **links})
        ends = (read_sharding(text, MESHES[1], 3) for text in ("[P(sum), P(sum)]", "[R, R]"))
        return [step.axes for step in cheapest_path(*ends, SHAPE, ITEM, MESHES[1], machine)]

    assert kinds(10.2e-6) == [("dp", "tp")]
    assert len(kinds(11e-6)) == 2


def test_a_gather_that_copies_more_must_be_worth_it() -> None:
    """10 us for a collective: at 1e12 bytes/s, 2 MB are read and written in 4 us, 64 MB in 128 us.

    Gathered apart, the second dim goes first, and the first dim's shares arrive in their places.
    """
    machine = Machine(1.0, 1e12, 1.0, {("", 0): [Link(1e-5, 4e11)]})
    assert_expected_inline(
        described("[S(0), S(1)]", "[R, R]", shape=(16, 32_768), machine=machine)
        + described("[S(0), S(1)]", "[R, R]", shape=(16, 1_000_000), machine=machine),
        """\
S(0)S(1)->RR
    all_gather over dp.tp (1835008)
S(0)S(1)->RS(1)->RR
    all_gather over dp (8000000), all_gather over tp (48000000)
""",
    )


def test_the_fastest_path_is_that_of_a_machine() -> None:
    """12 KB over two nodes: one all_reduce takes 10.5 us, two take 20.4 us. 64 MB: 2,810 us, and two take 1,860 us.

    That is 10 us + 112 MB / 4e10, and 20 us + 96 MB / 4e11 + 64 MB / 4e10. An exchange that is slow is a gather.
    """
    pending, large = ("[P(sum), P(sum)]", "[R, R]"), (16, 1000, 1000)
    slow = replace(NODES, links={**NODES.links, **SLOW})
    assert_expected_inline(
        described(*pending, machine=NODES)
        + described(*pending, shape=large, machine=NODES)
        + described(*pending, shape=large)
        + described("[R, S(0)]", "[R, S(1)]", machine=NODES)
        + described("[R, S(0)]", "[R, S(1)]", machine=slow),
        """\
P(sum)P(sum)->RR
    all_reduce over dp.tp (21504)
P(sum)P(sum)->P(sum)R->RR
    all_reduce over tp (96000000), all_reduce over dp (64000000)
P(sum)P(sum)->RR
    all_reduce over dp.tp (112000000)
RS(0)->RS(1)
    all_to_all over tp (2304)
RS(0)->RR->RS(1)
    all_gather over tp (9216), slice over tp (0)
""",
    )


def test_a_path_is_read_back_from_its_states() -> None:
    """Whatever machine it was found for; and no step leads from a shard to a pending sum, or around by another dim."""
    mesh, shape = MESHES[1], SHAPE
    ends = [read_sharding(text, mesh, 3) for text in ("[S(0), P(sum)]", "[R, S(0)]")]
    for machine in (WIRE, NODES):
        steps = steps_between(*ends, shape, ITEM, mesh, machine)
        assert steps_along([ends[0], *(step.target for step in steps)], shape, ITEM, mesh) == steps
    assert steps_along(ends[:1] * 2, shape, ITEM, mesh) == ()
    assert steps_along(ends, shape, ITEM, mesh) is None
    assert steps_along([ends[0], read_sharding("[S(1), P(sum)]", mesh, 3), ends[1]], shape, ITEM, mesh) is None


def test_a_dynamic_dim_is_cut_as_its_ends_cut_it() -> None:
    """8 of the example is a multiple of 4, 2 s is not: what a static dim may be cut by on the way, this one may not."""
    mesh, shape = MESHES[0], (8, 6)
    source, target = (read_sharding(text, mesh, 2) for text in ("[S(0), P(sum)]", "[R, R]"))
    static = cheapest_path(source, target, shape, ITEM, mesh, WIRE, frozenset())
    dynamic = cheapest_path(source, target, shape, ITEM, mesh, WIRE, frozenset({0}))
    assert path_text(static, mesh) == "S(0)P(sum)->S(0)S(0)->RR"
    assert path_text(dynamic, mesh) == "S(0)P(sum)->S(0)R->RR"
    assert sum(step.wire_bytes for step in dynamic) == sum(step.wire_bytes for step in static)


@settings(deadline=None)
@given(cuts(), st.data())
def test_every_cut_is_reached_and_left(drawn: Cut, data: st.DataObject) -> None:
    """Another cut of the same dim, the whole, and another dim, from and to; beside pending sums."""
    size, by = drawn
    other = data.draw(levels(size, data.draw(st.permutations(GRID.names))))
    free = [axis for axis in GRID.names if axis not in by.axes]
    source = Sharding((WHOLE, by), tuple((axis, "sum") for axis in free))
    for target in (Sharding((WHOLE, other)), Sharding.replicated(2), Sharding((DimSharding.by(*GRID.names), WHOLE))):
        for ends in ((source, target), (target, source)):
            steps = steps_between(*ends, (6, size), ITEM, GRID, WIRE)
            states = [ends[0], *(step.target for step in steps)]
            assert [step.source for step in steps] == states[:-1]
            assert states[-1] == ends[1]


THREE = Mesh((("dp", 2), ("cp", 2), ("tp", 2)))
LINK = Machine(1.0, 1e12, 1.0, {("", 0): [Link(1e-5, 4e9)]})  # as many bytes as there are take 0.1 to 4 us


def paths_of_three_axes(monkeypatch: pytest.MonkeyPatch, collectives: int) -> tuple[list[tuple[Step, ...]], int]:
    """Return paths with a bound of at most so many collectives, and the number of shardings that were left."""
    expanded, count, made = set[tuple[int, Sharding]](), path._count_collectives, list[tuple[Step, ...]]()

    def counting(state: Sharding, *args: Any) -> Any:
        expanded.add((len(made), state))
        return find_steps(state, *args)

    with monkeypatch.context() as patch:
        find_steps = path._find_steps
        patch.setattr(path, "_find_steps", counting)
        patch.setattr(path, "_count_collectives", lambda *ends: min(count(*ends), collectives))
        texts = [f"[{', '.join(some)}]" for some in itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=3)]
        states = [read_sharding(text, THREE, 3) for text in texts]
        pairs = list(itertools.product(states, repeat=2))[::23]
        for pair in pairs:
            made.append(cheapest_path.__wrapped__(*pair, SHAPE, ITEM, THREE, LINK))
    return made, len(expanded)


def test_a_bound_on_the_rest_of_a_path_saves_work_and_changes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, expanded = paths_of_three_axes(monkeypatch, 2)
    plain, most = paths_of_three_axes(monkeypatch, 0)  # without a bound: Dijkstra's order alone
    assert paths == plain
    assert 2 * expanded < most
