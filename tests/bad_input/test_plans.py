"""Plans that contradict the program, themselves or the boundary: one right meaning, or one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpcompiler
from tests.bad_input.models import PLAN, Net, X, exported, refusal
from tests.opaque import opaque
from tests.passes.models import Tied

IDS = torch.tensor([[1, 5, 15], [0, 8, 7]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "boundary", "kinds"),
    [
        # A whole input to a row-wise layer is cut locally; a cut input to a replicated one is followed or gathered.
        ({"down": "rowwise"}, {}, ["all_reduce"]),
        ({"up": "colwise", "down": {"style": "rowwise", "inputs": ["R"]}}, {}, ["all_reduce"]),
        ({"up": "colwise_rep", "down": "rowwise"}, {}, ["all_reduce"]),  # what is gathered would be cut again at once
        ({"up": "rowwise", "down": "colwise"}, {}, ["all_reduce", "all_gather"]),
        # What arrives is not what the plan wants.
        (PLAN, {"inputs": ["S(0)"]}, ["all_gather", "all_reduce"]),
        ({**PLAN, "up": {"style": "colwise", "inputs": ["R"]}}, {"inputs": ["S(1)"]}, ["all_gather", "all_reduce"]),
        ({"up": {"inputs": ["S(1)"]}}, {"inputs": ["S(0)"]}, ["all_gather"]),
        # What leaves is not what the plan says.
        ({"down": "colwise_gather_output"}, {"outputs": ["S(1)"]}, []),
        ({"down": {"style": "colwise", "outputs": ["S(1)"]}}, {"outputs": ["S(0)"]}, ["all_to_all"]),
        (PLAN, {"outputs": ["P(sum)"]}, []),
        (PLAN, {"inputs": ["P(sum)"]}, ["all_reduce", "all_reduce"]),
        (PLAN, {"inputs": {"x_0": None}, "outputs": [None]}, ["all_reduce"]),
    ],
)
def test_wishes_that_differ_are_joined_by_a_collective(
    plan: dict[str, Any], boundary: dict[str, Any], kinds: list[str]
) -> None:
    made = tpcompiler.parallelize(exported(Net(), X), 2, plan, **boundary)
    assert [c.kind for c in made.collectives()] == kinds
    assert made.verify((X,)).ok


def test_whole_numbers_cannot_be_a_pending_sum() -> None:
    program = exported(Net(lambda self, x, count: (self.both(x) * count, x > 0)), X, torch.arange(8))
    assert refusal(program, inputs={"x_1": "P(sum)"}) == (
        "ShardingError: cannot place input 'x_1' as P(sum): it is i64[8], and only floating-point values can be pending "
        "reductions\n  help: place it as R or S(dim)\n  asked by: inputs="
    )
    assert refusal(program, outputs={"1": "P(max)"}) == (
        "ShardingError: cannot place output '1' as P(max): it is b8[4, 8], and only floating-point values can be "
        "pending reductions\n  help: place it as R or S(dim)\n  asked by: outputs="
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"embed": "embedding_rowwise"},
        {"head": "colwise"},
        {"embed": "embedding_rowwise", "head": "colwise_rep"},
        {"embed": "colwise", "head": "rowwise"},
    ],
)
def test_tied_weights_with_one_meaning(plan: dict[str, str]) -> None:
    made = tpcompiler.parallelize(exported(Tied(16), IDS), 2, plan)
    state = made.rank_program(1).state_dict
    assert state["embed.weight"] is state["head.weight"]
    assert state["embed.weight"].numel() == 32
    assert made.verify((IDS,)).ok


@pytest.mark.parametrize(
    ("plan", "first", "second"),
    [
        ({"embed": "colwise", "head": "colwise"}, "embed", "head"),
        ({"embed": "replicate", "head": "colwise"}, "embed", "head"),
        ({"embed.weight": "S(0)", "head": "replicate"}, "head", "embed"),
    ],
)
def test_tied_weights_with_two_meanings(plan: dict[str, str], first: str, second: str) -> None:
    message, help, where = refusal(exported(Tied(16), IDS), plan).splitlines()
    assert message == (
        f"PlanError: '{first}.weight' and '{second}.weight' are one tied tensor, but the plan places them differently"
    )
    assert help == "  help: give both the same placement, or plan only one of them"
    assert where.count("the plan (") == 2


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + opaque(self.weight)


NORM = """use 'replicate', or give a dim of a parameter to cut, as in "layer.weight": "S(0)\""""


