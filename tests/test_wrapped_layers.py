"""Styles on layers whose weight is computed: by torch's parametrizations, or by adapters around the layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn.utils import parametrizations, parametrize, weight_norm

import tpcompiler
import tpcompiler._torch  # defines PT2E's ops

SIZES = (16, 32)


class Gate(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.sigmoid(weight)


class Dora(nn.Module):
    """A linear layer as PEFT wraps it: a product of two small matrices on top, columns of a length that is learned."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        self.lora_magnitude_vector = nn.Parameter(torch.rand(layer.out_features) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base_layer.weight
        length = torch.linalg.norm(weight + self.lora_B.weight @ self.lora_A.weight, dim=1).detach()
        scale = (self.lora_magnitude_vector / length).view(1, -1)
        return self.base_layer(x) + (scale - 1) * nn.functional.linear(x, weight) + scale * self.lora_B(self.lora_A(x))


class Lora(nn.Module):
    """A linear layer as a user wraps it; `base_layer` is PEFT's name of it."""

    def __init__(self, layer: nn.Linear, name: str = "linear") -> None:
        super().__init__()
        self.name = name
        self.a = nn.Linear(layer.in_features, 4, bias=False)
        self.b = nn.Parameter(torch.rand(layer.out_features, 4))
        self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x) + (self.a(x) @ self.b.t()) * 0.5


class Sum(nn.Module):
    """Two layers side by side, of which none is what the other adds to."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.one, self.two = layer, nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


def gated(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Gate())
    return layer


class Mlp(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = wrap(nn.Linear(*SIZES)), wrap(nn.Linear(*reversed(SIZES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.sample(2)
@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("wrap", "reductions"),
    [
        (nn.Identity(), 1),
        (gated, 1),
        (parametrizations.weight_norm, 2),  # of what the layer gives, and of the lengths of its weight's cut rows
        (weight_norm, 2),
        (Dora, 2),
    ],
    ids=["plain", "parametrization", "weight_norm", "older weight_norm", "dora"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_pair_cuts_what_the_weight_is_made_of(
    wrap: Callable[[nn.Linear], nn.Module], reductions: int, world: int
) -> None:
    torch.manual_seed(0)
    program = tpcompiler.parallelize(
        export(Mlp(wrap).eval(), (torch.randn(4, 16),)), world, {"up": "colwise", "down": "rowwise"}
    )
    assert program.verify((torch.randn(4, 16),)).ok
    made = program.collectives()
    assert [c.kind for c in made] == ["all_reduce"] * reductions
    assert {c.why for c in made} == {"inherent"}
    cut = [row.name for row in program.manifest().tensors if row.sharding != "R"]
    assert sum(torch.Size(program.only.original().state_dict[name].shape).numel() == 512 for name in cut) == 2


def test_the_inner_name_counts_where_both_are_given() -> None:
    exported = export(Mlp(Lora).eval(), (torch.randn(4, 16),))
    for plan, expected in (({"up": "replicate", "up.linear": "colwise"}, "S(0)"), ({"up": "replicate"}, "R")):
        rows = tpcompiler.parallelize(exported, 2, plan).manifest().tensors
        assert next(row.sharding for row in rows if row.name == "up.linear.weight") == expected


def test_a_module_that_wraps_two_layers_stands_for_none() -> None:
    exported = export(Mlp(Sum).eval(), (torch.randn(4, 16),))
    with pytest.raises(tpcompiler.PlanError) as error:
        tpcompiler.parallelize(exported, 2, {"up": "colwise"})
    assert error.value.message == "style 'colwise' does not fit 'up': it has no weight itself"
    assert error.value.help == "name a layer inside it, such as 'up.one', 'up.two'"


pt2e = torch.ops.quantized_decomposed
BYTE = (-128, 127, torch.int8)


class Outside(nn.Linear):
    """A layer whose own weight nothing uses any more."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.linear(x, weight, self.bias)


class Pt2e(nn.Module):
    """What `convert_pt2e` makes of an MLP: the module around the layers holds their weights as int8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Outside(*SIZES), Outside(*reversed(SIZES))
        for number, layer in enumerate((self.up, self.down)):
            weight = layer.weight.detach()
            scale, zero = weight.abs().amax(1) / 127, torch.zeros(weight.shape[0], dtype=torch.int64)
            self.register_buffer(f"_scale_{number}", scale)
            self.register_buffer(f"_zero_point_{number}", zero)
            self.register_buffer(f"_frozen_param{number}", pt2e.quantize_per_channel(weight, scale, zero, 0, *BYTE))

    def weight(self, number: int) -> torch.Tensor:
        names = (f"_frozen_param{number}", f"_scale_{number}", f"_zero_point_{number}")
        made: torch.Tensor = pt2e.dequantize_per_channel(*(getattr(self, name) for name in names), 0, *BYTE)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = pt2e.dequantize_per_tensor(pt2e.quantize_per_tensor(x, 0.03, 5, *BYTE), 0.03, 5, *BYTE)
        inner = torch.relu(self.up(taken, self.weight(0)))
        inner = pt2e.dequantize_per_tensor(pt2e.quantize_per_tensor(inner, 0.02, -128, *BYTE), 0.02, -128, *BYTE)
        return x + self.down(inner, self.weight(1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3])
def test_styles_cut_the_weights_of_pt2e(world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    exported = export(Pt2e().eval(), (x,))
    program = tpcompiler.parallelize(exported, world, {"up": "colwise", "down": "rowwise"})
    assert program.verify((x,)).ok
    assert [(c.kind, c.why) for c in program.collectives()] == [("all_reduce", "inherent")]
    placed = {row.name: row.sharding for row in program.manifest().tensors}
    assert {name: text for name, text in placed.items() if text != "R"} == {
        "up.bias": "S(0)",
        "down.bias": "P(sum)",
        "_frozen_param0": "S(0)",
        "_scale_0": "S(0)",
        "_zero_point_0": "S(0)",
        "_frozen_param1": "S(1)",
    }
    program.save(tmp_path / "out")  # and checks the files
