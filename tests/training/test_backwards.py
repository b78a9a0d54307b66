"""Backwards in simpler ops, and those with rules: gradients are autograd's, on one device and on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpcompiler
from tests.passes.stages import Call
from tpcompiler.errors import UnsupportedError

ROWS = {"tp": "S(0)"}
BAGS = torch.tensor([0, 3, 1, 2, 2, 6, 5, 4]), torch.tensor([0, 3, 3, 6])
IMAGE = torch.randn(4, 3, 8, 8)


def _masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(x > 0, self.w * 2)


# A model and its inputs, cut by samples: the gradients of parameters are summed, and the loss, and nothing else is sent.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), (torch.randn(4, 3, 7),)),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2)), (IMAGE,)),
    "adaptive pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)), (IMAGE,)),
    "adaptive maximum": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(2)), (IMAGE,)),
    "replicated edges": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), (IMAGE,)),
    "convolution in groups": (lambda: nn.Conv2d(3, 6, 3, groups=3), (IMAGE,)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 6, 3), (IMAGE,)),
    "antialiased": (
        lambda: Call(
            lambda self, x: F.interpolate(self.up(x), 9, mode="bicubic", antialias=True), up=nn.Conv2d(3, 4, 3)
        ),
        (IMAGE,),
    ),
    "grid of samples": (
        lambda: Call(lambda self, x, grid: F.grid_sample(self.up(x), grid, align_corners=False), up=nn.Conv2d(3, 4, 3)),
        (IMAGE, torch.rand(4, 5, 5, 2)),
    ),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (IMAGE,)),
    "distances": (
        lambda: Call(lambda self, x: torch.cdist(self.up(x), x), up=nn.Linear(6, 6)),
        (torch.randn(4, 5, 6),),
    ),
    "attention of grouped queries": (
        lambda: Call(
            lambda self, x: F.scaled_dot_product_attention(
                self.up(x).view(4, 5, 4, 3).transpose(1, 2),
                *x.view(4, 5, 2, 2, 3).permute(2, 0, 3, 1, 4).unbind(0),
                enable_gqa=True,
            ),
            up=nn.Linear(12, 12),
        ),
        (torch.randn(4, 5, 12),),
    ),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {  # what is not cut by samples
    **{
        f"bags, {mode}": (lambda mode=mode: nn.EmbeddingBag(7, 4, mode=mode), BAGS)  # type: ignore[misc]
        for mode in ("sum", "mean", "max")
    },
    "bags in float32": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), BAGS),  # which torch sums without the bag of each id
    "bags with padding": (lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=2), BAGS),
    "weighted bags": (
        lambda: Call(
            lambda self, ids, offsets: F.embedding_bag(ids, self.t, offsets, mode="sum", per_sample_weights=self.w * 2),
            t=nn.Parameter(torch.randn(7, 4)),
            w=nn.Parameter(torch.randn(8)),
        ),
        BAGS,
    ),
    "scattered at a mask": (lambda: Call(_masked, w=nn.Parameter(torch.randn(4, 5))), (torch.randn(4, 5),)),
}


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*CASES, *WHOLE])
def test_gradients_are_autograd_s(name: str) -> None:
    torch.manual_seed(0)
    make, args = {**CASES, **WHOLE}[name]
    model = make()
    if "in float32" not in name:
        model = model.double()
        args = tuple(value.double() if value.is_floating_point() else value for value in args)
    program = tpcompiler.export_training(model, args, loss=_squares)
    got = program.module(check_guards=False)(*args)["gradients"]
    _squares(model(*args)).backward()
    torch.testing.assert_close(got, {name: value.grad for name, value in model.named_parameters()})
    inputs = {} if name in WHOLE else dict.fromkeys(program.graph_signature.user_inputs, ROWS)
    plan = {"weight": "S(0)"} if "bags" in name and "weighted" not in name and "max" not in name else {}
    made = tpcompiler.parallelize(program, 2, plan, inputs=inputs, machine="ideal")
    assert made.verify(args).ok
    sent = Counter[tuple[str, str]]()
    for each in made.collectives():
        sent[each.kind, each.why] += each.payload_bytes
    if name in CASES:
        of_parameters = sum(value.numel() for value in model.parameters())
        lengths = 4 if name == "weight norm" else 0  # made, as directions are, of the gradient of the weight
        output = model(*args).numel()  # which is asked for whole
        assert sent == {
            ("all_reduce", "inherent"): 8 * (of_parameters - lengths + 1),
            ("all_gather", "plan-demanded"): 8 * output,
        }
    else:
        assert not any(why == "fallback" for _, why in sent)


LABELS = torch.tensor([[0, 2, -1, 1], [1, -1, -1, -1], [3, 1, 0, 2]])  # those behind the first -1 do not count
MISREAD: dict[str, Callable[[], nn.Module]] = {
    "labels": lambda: Call(lambda self, x: F.multilabel_margin_loss(self.up(x), LABELS), up=nn.Linear(6, 4)),
    "labels of each": lambda: Call(
        lambda self, x: F.multilabel_margin_loss(self.up(x), LABELS, reduction="none"), up=nn.Linear(6, 4)
    ),
    **{
        f"{kind.__name__} with dropout": lambda kind=kind, more=more: Call(  # type: ignore[misc]
            lambda self, x: self.layers(x.view(3, 2, 3))[0], layers=kind(3, 4, 2, dropout=0.5, **more)
        )
        for kind, more in ((nn.LSTM, {"bidirectional": True}), (nn.GRU, {"batch_first": True}), (nn.RNN, {}))
    },
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MISREAD)
def test_ops_that_torch_takes_apart_wrongly(name: str) -> None:
    """Its form of a loss counts labels that do not count; that of recurrent layers has no dropout between them."""
    model, x = MISREAD[name]().double(), torch.randn(3, 6, dtype=torch.float64)
    program = tpcompiler.export_training(model, (x,), loss=_squares)
    run = program.module(check_guards=False)
    torch.manual_seed(3)
    got = run(x)
    torch.manual_seed(3)
    output = model(x)
    _squares(output).backward()
    torch.testing.assert_close(got["outputs"]["output"], output)
    torch.testing.assert_close(got["gradients"], {name: value.grad for name, value in model.named_parameters()})
    if "dropout" in name:
        torch.manual_seed(4)
        assert not torch.allclose(run(x)["outputs"]["output"], output)
    made = tpcompiler.parallelize(program, 2, {}, inputs={"x": ROWS} if "labels" in name else {})
    assert made.verify((x,)).ok


class _Transposed(nn.Module):
    """Normalises a value in another memory order, and views the result as if it had that order too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(20, 6))
        return made


def test_batch_norm_of_a_transposed_value() -> None:
    model, x = _Transposed().double().train(), torch.randn(4, 5, 6, dtype=torch.float64)
    program = tpcompiler.export_training(model, (x,), loss=_squares)
    got = program.module(check_guards=False)(x)["gradients"]
    _squares(model(x)).backward()
    torch.testing.assert_close(got, {name: value.grad for name, value in model.named_parameters()})
    assert tpcompiler.parallelize(program, 2, {}, inputs={"x": ROWS}).verify((x,)).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda self, x: torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: x * 2, (x,)), r"'cond' \(cond\)"),
        (lambda self, x: torch.linalg.inv(self.up(x)), r"'with_effects' \(aten._linalg_check_errors.default\)"),
    ],
)
def test_control_flow_and_effects_are_refused(forward: Callable[..., Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{said} is not supported in a program with gradients"):
        tpcompiler.export_training(Call(forward, up=nn.Linear(6, 6)), (torch.randn(6, 6),), loss=_squares)
