"""The comparison finds every mistake, one at a time, and lets rounding pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.compared import compare
from tests.machines import CALLS
from tests.verify.network import PLAN, Transformer, collectives, damaged, randomised, skipped
from tpcompiler.errors import InputsError, MeshError
from tpcompiler.ir import edit
from tpcompiler.judge.compare.compare import VerifyReport
from tpcompiler.judge.compare.judge import FLOOR, SPREAD
from tpcompiler.parallel.program_subject import layout_of

MACHINE = CALLS

aten = torch.ops.aten
IDS = torch.randint(24, (2, 5), generator=torch.Generator().manual_seed(0))


class Case:
    """A program in parts, to be damaged."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], degree: int, plan: Any, **kwargs: Any) -> None:
        self.args = args
        self.made = tpcompiler.parallelize(export(module, args), degree, plan, **kwargs)
        self.ranks = [self.made.rank_program(rank) for rank in range(degree)]

    def compare(
        self, ranks: Sequence[ExportedProgram] | None = None, args: tuple[Any, ...] | None = None
    ) -> VerifyReport:
        return compare(
            self.made.only.original(),
            self.ranks if ranks is None else ranks,
            self.args if args is None else args,
            {},
            layout_of(self.made.only),
            [node.name for node in self.made.converted.resharded.user_inputs()],
            self.made.converted.resharded.output_names(),
            intermediate=self.made.converted.resharded.source,
        )


@pytest.fixture(scope="module")
def transformer() -> Case:
    return Case(randomised(Transformer()), (IDS,), 2, PLAN, outputs={"1": "S(0)"})


@pytest.mark.slow
def test_every_collective_is_needed(transformer: Case) -> None:
    """Each is replaced on all ranks, in turn, by what a rank that talks to nobody would have."""
    names = collectives(transformer.ranks[0])
    assert names == [
        *("all_reduce", "all_reduce_1", "all_reduce_2", "all_reduce_3", "all_reduce_4"),
        "all_gather_into_tensor",
    ]
    for name in names:
        report = transformer.compare([damaged(rank, name, skipped) for rank in transformer.ranks])
        wrong = [d for d in report.outputs if not d.ok]
        assert wrong, f"nothing is said of a missing {name}"
        assert max(d.rel for d in wrong) > 1000 * max(d.tolerance for d in wrong), f"{name}: {report}"
        assert report.first_diverging is not None


def test_a_collective_that_is_missing_is_named(transformer: Case) -> None:
    """The report points at the first value that is wrong, and says why it is what it is."""
    report = transformer.compare([damaged(rank, "all_reduce_2", skipped) for rank in transformer.ranks])
    assert report.first_diverging == (
        "'wait_tensor_2' (_c10d_functional.wait_tensor.default, claimed R); each rank has a partial sum of 'linear_5'"
    )
    assert str(report).startswith("NOT EQUAL: max abs err ")
    assert [line.split(":")[0] for line in str(report).splitlines()[1:]] == [
        *("  BAD 0", "  BAD 1", "  ok  calls"),
        "  first diverging value",
    ]


@pytest.mark.slow
def test_the_first_wrong_value_beside_uneven_shards() -> None:
    """Rows go to ranks as 2, 2 and 1: the last rank alone cuts off what pads its sum, and names its next copy apart."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), (x * 2).sin()

    case = Case(Net(), (torch.randn(5, 6),), 3, {"a": "rowwise_split_input"}, outputs=["S(0)", "S(1)"])
    (name,) = [n.name for n in case.ranks[0].graph.nodes if n.target is aten.sin.default]
    report = case.compare([damaged(rank, name, lambda graph, node: node.args[0]) for rank in case.ranks])
    assert report.first_diverging is not None
    assert "claimed S(1));" in report.first_diverging


def test_an_all_reduce_replaced_by_its_operand(transformer: Case) -> None:
    ranks = [damaged(rank, "all_reduce", lambda graph, node: node.args[0]) for rank in transformer.ranks]
    assert not transformer.compare(ranks).ok


def test_a_reduction_of_another_kind(transformer: Case) -> None:
    def average(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return graph.call_function(node.target, (node.args[0], "avg", node.args[2]))  # type: ignore[arg-type]

    ranks = [damaged(rank, "all_reduce_1", average) for rank in transformer.ranks]
    for rank in ranks:
        rank.graph.erase_node(next(node for node in rank.graph.nodes if node.name == "all_reduce_1"))
    assert not transformer.compare(ranks).ok


def test_a_bias_that_is_added_once_per_rank(transformer: Case) -> None:
    """As is every program that forgets that a row-wise bias is an addend."""
    whole = transformer.made.only.original().state_dict["layers.0.o.bias"]
    for rank in (0, 1):
        ranks = list(transformer.ranks)
        ranks[rank] = _with_state(ranks[rank], {"layers.0.o.bias": whole})
        assert transformer.compare(ranks).ok == (rank == 0), "rank 0 holds it already"


def test_shards_that_are_swapped(transformer: Case) -> None:
    first, second = transformer.ranks
    for name in ("embed.weight", "layers.0.q.weight", "layers.1.down.weight", "head.bias"):
        a = _with_state(first, {name: second.state_dict[name]})
        b = _with_state(second, {name: first.state_dict[name]})
        assert not transformer.compare([a, b]).ok, name


def test_a_rank_that_starts_with_other_weights(transformer: Case) -> None:
    """Every rank's copy of a replicated output is looked at."""
    first, second = transformer.ranks
    off = _with_state(second, {"layers.1.norm2.weight": second.state_dict["layers.1.norm2.weight"] * 1.001})
    assert not transformer.compare([first, off]).ok


