"""Windows over rows that are sharded: the ranks exchange the rows at the edges of their shares, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import export

import tpcompiler
from tests.compared import compare
from tests.passes.stages import Call
from tests.trust.damage import Artifact
from tests.zoo.case import randomise
from tpcompiler.artifact.collective_records import is_exchange
from tpcompiler.ir import edit
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import describe_sharding
from tpcompiler.ir.shares import read_sharding
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.parallel.program_subject import layout_of

ITEM, ROWS, WIDTH = 4, 2, 8
Cut = Mapping[str, int]


def converted(
    net: nn.Module, x: torch.Tensor, cut: Cut, mesh: Mapping[str, int], machine: str = "ideal", **how: Any
) -> tpcompiler.ParallelProgram:
    at = {axis: f"S({dim})" for axis, dim in cut.items()}
    exported = export(randomise(net).eval(), (x,), **how)
    return tpcompiler.parallelize(exported, dict(mesh), {}, inputs=[at], outputs=[at], machine=machine)


def sent(program: tpcompiler.ParallelProgram) -> list[tuple[str, int]]:
    return [(each.kind, each.wire_bytes) for each in program.collectives()]


def right(program: tpcompiler.ParallelProgram, x: torch.Tensor) -> bool:
    report, check = program.verify((x,)), program.check()
    assert report.ok, str(report)
    assert check.ok, str(check)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_one_row_to_each_neighbour(world: int) -> None:
    """A rank between two others sends each of them a row of 8 numbers, where a gather takes most of the image."""
    x = torch.randn(1, 1, 64, WIDTH)
    program = converted(nn.Conv2d(1, 1, 3, padding=1), x, {"cp": ROWS}, {"cp": world})
    neighbours = 1 if world == 2 else 2
    assert sent(program) == [("all_to_all", neighbours * WIDTH * ITEM)]
    (exchange,) = program.collectives()
    assert (exchange.why, exchange.payload_bytes) == ("inherent", exchange.wire_bytes)
    assert exchange.reason.startswith("conv2d: its windows reach elements of other ranks")
    assert right(program, x)
    # each rank names the ranks that it sends to
    for rank in range(world):
        (call,) = (n for n in program.rank_program(rank).graph.nodes if "all_to_all_single" in str(n.target))
        row = [WIDTH * (abs(other - rank) == 1) for other in range(world)]
        assert list(call.args[1:3]) == [row, row]


# (module, rows, ranks, rows that the busiest rank sends or receives)
BY_HAND: list[tuple[Callable[[], nn.Module], int, int, int]] = [
    (lambda: nn.Conv2d(1, 1, 5, padding=2), 16, 4, 2 * 2),
    (lambda: nn.Conv2d(1, 1, 3, padding=2, dilation=2), 16, 4, 2 * 2),
    (lambda: nn.Conv2d(1, 1, 3, padding=1, stride=2), 16, 4, 1),  # the row before the share
    (lambda: nn.Conv2d(1, 1, 4, padding="same"), 16, 4, 1 + 2),
    (lambda: nn.Conv2d(1, 1, 3, padding=1), 7, 4, 2),  # shares of 2, 2, 2 and 1 rows
    (lambda: nn.Conv2d(1, 1, 7, padding=3), 8, 4, 5),  # shares of 2 rows, from the neighbours and those behind
    (lambda: nn.MaxPool2d(3, 2, 1), 16, 4, 1),
    (lambda: nn.MaxPool2d(3, 1, 1), 16, 4, 2),
    (lambda: nn.AvgPool2d(3, 2, 1), 16, 4, 1),
    (lambda: nn.Upsample(scale_factor=2), 16, 4, 0),
    (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), 16, 4, 2),
    (lambda: nn.ConvTranspose2d(1, 1, 4, 2, 1), 16, 4, 2),
    (lambda: nn.ConvTranspose2d(1, 1, 3, 2, 1, output_padding=1), 16, 4, 1),  # the row behind the share
]


@pytest.mark.slow
@pytest.mark.parametrize(("net", "rows", "world", "lacks"), BY_HAND)
def test_rows_by_hand(net: Callable[[], nn.Module], rows: int, world: int, lacks: int) -> None:
    x = torch.randn(1, 1, rows, WIDTH)
    program = converted(net(), x, {"cp": ROWS}, {"cp": world})
    assert sent(program) == ([("all_to_all", lacks * WIDTH * ITEM)] if lacks else [])
    assert right(program, x)


WINDOWS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"conv {k} {s} {p} {d}": lambda k=k, s=s, p=p, d=d: nn.Conv2d(2, 2, k, s, p, d)  # type: ignore[misc]
        for k, s, p, d in [
            (3, 1, 1, 1),
            (3, 2, 1, 1),
            (2, 1, 0, 1),
            (3, 1, 2, 2),
            (1, 3, 0, 1),
            (1, 1, 3, 1),
            (5, 3, 2, 1),
        ]
    },
    "conv same": lambda: nn.Conv2d(2, 2, 4, padding="same", dilation=1),
    "conv in groups": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "max, whole windows and a part": lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "max, dilated": lambda: nn.MaxPool2d(2, 1, 1, dilation=2),
    "mean": lambda: nn.AvgPool2d(3, 2, 1),
    "mean without padding": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "mean, whole windows and a part": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "mean, a part without padding": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "mean by another divisor": lambda: nn.AvgPool2d(3, 1, 1, divisor_override=5),
    "pad": lambda: nn.ConstantPad2d((0, 0, 3, 1), 0.5),
    "crop and pad": lambda: nn.ConstantPad2d((0, 0, 2, -2), 0.5),
    "nearest": lambda: nn.Upsample(scale_factor=3),
    "bilinear": lambda: nn.Upsample(scale_factor=3, mode="bilinear"),
    "spread": lambda: nn.ConvTranspose2d(2, 2, 4, 2, 1),
    "spread, dilated": lambda: nn.ConvTranspose2d(2, 2, 3, 3, 2, output_padding=1, dilation=2),
    "spread, with gaps": lambda: nn.ConvTranspose2d(2, 2, 2, 3),
}


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rows", [4, 5, 8, 11, 12])
@pytest.mark.parametrize("name", WINDOWS)
def test_all_sizes_and_ranks(name: str, rows: int, world: int) -> None:
    """Also where the shares of the result do not lie over those of the image, or some are empty: then it is gathered."""
    x = torch.randn(2, 2, rows, 5)
    assert right(converted(WINDOWS[name](), x, {"cp": ROWS}, {"cp": world}), x)


@pytest.mark.slow
def test_infinities() -> None:
    """What a maximum is padded with is no larger than any number; NaN stays where it is reached."""
    x = torch.full((1, 1, 8, 4), -float("inf"))
    x[0, 0, 2, 1], x[0, 0, 6, 3] = float("nan"), -3e38
    assert right(converted(nn.MaxPool2d(3, 1, 1), x, {"cp": ROWS}, {"cp": 4}), x)


def test_rows_and_columns_over_two_axes() -> None:
    """The second exchange sends the corners that the first has brought."""
    x = torch.randn(1, 2, 8, 8)
    program = converted(nn.Conv2d(2, 2, 3, padding=1), x, {"dp": 2, "tp": 3}, {"dp": 2, "tp": 2})
    assert sorted(sent(program)) == [("all_to_all", 2 * 4 * ITEM), ("all_to_all", 2 * 5 * ITEM)]
    assert right(program, x)


@pytest.mark.slow
def test_one_exchange_for_equal_windows() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.other(x) + x  # type: ignore[no-any-return]

    x = torch.randn(1, 2, 16, WIDTH)
    program = converted(Net(), x, {"cp": ROWS}, {"cp": 4})
    assert sent(program) == [("all_to_all", 2 * 2 * WIDTH * ITEM)]
    assert right(program, x)


@pytest.mark.slow
def test_more_ranks_than_rows_gather_with_the_reason() -> None:
    x = torch.randn(1, 1, 3, WIDTH)
    program = converted(nn.Conv2d(1, 1, 3, padding=1), x, {"cp": ROWS}, {"cp": 4})
    (gather,) = program.collectives()
    assert (gather.kind, gather.why) == ("all_gather", "fallback")
    assert "it needs the dim of 3 whole" in gather.reason
    assert right(program, x)


@pytest.mark.slow
def test_dynamic_rows_gather() -> None:
    x = torch.randn(1, 1, 16, WIDTH)
    sizes = ({2: 4 * torch.export.Dim("quarter", min=2, max=64)},)
    program = converted(nn.Conv2d(1, 1, 3, padding=1), x, {"cp": ROWS}, {"cp": 4}, dynamic_shapes=sizes)
    assert [kind for kind, _ in sent(program)] == ["all_gather"]
    for rows in (16, 32):
        assert program.verify((torch.randn(1, 1, rows, WIDTH),)).ok


@pytest.mark.slow
def test_gradients_gather_rows() -> None:
    """The backward of a convolution has no windows, and the numbers are right."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3, padding=1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.conv(x) - y).square().mean()  # type: ignore[no-any-return]

    x, y, at = torch.randn(2, 1, 16, WIDTH), torch.randn(2, 4, 16, WIDTH), {"cp": "S(2)"}
    exported = tpcompiler.export_training(randomise(Loss()), (x, y))
    program = tpcompiler.parallelize(exported, {"cp": 4}, {}, inputs=[at, at], machine="ideal")
    assert program.verify((x, y)).ok
    assert program.check().ok