@pytest.mark.parametrize(
    ("layer", "style", "message", "help"),
    [
        (nn.LayerNorm(8), "colwise", "no weight of it has output features", NORM),
        (
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            "rowwise",
            "it has no weight itself",
            "name a layer inside it, such as 'layer.0'",
        ),
        (
            Opaque(),
            "colwise",
            "tests.opaque.default has no rule for its use of 'layer.weight'",
            "use 'replicate' for this layer",
        ),
        (
            nn.EmbeddingBag(16, 8, mode="max"),
            "embedding_rowwise",
            "aten._embedding_bag_forward_only.default takes 'layer.weight' and needs what it sums over whole",
            "use 'colwise' or 'replicate'",
        ),
    ],
)
def test_a_style_that_does_not_fit_its_layer(layer: nn.Module, style: str, message: str, help: str) -> None:
    given = IDS if isinstance(layer, nn.EmbeddingBag) else torch.randn(2, 8, 8)
    said = refusal(exported(Wrapped(layer), given), {"layer": style})
    assert said == (
        f"PlanError: style '{style}' does not fit 'layer': {message}\n"
        f'  help: {help}\n  asked by: the plan ("layer": "{style}")'
    )


@pytest.mark.slow
def test_a_layer_that_the_program_does_not_use() -> None:
    program = exported(Net(idle=nn.Linear(8, 8)), X)
    assert refusal(program, {"idle": "colwise"}) == (
        "PlanError: style 'colwise' does not fit 'idle': no op of the program uses it\n"
        '  help: remove the entry\n  asked by: the plan ("idle": "colwise")'
    )
    assert tpcompiler.parallelize(program, 2, {**PLAN, "idle": "replicate"}).verify((X,)).ok


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            {"up.bias": "P(sum)", "up.weight": "S(0)"},
            "cannot use 'up.bias' as P(sum): aten.linear.default says: other operands are cut differently",
        ),
        (
            {**PLAN, "down.bias": "S(0)"},
            "cannot shard 'down.bias' on dim 0 of 8 by mesh axis 'tp' of 2 for aten.linear.default: other operands are "
            "cut differently",
        ),
        (
            {"up.weight": "P(max)"},
            "cannot use 'up.weight' as P(max): aten.linear.default says: it is not linear in operand 1, which is a "
            "pending max",
        ),
    ],
)
def test_parameters_of_one_layer_that_contradict_each_other(plan: dict[str, str], expected: str) -> None:
    assert refusal(exported(Net(), X), plan).splitlines()[0] == f"ShardingError: {expected}"


def test_the_op_that_contradicts_is_named_and_no_degree_that_changes_nothing() -> None:
    """Behind a transposition of the weight, as core ATen has it: of 5 rows 4 ranks have uneven shares, which is right."""
    program = exported(nn.Sequential(nn.Linear(5, 8)), torch.randn(4, 5)).run_decompositions()
    first, second, _ = refusal(program, {"0.weight": "S(1)", "0.bias": "S(0)"}, 4).splitlines()
    assert first == (
        "ShardingError: cannot shard '0.weight' on dim 1 of 5 by mesh axis 'tp' of 4 for aten.addmm.default: other "
        "operands are cut differently"
    )
    assert second.startswith("  help: pin '0.weight' to R")


def views(shape: tuple[int, ...], hidden: int) -> Net:
    return Net(lambda self, x: self.down((self.up(x).view(*shape) * 2).reshape(4, hidden)), hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "hidden"),
    [((4, 3, 4), 12), ((4, 2, 6), 12), ((48,), 12), ((2, 24), 12), ((4, 3, 2, 2), 12), ((8, 6), 12), ((4, 5, 3), 15)],
)
def test_views_of_a_cut_dim(shape: tuple[int, ...], hidden: int) -> None:
    """Even or not: what a shard cannot follow is gathered, never wrong."""
    program = exported(views(shape, hidden), X)
    for world in (2, 3, 4):
        assert tpcompiler.parallelize(program, world, PLAN).verify((X,)).ok


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q, self.o = nn.Linear(12, heads * 2), nn.Linear(heads * 2, 12)
        self.k, self.v = nn.Linear(12, kv_heads * 2), nn.Linear(12, kv_heads * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(mixed.transpose(1, 2).flatten(2))


HEADS = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"), [(6, 6, 3), (6, 2, 2), (6, 6, 4), (6, 2, 3), (6, 2, 8), (6, 1, 2)]
)
def test_heads_that_do_not_divide_and_more_ranks_than_kv_heads(heads: int, kv_heads: int, world: int) -> None:
    """Whole heads are dealt, unevenly where they must be, and kv heads are shared: one sum and no gather."""
    x = torch.randn(2, 3, 12)
    made = tpcompiler.parallelize(exported(Attention(heads, kv_heads), x), world, HEADS)
    assert [c.kind for c in made.collectives()] == ["all_reduce"]
    assert made.verify((x,)).ok