def test_a_value_that_is_written_back_wrongly(transformer: Case) -> None:
    first, second = transformer.ranks
    report = transformer.compare([first, _with_state(second, {"calls": torch.ones(())})])
    assert [d.name for d in report.outputs if not d.ok] == ["calls"]


def _with_state(program: ExportedProgram, state: dict[str, torch.Tensor]) -> ExportedProgram:
    made = damaged(program, next(n.name for n in program.graph.nodes if n.op == "placeholder"), lambda _, node: node)
    made.state_dict.update({name: nn.Parameter(value.clone(), False) for name, value in state.items()})
    return made


class Products(nn.Module):
    """A long sum: its rounding error is what the tolerance is made of."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x)


@pytest.mark.slow
def test_the_tolerance_follows_the_programs_own_rounding() -> None:
    """`SPREAD` times the reference's error against float64, at least `FLOOR` epsilons; more terms, more of it."""
    tolerances = []
    for size in (8, 20000):
        module = randomised(Products(size))
        case = Case(module, (torch.randn(4, size, generator=torch.Generator().manual_seed(1)),), 2, {"down": "rowwise"})
        (difference,) = case.compare().outputs
        exact = module.double()(case.args[0].double())
        noise = (module.float()(case.args[0]) - exact).abs().amax() / exact.abs().amax()
        expected = max(SPREAD * noise.item(), FLOOR * torch.finfo(torch.float32).eps)
        assert difference.tolerance == pytest.approx(expected, rel=0.2)
        assert difference.ok
        tolerances.append(difference.tolerance)
    assert tolerances[0] == FLOOR * torch.finfo(torch.float32).eps < tolerances[1]