SPANS = "S(2, spans 0:9 7:17 15:25 23:32)"


def test_the_notation() -> None:
    mesh = Mesh((("cp", 4),))
    sharding = read_sharding(SPANS, mesh, 4)
    assert sharding.text(mesh) == SPANS
    assert [sharding.local_shape([1, 1, 32, 8], mesh, {"cp": rank})[2] for rank in range(4)] == [9, 10, 10, 9]
    words = "dim 2 cut over cp, each rank with the elements that its windows reach: 0:9 7:17 15:25 23:32"
    assert describe_sharding(SPANS, mesh) == words
    with pytest.raises(ValueError, match="is no sharding"):
        read_sharding("S(2, spans 0:9 7:)x", mesh, 4)


def test_nobody_asks_for_spans() -> None:
    exported = export(nn.Conv2d(1, 1, 3, padding=1), (torch.randn(1, 1, 32, 8),))
    with pytest.raises(tpcompiler.TpCompilerError, match="only operands of windows"):
        tpcompiler.parallelize(exported, 4, {}, inputs=[SPANS], outputs=["S(2)"])


def swap_edges(program: fx.Graph) -> None:
    """Send the neighbours each other's rows."""
    for node in program.nodes:
        if "all_to_all_single" in str(node.target):
            (cat,) = node.all_input_nodes
            cat.args = (list(reversed(cat.args[0])),)


