"""Losses, norms, sorts and forms of indexing: cuts are kept through them, and all ranks together are right.

Most have no rule of their own: it is what torch makes of them that keeps the cut. The collectives of each are written
out beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import export

import tpcompiler
from tests.machines import SLOW, WIRE
from tests.passes.stages import Call

ROWS = 24  # enough that gathering them all costs more than reducing one number
SUM = "all_reduce inherent"
OUT = "all_gather plan-demanded"  # the program's output is asked for whole
FALLBACK = "all_gather fallback"


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    collectives: list[str]
    cut: str = "S(0)"  # of every input
    parts: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    features: int = 6
    machine: str = SLOW  # ops that are cut stay so, even where their operands are cheaper to gather than the result


def _labels(x: torch.Tensor) -> torch.Tensor:
    """From 0 to 5, cut as x is."""
    return (x[:, 0].abs() * 3).long().clamp(max=5)


CASES = {
    "cross entropy": Case(lambda self, x: F.cross_entropy(x, _labels(x)), [SUM, SUM]),
    "cross entropy of weighted classes": Case(
        lambda self, x: F.cross_entropy(x, _labels(x), self.w, ignore_index=2, label_smoothing=0.1),
        [SUM, SUM, SUM],
        parts={"w": torch.arange(1.0, 7.0)},
    ),
    "cross entropy of pixels": Case(
        lambda self, x: F.cross_entropy(x.unsqueeze(-1), _labels(x).unsqueeze(-1)), [SUM, SUM]
    ),
    "cross entropy of cut classes": Case(
        lambda self, x: F.cross_entropy(x, self.y), [SUM, SUM, SUM], "S(1)", features=64, machine=WIRE
    ),
    "nll, summed": Case(lambda self, x: F.nll_loss(x, _labels(x), reduction="sum"), [SUM]),
    "nll, each": Case(lambda self, x: F.nll_loss(x, _labels(x), reduction="none"), [OUT]),
    "squares": Case(lambda self, x: F.mse_loss(x, x.tanh()), [SUM]),
    "absolute": Case(lambda self, x: F.l1_loss(x, x.tanh(), reduction="sum"), [SUM]),
    "smooth": Case(lambda self, x: F.smooth_l1_loss(x, x.tanh()) + F.huber_loss(x, x.tanh()), [SUM]),
    "binary": Case(lambda self, x: F.binary_cross_entropy_with_logits(x, x.sigmoid()), [SUM]),
    "divergence": Case(lambda self, x: F.kl_div(x.log_softmax(1), x.sin().softmax(1), reduction="batchmean"), [SUM]),
    "angles": Case(lambda self, x: F.cosine_embedding_loss(x, x.exp(), x[:, 0].sign()), [SUM]),
    "triplets": Case(lambda self, x: F.triplet_margin_loss(x, x.sin(), x.cos()), [SUM]),
    "margins": Case(lambda self, x: F.multi_margin_loss(x, _labels(x)), [SUM]),
    "labels until the first -1": Case(lambda self, x: F.multilabel_margin_loss(x, (x * 3).long().clamp(-1, 5)), [SUM]),
    "log of a sum, lines cut": Case(lambda self, x: x.logsumexp(1), [OUT]),
    "log of a sum over a cut dim": Case(lambda self, x: x.logsumexp(0), [SUM, SUM]),
    "deviation": Case(lambda self, x: torch.std_mean(x, 1)[0], [OUT]),
    "counts": Case(lambda self, x: ((x > 0).count_nonzero(0), x.nansum(0)), [SUM, SUM]),
    "a product": Case(lambda self, x: x.prod(0), [SUM]),
    "length 1": Case(lambda self, x: F.normalize(x), [OUT]),
    "lines by length": Case(lambda self, x: x.norm(dim=1).argsort().sum(), [FALLBACK]),
    "weight norm": Case(
        lambda self, x: self.l(x), [OUT], parts={"l": nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))}
    ),
    "instances": Case(lambda self, x: F.instance_norm(x.view(ROWS, 2, 3)), [OUT]),
    "groups": Case(lambda self, x: F.group_norm(x.view(4, 6, 6), 3), [OUT]),
    "fill": Case(lambda self, x: x.index_fill(1, self.y[:2], 3.0), [OUT]),
    "take along": Case(lambda self, x: torch.take_along_dim(x, x.argsort(1), 1), [OUT]),
    "one hot": Case(lambda self, x: F.one_hot(_labels(x), 6), [FALLBACK, FALLBACK, OUT]),
    "members": Case(lambda self, x: torch.isin(_labels(x), self.y[:2]), [OUT]),
    "likes": Case(lambda self, x: torch.zeros_like(x) + x.new_ones(ROWS, 6) + torch.full_like(x, 2.0), [OUT]),
    "added by label": Case(lambda self, x: self.w.index_add(0, _labels(x), x), [SUM], parts={"w": torch.randn(6, 6)}),
    "largest by label": Case(
        lambda self, x: torch.ones(6, 6).scatter_reduce(0, (x * 3).long().abs().clamp(max=5), x, "amax"), [SUM]
    ),
    "groups between convolutions": Case(
        lambda self, x: self.down(torch.relu(self.norm(self.up(x.unsqueeze(-1))))),
        [SUM],
        "R",
        {"up": nn.Conv1d(6, 8, 1), "norm": nn.GroupNorm(4, 8), "down": nn.Conv1d(8, 3, 1)},
        {"up": "colwise", "down": "rowwise"},
    ),
    "bags over cut rows": Case(
        lambda self, x: self.table(_labels(x).view(6, 4)),
        [SUM],
        "R",
        {"table": nn.EmbeddingBag(7, 3, mode="mean", padding_idx=2)},
        {"table": "embedding_rowwise"},
    ),
    "bags and what is said of them": Case(
        lambda self, x: torch._embedding_bag(self.w, _labels(x), torch.tensor([0, 9, 9]), mode=1)[:3],
        [SUM, SUM, SUM],
        "R",
        {"w": (7, 3)},
        {"w": "S(0)"},
    ),
    "a table by ids": Case(lambda self, x: self.w[_labels(x)], [SUM], "R", {"w": (7, 3)}, {"w": "S(0)"}),
    "triangle": Case(lambda self, x: x.tril(-9), [OUT]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_the_cut_is_kept(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module = Call(case.function, y=torch.randint(6, (ROWS,)), **case.parts)
    args = (torch.randn(ROWS, case.features),)
    parallel = tpcompiler.parallelize(export(module, args), 2, case.plan, inputs=[case.cut], machine=case.machine)
    assert [f"{c.kind} {c.why}" for c in parallel.collectives()] == case.collectives
    assert not [note.text for note in parallel.converted.resharded.notes if note.kind == "no rule"]
    report = parallel.verify(args)
    assert report.ok, report
