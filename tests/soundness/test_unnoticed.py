"""Damages that no number shows on ordinary inputs: `check` has to see them in the programs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import force_setattr
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import TensorArgument

import tpcompiler
from tests.trust.damage import Artifact, claim, inserted
from tpcompiler.errors import InternalError
from tpcompiler.ir.node_placement import claim_data, write_call
from tpcompiler.ir.shares import same_bits
from tpcompiler.judge.sound.check import check_programs

aten = torch.ops.aten
MASK = torch.full((8, 8), float("-inf")).triu(1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.register_buffer("mask", MASK)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.softmax(self.down(torch.relu(self.up(x)) * 0.5) + self.mask, -1), 3


class PickRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Halves(nn.Module):
    """Each rank adds its rows of a whole input to those that it has."""

    def forward(self, x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return x + whole


class TwoSums(nn.Module):
    """One of which is reduced before the other, for what is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x)
        return y + self.b(z), torch.relu(y)


class Counts(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.relu(), 2 * x.shape[0]


ROWS = Dim("rows")
MODELS: dict[str, Callable[[], tuple[ExportedProgram, dict[str, Any]]]] = {
    "masked": lambda: (
        export(Masked(), (torch.randn(8, 8),)),
        {"plan": {"up": "colwise", "down": "rowwise"}},
    ),
    "pick": lambda: (export(PickRows(), (torch.tensor([[1, 99], [50, 49]]),)), {"plan": {"table": "S(0)"}}),
    "counts": lambda: (export(Counts(), (torch.randn(6, 4),), dynamic_shapes=({0: ROWS},)), {"plan": {}}),
    "sums": lambda: (
        export(TwoSums(), (torch.randn(4, 8), torch.randn(4, 8))),
        {"plan": {"a": "rowwise", "b": "rowwise"}},
    ),
    "halves": lambda: (
        export(Halves(), (torch.randn(6, 4), torch.randn(6, 4)), dynamic_shapes=({0: 2 * ROWS}, {0: 2 * ROWS})),
        {"plan": {}, "inputs": ["S(0)", "R"], "outputs": ["S(0)"]},
    ),
}


def node(program: ExportedProgram, target: Any) -> fx.Node:
    return next(node for node in program.graph.nodes if node.target is target)


def put_after(source: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """The result of a call on what a node makes, in the place of that."""
    users = list(source.users)
    new = inserted(source.next, target, (source, *args), source)
    for user in users:
        user.replace_input_with(source, new)
    return new


def a_clamp_in_a_change(ranks: list[ExportedProgram]) -> None:
    for program in ranks:
        wait = node(program, torch.ops._c10d_functional.wait_tensor.default)
        put_after(wait, aten.clamp.default, (-1000.0, 1000.0))
        claim(wait).pop("sharding", None)


def an_op_that_is_called_a_body(ranks: list[ExportedProgram]) -> None:
    """On the last rank, and it differs for what is very large."""
    relu = node(ranks[-1], aten.relu.default)
    claim(relu).update(body="mine", call=claim_data(write_call(relu)))
    relu.target, relu.args = aten.clamp.default, (relu.args[0], 0.0, 1e3)


def another_number_where_it_is_nan(ranks: list[ExportedProgram]) -> None:
    for program in ranks:
        mul = node(program, aten.mul.Tensor)
        claim(mul)["call"] = claim_data(write_call(mul))
        mul.update_arg(1, float("nan"))


def an_assertion_on_one_rank(ranks: list[ExportedProgram]) -> None:
    relu = node(ranks[-1], aten.relu.default)
    new = inserted(relu, aten._assert_scalar.default, (True, "no"), relu)
    new.meta = {"val": None, "custom": {}}


def another_constant_is_returned(ranks: list[ExportedProgram]) -> None:
    spec = ranks[-1].graph_signature.output_specs[-1]
    spec.arg = type(spec.arg)(name=spec.arg.name, value=4)  # type: ignore[call-arg]


def ids_are_not_counted_from_the_end(ranks: list[ExportedProgram]) -> None:
    for program in ranks:
        where = node(program, aten.where.self)
        ids = next(n for n in program.graph.nodes if n.op == "placeholder" and n.name == "ids")
        for user in list(where.users):
            user.replace_input_with(where, ids)


def _index(ranks: list[ExportedProgram], of_size: Callable[[fx.Node, fx.Node], fx.Node]) -> None:
    rows = node(ranks[-1], aten.index_select.default)
    (select,) = rows.users
    select.target, select.args = aten.select.int, rows.args
    select.update_arg(2, of_size(select, node(ranks[-1], aten.sym_size.int)))
    ranks[-1].graph.erase_node(rows)


def _number(before: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    new = inserted(before, target, args, like)
    new.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return new


def another_half_of_many_rows(ranks: list[ExportedProgram]) -> None:
    def index(select: fx.Node, size: fx.Node) -> fx.Node:
        many = _number(select, operator.floordiv, (size, 50), size)
        return _number(select, operator.sub, (1, many), size)

    _index(ranks, index)


def a_half_by_its_size(ranks: list[ExportedProgram]) -> None:
    """Of two rows the second is the second half."""
    _index(ranks, lambda select, size: _number(select, operator.floordiv, (size, 2), size))


def another_size_is_recorded(ranks: list[ExportedProgram]) -> None:
    twice = node(ranks[-1], operator.mul)
    twice.meta["val"] = twice.meta["val"] + 1


def a_draw_in_a_body(ranks: list[ExportedProgram]) -> None:
    """What the rank draws next is another number than the others'."""
    rows = node(ranks[-1], aten.index.Tensor)
    new = inserted(rows.next, aten.rand_like.default, (rows,), rows)
    claim(new).pop("call", None)
    claim(new).pop("sharding", None)


def terms_of_two_sums(ranks: list[ExportedProgram]) -> None:
    """Each rank adds a term of a sum that is the value, and of another sum that is it too."""
    for rank, program in enumerate(ranks):
        product, other = (n for n in program.graph.nodes if n.target is aten.linear.default)
        whole, late = (n for n in program.graph.nodes if n.target is torch.ops._c10d_functional.wait_tensor.default)
        add, start = next(n for n in program.graph.nodes if n.name == "add"), late.args[0]
        assert isinstance(start, fx.Node)
        start.prepend(whole)
        made = aten.full_like.default if rank else aten.clone.default
        term = inserted(start, made, (whole, 0) if rank else (whole,), whole)
        early = inserted(start, aten.add.Tensor, (term if rank else product, other), product)
        for new in (term, early):
            claim(new).clear()
        claim(term).update(origin="linear", sharding=["P(sum)"], reshard="again", change="R -> P(sum)")
        claim(early).update(origin="add", sharding=["P(sum)"])
        start.update_arg(0, early)
        claim(late)["origin"] = "add"
        add.replace_all_uses_with(late)
        program.graph.erase_node(add)
        program.graph_signature.output_specs[0].arg = TensorArgument(name=late.name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "damage", "finding"),
    [
        ("masked", a_clamp_in_a_change, "a change moves and reduces values, and does nothing else"),
        ("masked", an_op_that_is_called_a_body, "not all ranks have body mine"),
        ("masked", another_number_where_it_is_nan, "is given other=nan, and the whole other=0.5"),
        ("masked", an_assertion_on_one_rank, "ranks 0 and 1 have shares of different programs"),
        ("masked", another_constant_is_returned, "ranks 0 and 1 have shares of different programs"),
        ("pick", ids_are_not_counted_from_the_end, "is not what the rule of aten.index.Tensor does on a share"),
        ("halves", another_half_of_many_rows, "a change moves and reduces values, and does nothing else"),
        ("halves", a_half_by_its_size, "which is no fixed part of it"),
        ("counts", another_size_is_recorded, "and records"),
        ("pick", a_draw_in_a_body, "nothing that this makes depends on it"),
        ("sums", terms_of_two_sums, "as P(sum) by the op, and as P(sum) by reshard again"),
    ],
)
def test_what_numbers_do_not_show(model: str, damage: Callable[[list[ExportedProgram]], None], finding: str) -> None:
    exported, asked = MODELS[model]()
    sound = Artifact.of(tpcompiler.parallelize(exported, 2, asked.pop("plan"), **asked))
    assert check_programs(sound.written(), sound.manifest, exported).findings == []
    damaged = sound.copied()
    for program in damaged.ranks:
        program._graph_signature = copy.deepcopy(program.graph_signature)
    damage(damaged.ranks)
    findings = check_programs(damaged.written(), damaged.manifest, exported).findings
    assert finding in "\n".join(findings)


def test_terms_that_cancel() -> None:
    """Their sum is the bias, but for what is added to each before."""
    exported, asked = MODELS["masked"]()
    artifact = Artifact.of(tpcompiler.parallelize(exported, 2, asked["plan"]))
    for rank, term in enumerate((2.0**19, -(2.0**19))):
        artifact.put(rank, "down.bias", artifact.leaf(rank, "down.bias").round() + term)
    exported.state_dict["down.bias"].data.round_()
    assert check_programs(artifact.written(), artifact.manifest, exported).findings == [
        "'down.bias' is not the term of rank 0 for P(sum)"
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("on", [(1,), (0, 1)])
def test_infinity_is_not_the_largest_number(on: tuple[int, ...]) -> None:
    exported, asked = MODELS["masked"]()
    artifact = Artifact.of(tpcompiler.parallelize(exported, 2, asked["plan"]))
    for rank in on:
        artifact.put(rank, "mask", artifact.leaf(rank, "mask").clamp(min=torch.finfo(torch.float32).min))
    (finding,) = check_programs(artifact.written(), artifact.manifest, exported).findings
    assert finding.startswith("'mask'")


def test_a_defect_of_the_check_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    exported, asked = MODELS["masked"]()
    artifact = Artifact.of(tpcompiler.parallelize(exported, 2, asked["plan"]))
    (found,) = check_programs(artifact.written()[:1], artifact.manifest).findings
    assert found == "there are 1 programs for 2 ranks"

    def fail(made: object, rank: int) -> None:
        raise TypeError("so be it")

    monkeypatch.setattr("tpcompiler.judge.sound.check.check_ops", fail)
    with pytest.raises(InternalError, match=r"^rank_0.pt2: the check failed, and proves nothing: TypeError: so be it"):
        check_programs(artifact.written(), artifact.manifest)


def test_one_number_that_stands_in_a_million_million_places() -> None:
    """Compared as what it takes in memory."""
    zero = torch.zeros(())
    many = (1 << 20, 1 << 20)
    assert same_bits(zero.expand(many), torch.zeros(()).expand(many))
    assert not same_bits(zero.expand(many), torch.tensor(-0.0).expand(many))
    assert not same_bits(zero.expand(2, 1 << 20), zero.expand(many))
    assert same_bits(torch.ones(3).expand(2, 3), torch.ones(2, 3))
    assert not same_bits(torch.ones(3).expand(2, 3), torch.tensor([[1.0, 1, 1], [1, 2, 1]]))
    assert same_bits(zero.expand(0, 3), torch.zeros(0, 3))


def test_the_size_of_a_group_where_payloads_are_dynamic() -> None:
    exported = export(nn.Sequential(nn.Linear(8, 4)), (torch.randn(6, 8),), dynamic_shapes=({0: ROWS},))
    artifact = Artifact.of(tpcompiler.parallelize(exported, 2, {"0": "rowwise"}))
    assert check_programs(artifact.written(), artifact.manifest, exported).findings == []
    force_setattr(artifact.manifest.collectives[0], "group_size", 1)
    (finding,) = check_programs(artifact.written(), artifact.manifest, exported).findings
    assert "has group_size=2, and the manifest says 1" in finding
