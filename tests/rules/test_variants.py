"""Ops over a dim that is cut: in simpler ops, where that moves less than the op on the whole; the numbers are the op's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

import tpcompiler
from tests.rules.recurrent_samples import RECURRENT
from tests.rules.sample import Sample, call, node_of
from tests.zoo.case import randomise
from tpcompiler import check_rule
from tpcompiler._torch import OpOverload  # its module defines PT2E's ops
from tpcompiler.errors import RuleError
from tpcompiler.judge.rules.run_on_shards import check_variant
from tpcompiler.rules import registry, scans

aten, pt2e = torch.ops.aten, torch.ops.quantized_decomposed
BYTE = (-128, 127, 1e-6, torch.int8)
INF, NAN = float("inf"), float("nan")
X = torch.randn(3, 24, dtype=torch.float64)
TIES = torch.tensor([[1.0, 3, 3, 0], [NAN, 2, NAN, 1], [-INF, -INF, -INF, -INF], [0, 0, 0, INF]])
PIXELS = torch.randn(4, 6, 2, 8, dtype=torch.float64) * 3 + 50
LINES = torch.tensor([[1.0, 3, -INF, 0], [-INF] * 4])
W = torch.randn(24, dtype=torch.float64)
HEADS = torch.randn(2, 4, 3, 8, dtype=torch.float64)

SAMPLES: dict[OpOverload, list[Any]] = {
    aten.softmax.int: [(X, 1), (X, 0), (TIES, 1), (X.half(), -1, torch.float32)],
    aten._softmax.default: [(X, 1, False)],
    aten._safe_softmax.default: [(LINES, 1), (X, 0)],
    aten.log_softmax.int: [(X, 1), (TIES, 1)],
    aten._log_softmax.default: [(X, 1, False)],
    aten._softmax_backward_data.default: [(X, X.sin().softmax(1), 1, X.dtype)],
    aten._log_softmax_backward_data.default: [(X, X.sin().log_softmax(0), 0, X.dtype)],
    aten.layer_norm.default: [(X, [24], W, W.sin()), (X, [3, 24]), (X, [24], W)],
    aten.native_layer_norm.default: [(X, [24], W, None, 1e-3)],
    aten.rms_norm.default: [(X, [24], W, 1e-2), (X, [24])],
    aten._fused_rms_norm.default: [(X, [24], W, 1e-2)],
    aten.group_norm.default: [(X.view(1, 12, 6), 3, W[:12], W[12:]), (X.view(3, 6, 2, 2), 2)],
    aten.native_group_norm.default: [(X.view(2, 6, 6), W[:6], None, 2, 6, 6, 3, 1e-3), (PIXELS, None, W[:6], 4, 6, 16, 1, 1e-3)],
    aten.var.correction: [((X, [1]), {"correction": 1}), ((X,), {"correction": 0}), ((X, [0], ), {"keepdim": True})],
    aten.var_mean.correction: [((X, [1]), {"correction": 2, "keepdim": True}), ((X, [0, 1]), {})],
    aten.linalg_vector_norm.default: [(X, 3, [1]), (X, 1.5), (X, 2, [0], True)],
    aten.dist.default: [(X, X.cos()), (X, W, 3), (X.half(), W[:1].half(), 1.5)],
    aten.any.default: [(X > 2,), (torch.zeros(3, 4),)],
    aten.any.dim: [(X > 1, 1), (torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8), 1, True)],
    aten.any.dims: [(X > 1, [0, 1])],
    aten.all.default: [(X < 9,), (TIES,)],
    aten.all.dim: [(X < 1, 1)],
    aten.all.dims: [(X < 1, [0], True)],
    aten.scaled_dot_product_attention.default: [
        (HEADS, HEADS.cos(), HEADS.sin()),
        (HEADS, HEADS.cos(), HEADS.sin(), HEADS[..., :3] > -0.5),
        (HEADS[:, :, :1], HEADS.cos(), HEADS.sin(), torch.tensor([[0.0, -INF, -3.0]])),
        (HEADS[..., :1, :], HEADS.cos(), HEADS.sin(), torch.tensor([[False, False, False]])),
        ((HEADS, HEADS[:, :2].cos(), HEADS[:, :2].sin()), {"enable_gqa": True, "scale": 0.3}),
        ((HEADS, HEADS[:, :2].cos(), HEADS[:, :2].sin(), None, 0.0, True), {"enable_gqa": True, "scale": 0.3}),
    ],
    aten.aminmax.default: [(X,), ((X,), {"dim": 1}), ((TIES,), {"dim": 0, "keepdim": True}), ((W,), {"dim": -1})],
    aten.argmax.default: [(X, 1), (TIES, 1), (TIES, 0, True), (W,)],
    aten.argmin.default: [(X, 1), (TIES, 1), (TIES.nan_to_num(), 0)],
    aten.max.dim: [(X, 1), (TIES, 1), (TIES, 0, True), (X > 0, 1)],
    aten.min.dim: [(X, 1), (TIES, 1), (TIES, 0, True)],
    aten.select.int: [(X, 1, 5), (X, 0, -1), (X.float(), -1, -3)],
    aten.slice.Tensor: [(X, 1, 2, 7), (X, -1, -5), (X, 1, 1, 20, 3), (X, 0, 0, 99)],
    aten.select_scatter.default: [(X, W[:3], 1, 5), (X, W, 0, -1)],
    aten.slice_scatter.default: [(X, X[:, :5], 1, 2, 7), (X, X[:, :12], -1, 0, None, 2), (X, X[:, :4], 1, -7, 99, 2)],
    aten.cumsum.default: [(X, 1), (TIES, 1), ((9 * X).to(torch.int8), 1), ((X, -1), {"dtype": torch.float32})],
    aten.cumprod.default: [(X, 1), (TIES, 0), ((9 * X).int(), 1), ((X > 0, -1), {"dtype": torch.int32})],
    aten.logcumsumexp.default: [(X, 1), (TIES, 1)],
    aten.cummax.default: [(X, 1), (TIES, 1), (TIES, 0), ((9 * X).to(torch.int8), 1), (X > 0, -1)],
    aten.cummin.default: [(X, 1), (TIES, 1), (TIES, 0), ((2 * X).long(), 1), (X > 0, -1)],
    aten.topk.default: [(X, 3), (X, 2, 0), (X, 5, 1, False)],
    pt2e.choose_qparams.tensor: [(X.float(), *BYTE), (X.float() - 99, *BYTE), (-TIES[:1], *BYTE), (TIES, *BYTE)],
    pt2e.choose_qparams_symmetric.tensor: [(X.float(), *BYTE)],
}  # fmt: skip


BATCH_NORMS = [
    call(aten._native_batch_norm_legit.no_stats, PIXELS, W[:6], None, True, 0.1, 1e-3, text=None),
    call(aten._native_batch_norm_legit.no_stats, X, None, None, True, 0.1, 1e-5, text=None),
    call(
        aten._native_batch_norm_legit_functional.default,
        *(PIXELS, W[:6], W[6:12], W[12:18], W[18:].abs(), True, 0.3, 1e-3),
        text=None,
    ),
    call(aten._native_batch_norm_legit_functional.default, X[:2], None, W, W, W.abs(), True, 1.0, 1e-5, text=None),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_a_variant_makes_what_its_op_makes(op: OpOverload) -> None:
    ran = check_rule(op, SAMPLES[op]).ran
    assert sum(each.endswith("in simpler ops") for each in ran) >= len(SAMPLES[op])


@pytest.mark.parametrize("sample", [*RECURRENT, *BATCH_NORMS], ids=str)
def test_ops_with_kernels_that_read_beyond_operands(sample: Sample) -> None:
    """`check_rule` also tries placements of which the kernel of an LSTM or a batch norm reads what is not there."""
    for degree in (2, 3):
        assert {*check_variant(node_of(sample), degree, sample.args, {})} == {"in simpler ops"}


@pytest.mark.parametrize("order", [0, INF, -INF])
def test_a_norm_that_its_rule_reduces_has_no_variant(order: float) -> None:
    assert registry.call_variant(aten.linalg_vector_norm.default, {}, (X, order), {}) is NotImplemented


def test_every_variant_has_samples() -> None:
    assert registry._VARIANTS.keys() == SAMPLES.keys() | {sample.target for sample in [*RECURRENT, *BATCH_NORMS]}


def test_one_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._VARIANTS, aten.softmax.int, lambda x, dim: x.exp() / x.exp().sum(dim + 1, True))
    with pytest.raises(
        RuleError, match=r"the variant of aten.softmax.int is wrong: output 0 is off by .* on one device"
    ):
        check_rule(aten.softmax.int, [(X, 0)])


@pytest.mark.parametrize("op", [aten.softmax.int, aten.argmax.default, aten.layer_norm.default], ids=str)
def test_narrow_floats(op: OpOverload) -> None:
    """Within the rounding of the narrow dtype, as torch's kernels work in float32 too."""
    x = torch.randn(4, 64).bfloat16()
    args = (x, [64]) if op is aten.layer_norm.default else (x, 1)
    made = registry.call_variant(op, {}, args, {})
    torch.testing.assert_close(made, op(*args), rtol=2**-7, atol=2**-7)