def send_the_wrong_row(program: fx.Graph) -> None:
    """Send the first row also to the rank behind, which needs the last."""
    for node in program.nodes:
        if node.target is torch.ops.aten.slice.Tensor and node.args[2:] == (7, 8):
            node.args = (*node.args[:2], 0, 1)


def pad_the_other_side(program: fx.Graph) -> None:
    for node in program.nodes:
        if node.target is torch.ops.aten.constant_pad_nd.default:
            *columns, before, behind = node.args[1]
            node.args = (node.args[0], [*columns, behind, before], *node.args[2:])


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [swap_edges, send_the_wrong_row, pad_the_other_side])
def test_a_tampered_exchange_is_noticed(damage: Callable[[fx.Graph], None]) -> None:
    """The negative control, for `verify` and for `check`."""
    x = torch.randn(1, 1, 32, WIDTH)
    program = converted(nn.Conv2d(1, 1, 3, padding=1), x, {"cp": ROWS}, {"cp": 4})
    artifact = Artifact.of(program).copied()
    assert check_programs(artifact.written(), artifact.manifest).findings == []
    for each in artifact.ranks:
        damage(each.graph)
        each.graph_module.recompile()
    assert check_programs(artifact.written(), artifact.manifest).findings
    names = [spec.name for spec in program.manifest().outputs]
    report = compare(program.only.original(), artifact.ranks, (x,), {}, layout_of(program.only), ["input"], names)
    assert not report.ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("shares", [2, [2, 1]], ids=str)
def test_windows_of_a_pending_sum(shares: Any) -> None:
    """Each rank's columns are a term of a sum over dp: of all terms together they must be the whole's."""
    torch.manual_seed(0)
    net = Call(
        lambda self, x: self.q(F.conv1d(self.a(x), self.w, padding=1)),
        a=nn.Linear(8, 14),
        q=nn.Linear(14, 5),
        w=torch.randn(6, 6, 3),
    )
    x, mesh, plan = torch.randn(4, 6, 8), {"dp": 2, "tp": shares}, {"a": "colwise", "q": "rowwise"}
    program = tpcompiler.parallelize(export(net, (x,)), mesh, plan, inputs=[{"dp": "S(2)"}], machine="h100")
    assert right(program, x)
    artifact = Artifact.of(program).copied()
    for rank in artifact.ranks:
        for node in rank.graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default):
            place = node.args[2]
            if node.args[1] == 2 and place.target is torch.ops.aten.add.Tensor:
                node.replace_input_with(place, place.args[0])  # the first columns, on every rank
                rank.graph_module.recompile()
    (finding,) = {str(each) for each in check_programs(artifact.written(), artifact.manifest).findings}
    assert "does not become [P(sum), S(2, spans" in finding


def test_an_exchange_of_a_file_that_lists_no_sizes() -> None:
    """It has no rank that keeps nothing, and is counted as any other."""
    program = converted(nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 32, WIDTH), {"cp": ROWS}, {"cp": 4})
    (node,) = (node for node in program.rank_program(0).graph.nodes if edit.is_collective(node))
    assert is_exchange(node)
    node.args = (node.args[0], node.args[1], [], node.args[3])
    assert not is_exchange(node)
