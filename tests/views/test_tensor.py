"""Which rank holds which slice, read off the drawing: against torch's own drawing, and against what ranks hold."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import zeros
from torch.distributed.tensor.debug import visualize_sharding as visualize_as_torch_does
from torch.testing._internal.distributed.fake_pg import FakeStore

import tpcompiler
from tests.runtime.commands import right
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import read_sharding
from tpcompiler.report.tensor import WIDTH, draw_sharding
from tpcompiler.runtime.records import BoundaryRecord

SVG = "{http://www.w3.org/2000/svg}"

MESHES = {"tp": {"tp": 4}, "dp, tp": {"dp": 2, "tp": 3}}


def described(mesh: dict[str, int], shape: list[int | str], sharding: str) -> Any:
    """The manifest of a program of one tensor."""
    row = BoundaryRecord(name="w", shape=shape, dtype="f32", sharding=sharding)
    return SimpleNamespace(factors={}, mesh=mesh, tensors=[row], placed=lambda: [(row.name, row)])


def drawing(manifest: Any, name: str | None = None, *, is_svg: bool = False) -> str:
    return draw_sharding(manifest, name, "the program", is_svg=is_svg)


def span(text: str, size: int) -> range:
    start, stop = text.split(":")
    return range(int(start or 0), int(stop or size))


def grid(text: str, shape: torch.Size) -> dict[tuple[int, ...], set[int]]:
    """The ranks of every element of two or three dims."""
    found = {}
    for block in text.strip().split("\n\n")[1:-1]:
        lines, leading = block.split("\n"), [range(0)] * 0
        if lines[0].startswith("["):
            leading = [span(each, 0) for each in lines.pop(0)[1:-1].split(", ")[:-2]]
        columns = [span(each, 0) for each in lines.pop(0).split()]
        for line in lines:
            label, *cells = line.split()
            for column, cell in zip(columns, cells, strict=True):
                spans = torch.cartesian_prod(*(torch.tensor(each) for each in (*leading, span(label, 0), column)))
                found |= {tuple(at): set(map(int, re.split(r"[,+]", cell))) for at in spans.tolist()}
    assert len(found) == shape.numel()
    return found


def slices(text: str, shape: torch.Size) -> dict[int, tuple[list[int], list[list[int]]]]:
    """Of each rank the local shape, and the indices of each dim."""
    found = {}
    for line in re.sub(r"\n  +", " ", text.strip().split("\n\n")[-1]).split("\n"):
        ranks, local, held = re.fullmatch(r"ranks? (.*): \[(.*)\], the slice \[(.*)\]", line).groups()  # type: ignore[union-attr]
        dims = [
            [at for each in dim.split(" + ") if each != "nothing" for at in span(each, size)]
            for dim, size in zip(held.split(", "), shape, strict=True)
        ]
        found |= {int(rank): ([int(size) for size in local.split(", ")], dims) for rank in ranks.split(", ")}
    return found


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Without a network; torch's drawing is the JSON of what it hands to tabulate."""
    tabulate: Any = ModuleType("tabulate")
    tabulate.__spec__ = ModuleSpec("tabulate", None)
    tabulate.tabulate = lambda matrix, headers, showindex: json.dumps([matrix, headers, showindex])
    monkeypatch.setitem(sys.modules, "tabulate", tabulate)
    axes = MESHES[request.param]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=Mesh.of(axes).world_size)
    yield axes
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(12, 24), (10, 7), (3, 2), (9,)])
def test_the_drawing_is_torchs(
    mesh: dict[str, int], shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    dims = [*(f"S({dim})" for dim in range(len(shape))), "R"]
    texts = dims if len(mesh) == 1 else [f"[{outer}, {inner}]" for outer in dims for inner in dims]
    devices = dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    for text in texts:
        placements = read_sharding(text, Mesh.of(mesh), len(shape)).placements(Mesh.of(mesh))
        visualize_as_torch_does(zeros(shape, device_mesh=devices, placements=placements))
        matrix, columns, rows = json.loads(capsys.readouterr().out)
        theirs = defaultdict[tuple[int, ...], set[int]](set)
        ends = [[tuple(map(int, re.findall(r"\d+", header))) for header in headers] for headers in (rows, columns)]
        for (top, bottom), cells in zip(ends[0], matrix, strict=True):
            for (left, end), cell in zip(ends[1], cells, strict=True):
                for at in [(i, j) for i in range(top, bottom + 1) for j in range(left, end + 1)]:
                    theirs[at[: len(shape)]] |= {int(rank) for rank in re.findall(r"\d+", cell)}
        drawn = drawing(described(mesh, list(shape), text), "w")
        if len(shape) == 1:  # one row without a label
            drawn = re.sub(r"(?<=\n)(?= +[\d,]+(  |\n))", "0:1", drawn)
            ours = {at[1:]: ranks for at, ranks in grid(drawn, torch.Size(shape)).items()}
        else:
            ours = grid(drawn, torch.Size(shape))
        assert ours == theirs, text


class Weights(nn.Module):
    """Parameters that are numbered through."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(numbers.view(shape)))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + weight for weight in self.parameters()]


PLANS: list[tuple[dict[str, int], dict[str, tuple[tuple[int, ...], Any]]]] = [
    (
        {"tp": 4},
        {
            "even": ((8, 6), "S(0)"),
            "uneven": ((10, 6), "S(0)"),
            "empty": ((6, 3), "S(1)"),
            "units": ((10, 3), "S(0, unit 2)"),
            "blocks": ((3, 16), "S(1, block 8)"),
            "parts": ((16, 3), "S(0, parts 8 4 4r)"),
            "slabs": ((6, 3, 5), "S(0)"),
            "inner": ((2, 4, 9), "S(2)"),
            "wide": ((2, 24), "S(1, block 4)"),
        },
    ),
    (
        {"dp": 2, "tp": 3},
        {
            "both": ((5, 7), {"dp": "S(0)", "tp": "S(1)"}),
            "nested": ((14, 2), {"dp": "S(0)", "tp": "S(0)"}),
            "replicas": ((7, 4), {"tp": "S(0)"}),
            "cube": ((4, 2, 6), {"dp": "S(0)", "tp": "S(2, unit 2)"}),
        },
    ),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("axes", "plan"), PLANS)
def test_ranks_hold_what_is_drawn(
    axes: dict[str, int], plan: dict[str, tuple[tuple[int, ...], Any]], tmp_path: Path
) -> None:
    model = Weights({name: shape for name, (shape, _) in plan.items()})
    exported = torch.export.export(model, (torch.zeros(()),))
    program = tpcompiler.parallelize(exported, axes, {name: placed for name, (_, placed) in plan.items()})
    ranks = [program.rank_program(rank).state_dict for rank in range(program.world_size)]
    program.save(tmp_path / "out")
    for name, weight in model.named_parameters():
        drawn = program.show(name)
        assert max(map(len, drawn.splitlines())) <= WIDTH
        assert right("inspect", tmp_path / "out", "--tensor", name) == drawn
        cells, held = grid(drawn, weight.shape), slices(drawn, weight.shape)
        for rank, state in enumerate(ranks):
            local, dims = held[rank]
            expected = weight.detach()
            for dim, indices in enumerate(dims):
                expected = expected.index_select(dim, torch.tensor(indices, dtype=torch.int64))
            assert local == list(state[name].shape)
            assert torch.equal(state[name], expected), name
            where = {at for at, holders in cells.items() if rank in holders}
            assert sorted(weight[at].item() for at in where) == sorted(state[name].flatten().tolist()), name


@pytest.mark.parametrize(("axes", "plan"), PLANS)
def test_the_svg_has_the_same_cells(axes: dict[str, int], plan: dict[str, tuple[tuple[int, ...], Any]]) -> None:
    for shape, placed in plan.values():
        mesh = Mesh.of(axes)
        text = placed if isinstance(placed, str) else f"[{', '.join(placed.get(axis, 'R') for axis in axes)}]"
        program = described(axes, list(shape), read_sharding(text, mesh, len(shape)).text(mesh))
        tree = ElementTree.fromstring(drawing(program, "w", is_svg=True))
        drawn = grid(drawing(program, "w"), torch.Size(shape))
        area = defaultdict[frozenset[int], float](float)
        for rect in tree.iter(f"{SVG}rect"):
            if (title := rect.find(f"{SVG}title")) is not None:
                ranks = (title.text or "").rpartition(": ")[2]
                area[frozenset(map(int, ranks.split(",")))] += float(rect.get("width", 0)) * float(
                    rect.get("height", 0)
                )
        for ranks, size in area.items():
            share = sum(holders == ranks for holders in drawn.values()) / len(drawn)
            assert size / sum(area.values()) == pytest.approx(share, abs=0.01)


def test_a_dynamic_size_is_cut_in_shares() -> None:
    lines = drawing(described({"tp": 2}, ["s0", 3], "S(0)"), "w").splitlines()
    assert lines[2:5] == ["         0:3", "0/2:1/2  0", "1/2:2/2  1"]
    assert lines[-2:] == ["rank 0: [s0*1/2, 3], the slice [0/2:1/2, :]", "rank 1: [s0*1/2, 3], the slice [1/2:2/2, :]"]


def test_what_has_no_elements_or_no_dims() -> None:
    assert drawing(described({"tp": 2}, [], "R")) == ("w: f32[], R on tp=2\n\nranks 0, 1: [], the slice []\n")
    assert drawing(described({"tp": 2}, [0, 2], "S(1)")).splitlines()[2:] == [
        "rank 0: [0, 1], the slice [nothing, 0:1]",
        "rank 1: [0, 1], the slice [nothing, 1:2]",
    ]


def test_a_drawing_ends() -> None:
    drawn = drawing(described({"tp": 64}, [64, 2, 6400], "S(2, block 64)"), "w")
    assert "drawn: the first 32 of 6,400 pieces of dim 2\n" in drawn
    assert max(map(len, drawn.splitlines())) <= WIDTH
    assert "rank 63: [64, 2, 100], the slice [:, :, 63:64 + 127:128 + .. + 6399:6400]\n" in drawn