class Finished(nn.Module):
    """A sum of all ranks' products, and what a function makes of it."""

    def __init__(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.down = nn.Linear(64, 8)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.finish(self.down(x))


def right_and_without_its_collective(finish: Callable[[torch.Tensor], torch.Tensor]) -> tuple[bool, bool]:
    """What is said of the right program, and of one that leaves its all_reduce out."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    case = Case(randomised(Finished(finish)), (x,), 2, {"down": "rowwise"})
    (name,) = collectives(case.ranks[0])
    return case.compare().ok, case.compare([damaged(rank, name, skipped) for rank in case.ranks]).ok


LAST = torch.arange(8) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "finish",
    [
        lambda y: y.masked_fill(LAST, torch.finfo(torch.float32).min),
        lambda y: y.masked_fill(LAST, -1e9),
        lambda y: y + LAST * -1e9,
        lambda y: y.masked_fill(~LAST, -1e9).masked_fill(y > 10, 1e30),
        lambda y: torch.complex(y.masked_fill(LAST, -1e9), y),
    ],
    ids=["lowest", "fill", "addend", "mostly", "complex"],
)
def test_a_masks_large_numbers_hide_nothing(finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Relative to -1e9, logits of any size would be equal."""
    assert right_and_without_its_collective(finish) == (True, False)


@pytest.mark.slow
def test_large_numbers_themselves_are_judged() -> None:
    """In a tolerance of their own: 1e9 is rounded to 64."""
    assert right_and_without_its_collective(lambda y: torch.cat([y, y * 1e9], -1)) == (True, False)
    assert right_and_without_its_collective(lambda y: torch.cat([torch.ones_like(y), y * 1e9], -1)) == (True, False)


@pytest.mark.slow
def test_a_choice_that_float64_makes_otherwise_allows_no_fault() -> None:
    """1e-9 more is more in float64 alone: by the difference between the two, anything would be equal."""
    finish = lambda y: torch.where(y + 1e-9 > y, -y.flip(-1), y)  # noqa: E731
    assert right_and_without_its_collective(finish) == (True, False)


@pytest.mark.slow
def test_bits_are_read_as_they_were_exported() -> None:
    """In float64 a row would be read as twice as many integers."""
    finish = lambda y: (y.view(torch.int32) >> 20 << 20).view(torch.float32)  # noqa: E731
    assert right_and_without_its_collective(finish) == (True, False)


class Outputs(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "masked": x.masked_fill(x > 0, -torch.inf),
            "root": x.sqrt(),
            "count": (x > 0).sum(0),
            "flag": True,
            "none": x[:0],
        }


@pytest.mark.slow
def test_infinities_nans_integers_and_nothing() -> None:
    case = Case(Outputs(), (torch.randn(4, 6),), 2, {}, inputs=["S(0)"], outputs={"masked": "S(0)", "count": "S(0)"})
    report = case.compare()
    assert report.ok, report
    assert [d.name for d in report.outputs] == ["masked", "root", "count", "flag", "none"]
    assert {d.rel for d in report.outputs} == {0.0}


def test_a_nan_where_there_should_be_a_number() -> None:
    case = Case(Outputs(), (torch.randn(4, 6),), 2, {}, inputs=["S(0)"])

    def spoilt(graph: fx.Graph, node: fx.Node) -> fx.Node:
        return graph.call_function(aten.mul.Tensor, (node, float("nan")))

    (name,) = [node.name for node in edit.calls(case.ranks[1].graph) if node.target is aten.masked_fill.Scalar]
    report = case.compare([case.ranks[0], damaged(case.ranks[1], name, spoilt)])
    assert [d.name for d in report.outputs if not d.ok] == ["masked"]


def test_an_integer_that_is_off_by_one() -> None:
    case = Case(Outputs(), (torch.randn(4, 6),), 2, {}, inputs=["S(0)"])
    (name,) = [node.name for node in edit.calls(case.ranks[0].graph) if node.target is aten.sum.dim_IntList]
    more = damaged(case.ranks[0], name, lambda graph, node: graph.call_function(aten.add.Tensor, (node, 1)))
    report = case.compare([more, case.ranks[1]])
    assert [d.name for d in report.outputs if not d.ok] == ["count"]


def test_a_wrong_shape_or_dtype(transformer: Case) -> None:
    for change in (torch.Tensor.double, lambda x: x[:, :-1]):
        ranks = [
            damaged(rank, _output(rank), lambda graph, node, f=change: graph.call_function(f, (node,)))
            for rank in transformer.ranks
        ]
        report = transformer.compare(ranks)
        assert [(d.name, d.abs) for d in report.outputs if not d.ok] == [("0", float("inf"))]


def _output(program: ExportedProgram) -> str:
    spec = program.graph_signature.user_outputs
    return str(spec[0])


def test_another_batch_than_the_example(transformer: Case) -> None:
    report = transformer.compare(args=(IDS.flip(0),))
    assert report.ok, report


def test_programs_are_needed(transformer: Case) -> None:
    with pytest.raises(MeshError, match="there is no rank program to compare"):
        transformer.compare([])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.randn(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.total.add_(x.sum(0))
        return {"total": self.total * 2}


@pytest.mark.slow
def test_a_buffer_that_the_ranks_forget_is_noticed() -> None:
    """On all of them, or on one."""
    case = Case(Counting(), (torch.randn(3, 8),), 2, {})
    forgetful = []
    for program in case.ranks:
        copied = copy.deepcopy(program)
        written, *returned = copied.graph_signature.output_specs
        assert written.target == "total"
        copied.graph_signature.output_specs[:] = returned
        (values,) = copied.graph.output_node().args
        copied.graph.output_node().args = (values[1:],)  # type: ignore[index]
        forgetful.append(copied)
    assert case.compare().ok
    for ranks in (forgetful, [case.ranks[0], forgetful[1]]):
        report = case.compare(ranks)
        assert not report.ok
        assert [(d.name, d.ok) for d in report.outputs] == [("total", True), ("total, which not all write", False)]


class Undefined(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x / 0 * 0


@pytest.mark.slow
def test_an_output_without_finite_numbers_is_said_to_prove_nothing() -> None:
    report = Case(Undefined(), (torch.randn(3, 8),), 2, {}).compare()
    lines = str(report).splitlines()[1:]
    assert report.ok
    assert [d.finite for d in report.outputs] == [True, False]
    assert [line.endswith("it has no finite number, which proves nothing") for line in lines] == [False, True]


def test_an_id_that_no_row_has_is_refused(transformer: Case) -> None:
    with pytest.raises(InputsError, match="the single-device program does not run on these inputs: index out of range"):
        transformer.made.verify((torch.full_like(IDS, 24),))