class Between(nn.Module):
    """Something over the features that a layer cuts."""

    def __init__(self, what: Callable[[Between, torch.Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.what = nn.Linear(64, 256), nn.Linear(256, 64), what
        self.norm, self.rms, self.table = nn.LayerNorm(256), nn.RMSNorm(256), nn.Parameter(torch.randn(16, 8, 64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(self, self.up(x))


LABELS = torch.arange(16) * 7 % 256
MEAN, OUT = 64, 4096  # bytes: of a number for each of 16 lines, and of the result
WITH_DOWN: dict[str, tuple[Callable[[Between, torch.Tensor], Any], list[int]]] = {
    "layer norm": (lambda m, h: m.down(m.norm(h)), [MEAN, MEAN, OUT]),
    "rms norm": (lambda m, h: m.down(m.rms(h)), [MEAN, OUT]),
    "softmax": (lambda m, h: m.down(h.softmax(-1)), [MEAN, MEAN, OUT]),
    "log softmax": (lambda m, h: m.down(h.log_softmax(-1)), [MEAN, MEAN, OUT]),
    "a written column": (lambda m, h: m.down(torch.select_scatter(h, h.new_ones(2, 8), -1, 7)), [OUT]),
    "written steps": (lambda m, h: m.down(torch.slice_scatter(h, h.new_ones(2, 8, 128), -1, 0, None, 2)), [OUT]),
    "normalize": (lambda m, h: m.down(F.normalize(h, dim=-1)), [MEAN, OUT]),
}
ALONE: dict[str, tuple[Callable[[Between, torch.Tensor], Any], list[int]]] = {
    "a column": (lambda m, h: h[..., 3] * 2, [MEAN]),
    "argmax": (lambda m, h: h.argmax(-1), [MEAN, 2 * MEAN]),  # places are int64
    "max": (lambda m, h: h.max(-1), [MEAN, 2 * MEAN]),
    "min": (lambda m, h: h.min(-1, keepdim=True), [MEAN, 2 * MEAN]),
    "var": (lambda m, h: h.var(-1), [MEAN, MEAN]),
    "a norm of order 3": (lambda m, h: h.norm(3, dim=-1), [MEAN]),
    "any": (lambda m, h: (h > 3).any(-1), [MEAN]),
    "all": (lambda m, h: (h > -3).all(-1), [MEAN]),
    "cross entropy": (lambda m, h: F.cross_entropy(h.flatten(0, 1), LABELS, reduction="sum"), [MEAN, MEAN, 4]),
}


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", [*WITH_DOWN, *ALONE])
def test_what_one_number_a_line_does(name: str, mesh: Any) -> None:
    what, sent = (WITH_DOWN | ALONE)[name]
    program = converted(what, mesh, name in WITH_DOWN)
    assert {c.kind for c in program.collectives()} == {"all_reduce"}
    assert [c.payload_bytes for c in program.collectives()] == sent
    assert all(c.why == "inherent" for c in program.collectives())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["layer norm", "softmax", "log softmax"])
def test_dynamic_batches(name: str) -> None:
    program = converted(WITH_DOWN[name][0], 2, True, {0: Dim("batch")})
    assert [c.kind for c in program.collectives()] == ["all_reduce"] * 3
    assert program.verify((torch.randn(5, 8, 64),)).ok


SCANS = "cumsum", "cumprod", "logcumsumexp"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_totals_of_the_ranks_before(name: str, world: int) -> None:
    """One total for each of 16 lines and each rank, in float32, where the op itself would gather 256 numbers a line."""
    program = converted(lambda m, h: m.down(getattr(h, name)(-1)), world, True)
    totals, gathered = 16 * 4 * world, 16 * 4 * 256
    *sent, last = program.collectives()
    assert (last.kind, last.payload_bytes) == ("all_reduce", OUT)
    if world == 2:
        assert [(c.kind, c.payload_bytes) for c in sent] == [("all_gather", totals)]
    else:  # to whole lines of some tokens and back, which is less than every total to every rank
        assert {c.kind for c in sent} == {"all_to_all"}
        assert sum(c.wire_bytes for c in sent) < totals * (world - 1) / world
    assert gathered // totals == 256 // world


def test_a_wrong_total_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a total that counts the rank's own block too."""
    monkeypatch.setattr(scans, "_shifted", lambda totals, dim, start: totals)
    for op in (op.default for op in scans.SCANS):
        with pytest.raises(RuleError, match=f"the variant of {op} is wrong"):
            check_rule(op, SAMPLES[op])


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
def test_the_best_of_the_best(world: int) -> None:
    """Three candidates of every rank, with their places."""
    program = converted(lambda m, h: h.topk(3, -1), world, False)
    assert max(c.payload_bytes for c in program.collectives()) <= 16 * 3 * world * 8


@pytest.mark.sample(1)
@pytest.mark.sweep
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("what", "count"),
    [
        (lambda table: table[torch.arange(8), torch.arange(8) * 3 % 8], 8 * 64),  # one of two indices is of the cut dim
        (lambda table: table[2:5, 2:5] * 2, 3 * 3 * 64),
        (lambda table: table[3, -1] * 2, 64),
    ],
    ids=["several indices", "slices", "one"],
)
def test_a_few_rows_of_a_cut_weight(what: Callable[[torch.Tensor], torch.Tensor], count: int, dim: int) -> None:
    net, x = randomise(Between(lambda m, h: what(m.table))), torch.randn(2, 8, 64)
    program = tpcompiler.parallelize(export(net, (x,)), 2, {"table": f"S({dim})"})
    assert [c.kind for c in program.collectives()] == ["all_reduce"]
    assert program.collectives()[0].payload_bytes <= 4 * count * (8 if dim else 1)  # other dims may be cut afterwards
    assert program.verify((x,)).ok


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_that_are_cut(groups: int) -> None:
    """Over 4 ranks, of one or two groups of channels: sums of each group's values and squares."""
    net = nn.Sequential(nn.Conv2d(4, 16, 1), nn.GroupNorm(groups, 16), nn.ReLU(), nn.Conv2d(16, 4, 1))
    x = torch.randn(2, 4, 8, 8)
    program = tpcompiler.parallelize(export(randomise(net), (x,)), 4, {"0": "colwise", "3": "rowwise"})
    assert [(c.kind, c.payload_bytes) for c in program.collectives()] == [
        ("all_reduce", 8),
        ("all_reduce", 8),
        ("all_reduce", 2048),
    ]
    assert program.verify((x,)).ok


class Read(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.layer = kind(24, 40, **how)
        self.out = nn.Linear(40 * (1 + self.layer.bidirectional), 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0])  # type: ignore[no-any-return]


STEPS = 6


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mesh", [2, 4, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("kind", "how", "gathers"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}, 2 * STEPS + 2 * (STEPS - 1)),
        (nn.GRU, {"bias": False}, STEPS - 1),
        (nn.RNN, {"nonlinearity": "relu", "batch_first": True}, STEPS - 1),
    ],
)
def test_recurrent_layers(kind: type[nn.RNNBase], how: dict[str, Any], gathers: int, mesh: Any) -> None:
    """Each state is gathered once: for the next step, and for the layer above if there is one."""
    net, samples = randomise(Read(kind, **how)), 0 if how.get("batch_first") else 1
    x, sizes = torch.randn(4, STEPS, 24).transpose(0, samples).contiguous(), ({samples: Dim("samples")},)
    exported = export(net, (x,), dynamic_shapes=sizes)
    if torch.__version__ < (2, 13) and any(
        node.name == "getitem_1" and node.meta["val"].ndim != 3 for node in exported.graph.nodes
    ):
        pytest.skip("this torch records states of an LSTM with a dim too many: it stays whole")
    program = tpcompiler.parallelize(exported, mesh, {"layer": "colwise", "out": "rowwise"})
    found = Counter(c.kind for c in program.collectives())
    assert found == {"all_gather": gathers, "all_reduce": 1}
    assert not [c for c in program.collectives() if c.why == "fallback"]
    assert program.parameter_bytes()[1][0] < 0.52 * program.parameter_bytes()[0] or mesh == 4
    assert program.verify((x,)).ok


def converted(
    what: Callable[[Between, torch.Tensor], Any], mesh: Any, has_down: bool, dynamic: Any = None
) -> tpcompiler.ParallelProgram:
    x = torch.randn(2, 8, 64)
    exported = export(randomise(Between(what)), (x,), dynamic_shapes=dynamic and (dynamic,))
    plan = {"up": "colwise", **({"down": "rowwise"} if has_down else {})}
    program = tpcompiler.parallelize(exported, mesh, plan)
    assert program.verify((x,)).ok
    return program
