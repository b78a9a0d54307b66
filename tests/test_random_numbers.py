"""Ops that draw random numbers draw for the whole value on every rank: seeded alike, all are as the single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported
from tests.sound import findings
from tpcompiler import ParallelProgram
from tpcompiler.ir import edit
from tpcompiler.ir.draws import draws
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.judge.compare.simulate import simulate
from tpcompiler.rules.registry import rule_of

aten = torch.ops.aten
ALLOWED = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)

FOR_A_SHAPE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "rand_like of a permuted value": lambda x: x.t() + torch.rand_like(x.t()),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint_like": lambda x: x * torch.randint_like(x, 3, 9),
    "bernoulli of one probability": lambda x: x * torch.bernoulli(x, 0.3),
    "uniform_": lambda x: x * x.clone().uniform_(2, 3),
    "normal_": lambda x: x * x.clone().normal_(1, 2),
    "exponential_": lambda x: x * x.clone().exponential_(2),
    "cauchy_": lambda x: x * x.clone().cauchy_(),
    "log_normal_": lambda x: x * x.clone().log_normal_(),
    "geometric_": lambda x: x * x.clone().geometric_(0.3),
    "random_": lambda x: x * x.clone().random_(9),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "dropout of a permuted value": lambda x: F.dropout(x.t(), 0.5, True),
    "dropout of features": lambda x: F.dropout1d(x, 0.5, True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand": lambda x: x + torch.rand(x.shape[-1]),
    "randn": lambda x: x + torch.randn(x.shape[-1]),
    "randint": lambda x: x + torch.randint(0, 9, (x.shape[-1],)),
    "normal of numbers": lambda x: x + torch.normal(0.0, 1.0, (x.shape[-1],)),
    "randperm": lambda x: x[torch.randperm(4)],
    "attention with dropout": lambda x: attention(x),
    "attention with dropout and a mask": lambda x: attention(x, attn_mask=ALLOWED),
    "causal attention with dropout": lambda x: attention(x, is_causal=True),
}
FOR_VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "normal": lambda x: torch.normal(x, x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def attention(x: torch.Tensor, **options: Any) -> torch.Tensor:
    heads = x.unflatten(-1, (4, -1)).transpose(0, 1)[None]
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5, **options)
    return mixed[0].transpose(0, 1).flatten(1)


def converted(draw: Callable[[torch.Tensor], torch.Tensor], world: int) -> ParallelProgram:
    """Numbers for a value that is cut (its sum is made whole again), and then for one that is whole."""
    net = Net(lambda self, x: (draw(self.up(x)).float().abs().sum(-1), draw(self.both(x))))
    return tpcompiler.parallelize(exported(net, X), world, PLAN)


def on_all(made: ParallelProgram, world: int) -> list[list[torch.Tensor]]:
    return [r.outputs for r in simulate([made.rank_program(i) for i in range(world)], [[X]] * world)]


@pytest.mark.slow
@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [*FOR_A_SHAPE, *FOR_VALUES])
def test_every_rank_draws_what_the_single_device_draws(name: str, world: int) -> None:
    made = converted((FOR_A_SHAPE | FOR_VALUES)[name], world)
    report = made.verify((X,))
    assert report.ok, report
    assert all(d.tolerance < 1e-4 for d in report.outputs)  # float64 draws the same numbers, or the two are far apart
    single = made.only.original().module()
    for seed in (3, 4):
        torch.manual_seed(seed)
        want = single(X)
        torch.manual_seed(seed)
        for got in on_all(made, world):
            torch.testing.assert_close(got, list(want), rtol=1e-4, atol=1e-4)
    assert not torch.equal(single(X)[1], single(X)[1])  # negative control: it does draw
    (note,) = [note.text for note in made.converted.resharded.notes if note.kind == "random"]
    assert note.endswith(": seed every rank alike, torch.manual_seed")
    assert note in made.report()


@pytest.mark.sample(6)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FOR_A_SHAPE)
def test_numbers_for_a_shape_need_no_value(name: str) -> None:
    """What is drawn is whole on every rank, and its operand is not gathered for it."""
    made = converted(FOR_A_SHAPE[name], 2)
    drawing = [node for node in edit.calls(made.converted.resharded.graph) if draws(node)]
    assert len(drawing) == 2
    for node in drawing:
        assert all(sharding.is_replicated for sharding in placement_of(node).shardings)
        assert all(operand.name.startswith("ones") for operand in edit.operands(node))


SLICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows of a transposed value": lambda x: x.t()[2:].uniform_(),
    "every second column": lambda x: x[:, ::2].uniform_(),
    "a block": lambda x: x[1:3, 2:5].t().exponential_(),
    "normal of every second column": lambda x: x[:, ::2].normal_(1, 2),
    "normal of a block of an odd number": lambda x: x[1:, 1:].normal_(),
    "normal of a column of rows": lambda x: x.view(-1, 2)[:, 1].normal_(),
    "normal of fewer than a block": lambda x: x[:2, ::2].normal_(),
    "normal of rows of a transposed value": lambda x: x.t()[1:].normal_(),
    "bernoulli of a transposed value": lambda x: x[:2].t().bernoulli_(0.4),
    "bernoulli of rows of a transposed value": lambda x: x.t()[2:].bernoulli_(0.4),
    "bernoulli of every second column": lambda x: x[:, ::2].bernoulli_(0.4),
    "bernoulli of a transposed value, not in place": lambda x: x.t().copy_(torch.bernoulli(x.t(), 0.4)),
    "dropout of a transposed value": lambda x: F.dropout(x.t(), 0.5, True, inplace=True),
    "dropout of a transposed slice": lambda x: F.dropout(x[:, ::2].t(), 0.5, True, inplace=True),
    "alpha dropout of a transposed value": lambda x: F.alpha_dropout(x.t(), 0.5, True, inplace=True),
    "alpha dropout of a transposed value, not in place": lambda x: x.t().copy_(F.alpha_dropout(x.t(), 0.5, True)),
    "dropout of every second column": lambda x: F.dropout(x[:, ::2], 0.5, True, inplace=True),
}


@pytest.mark.sample(1)
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", SLICES)
def test_numbers_for_a_slice(name: str) -> None:
    """The slice has gaps in memory, the numbers drawn for it have none, and the check reads both."""
    net = Net(lambda self, x: ((y := self.up(x) * 1), SLICES[name](y), y * 2 + torch.rand(()))[2])
    program = exported(net, X)
    for form in (program, program.run_decompositions({})):  # torch's functional form draws other numbers
        made = tpcompiler.parallelize(form, 2, {"up": "colwise"})
        assert made.verify((X,), then=[(X + 1,)]).ok
        assert not findings(made)


def test_normal_numbers_for_a_slice_of_a_dynamic_size() -> None:
    """In blocks or one by one: how many there are decides."""
    net = Net(lambda self, x: ((y := self.up(x) * 1), y[:, ::2].normal_(), y * 2)[2])
    program = torch.export.export(net, (X,), dynamic_shapes=(({0: Dim("batch", min=2)},),))
    with pytest.raises(tpcompiler.UnsupportedError, match="draws into a slice of") as error:
        tpcompiler.parallelize(program, 2, {"up": "colwise"})
    assert "torch.randn_like" in str(error.value)


def test_no_drawing_op_is_cut() -> None:
    """Whatever tags or rules torch and this project give it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    for target, args in ((aten.rrelu.default, (x, 0.1, 0.3, True)), (aten.bernoulli.default, (x,))):
        node = graph.call_function(target, args)
        node.meta["val"] = X
        assert rule_of(node) is None
    still = graph.call_function(aten.rrelu.default, (x, 0.1, 0.3, False))
    still.meta["val"] = X
    assert rule_of(still) is not None


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["dropout", "attention with dropout", "rand_like", "bernoulli", "poisson"])
def test_half_precision(name: str) -> None:
    """The comparison in float32 takes the numbers that are drawn in bfloat16, and nothing else of it."""
    draw = (FOR_A_SHAPE | FOR_VALUES)[name]
    net = Net(lambda self, x: (self.down(draw(self.up(x))), draw(self.both(x)))).to(torch.bfloat16)
    report = tpcompiler.parallelize(exported(net, X.bfloat16()), 2, PLAN).verify((X.bfloat16(),))
    assert report.ok, report
    assert all(d.tolerance < 1e-4 for d in report.outputs if "float32" in d.name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_the_dropout_between_their_layers(kind: type[nn.Module]) -> None:
    """torch takes them apart without it."""
    net = Net(lambda self, x: self.layers(self.both(x))[0], layers=kind(8, 8, 2, dropout=0.5))
    made = tpcompiler.parallelize(torch.export.export(net, (X,)), 2, PLAN)
    assert made.verify((X,)).ok
    torch.manual_seed(3)
    want = made.only.original().module()(X)
    torch.manual_seed(3)
    for (got,) in on_all(made, 2):
        torch.testing.assert_close(got, want)
    torch.manual_seed(4)
    assert not torch.allclose(made.only.original().module()(X), want)  # negative control


def dropped(p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)[0]


def with_no_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.rand(3)
        return F.dropout(x, 0.5, True)


# What each draws depends on its arguments, or nobody uses it: the number that is drawn next tells.
SELDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout of everything": lambda x: F.dropout(x, 1.0, True),
    "dropout of everything in place": lambda x: F.dropout(x.exp(), 1.0, True, inplace=True),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True),
    "native dropout of everything": lambda x: aten.native_dropout(x, 1.0, True)[0],
    "native dropout of nothing": lambda x: aten.native_dropout(x, 0.0, True)[0],
    "native dropout, always": lambda x: aten.native_dropout(x, 0.5, None)[0],
    "native dropout, never": lambda x: aten.native_dropout(x, 0.5, False)[0],
    "dropout of all features": lambda x: torch.feature_dropout(x, 1.0, True),
    "alpha dropout of everything": lambda x: F.alpha_dropout(x, 1.0, True),
    "attention that drops everything": dropped(1.0),
    "attention that drops nothing": dropped(0.0),
    "a deviation of zero": lambda x: torch.normal(x, 0.0),
    "rrelu in eval mode": lambda x: F.rrelu(x, training=False),
    "an order of one": lambda x: x[torch.randperm(1)],
    "no number": lambda x: x + torch.rand(0).sum(),
    "a draw that nobody uses": lambda x: (torch.rand(3), x * 1)[1],
    "dropout that nobody uses": lambda x: (F.dropout(x, 0.5, True), x * 1)[1],
    "choices that nobody uses": lambda x: (torch.multinomial(x.sigmoid(), 2), x * 1)[1],
    "values that nobody reads": lambda x: (x.exp().uniform_(), x * 1)[1],
    "a draw that nobody uses beside a written view": lambda x: ((y := x * 1)[0].zero_(), torch.rand(3), y)[2],
    "a draw without gradients": with_no_grad,
}


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("dialect", ["training", "canonical"])
@pytest.mark.parametrize("name", SELDOM)
def test_what_is_drawn_next_is_what_the_single_device_draws_next(name: str, dialect: str) -> None:
    net = Net(lambda self, x: SELDOM[name](self.up(x)) + torch.rand(16))
    program = torch.export.export(net, (X,))
    made = tpcompiler.parallelize(
        program if dialect == "training" else program.run_decompositions({}), 2, {"up": "colwise"}
    )
    report = made.verify((X,), then=[(X + 1,)])
    assert report.ok, report
    assert all(d.tolerance < 1e-4 for d in report.outputs)
    torch.manual_seed(3)
    want, after = made.only.original().module()(X), torch.get_rng_state()
    torch.manual_seed(3)
    for result in simulate([made.rank_program(rank) for rank in range(2)], [[X]] * 2):
        torch.testing.assert_close(result.outputs, [want])
        assert result.drawn is not None
        assert torch.equal(result.drawn[0], after)


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "p"), [(1, 0.5), (2, 1.0), (2, 0.0)])
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
def test_recurrent_layers_that_do_not_draw(kind: type[nn.Module], layers: int, p: float) -> None:
    net = Net(lambda self, x: self.layers(self.both(x))[0] + torch.rand(8), layers=kind(8, 8, layers, dropout=p))
    program = torch.export.export(net, (X,))
    made = tpcompiler.parallelize(program, 2, PLAN)
    assert made.verify((X,)).ok
    torch.manual_seed(3)
    want = program.module()(X)
    torch.manual_seed(3)
    for (got,) in on_all(made, 2):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_ranks_in_one_process_have_generators_of_their_own_and_leave_the_callers() -> None:
    made = converted(FOR_A_SHAPE["rand"], 2)
    before = torch.get_rng_state()
    first, second = on_all(made, 2)
    assert torch.equal(first[1], second[1])
    assert torch.equal(torch.get_rng_state(), before)
