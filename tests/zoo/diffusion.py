"""Networks that take noise out of images, written as the published ones are."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.case import BATCH, Case, Layers, noise, randomise

WIDTH = 32


def _steps(step: torch.Tensor, width: int) -> torch.Tensor:
    """How far the noise is: sines and cosines of the step."""
    frequencies = torch.exp(torch.arange(width // 2, device=step.device) * (-math.log(1000.0) / (width // 2)))
    angles = step[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


class Attention(nn.Module):
    """Of a sequence to another one, or to itself."""

    def __init__(self, width: int, other: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(other, width, bias=False)
        self.v_proj = nn.Linear(other, width, bias=False)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            proj(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj, of in ((self.q_proj, x), (self.k_proj, other), (self.v_proj, other))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class ResnetBlock(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inside)
        self.conv1 = nn.Conv2d(inside, out, 3, padding=1)
        self.time = nn.Linear(WIDTH, out)
        self.norm2 = nn.GroupNorm(4, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Identity() if inside == out else nn.Conv2d(inside, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(inner))) + self.short(x)  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention of the image to itself and to the text, and an MLP with a gate."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = Attention(width, width, heads)
        self.cross_attn = Attention(width, text, heads)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        height = x.shape[2]
        flat = self.norm(x).flatten(2).transpose(1, 2)
        normed = self.norm1(flat)
        flat = flat + self.self_attn(normed, normed)
        flat = flat + self.cross_attn(self.norm2(flat), text)
        normed = self.norm3(flat)
        flat = flat + self.down(self.up(normed) * F.gelu(self.gate(normed)))
        return x + flat.transpose(1, 2).unflatten(2, (height, -1))


class UNet(nn.Module):
    """Down, attend, up again beside what was kept on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.time1, self.time2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv_in = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.down1 = ResnetBlock(WIDTH, WIDTH)
        self.shrink = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.down2 = ResnetBlock(WIDTH, 2 * WIDTH)
        self.attend = TransformerBlock(2 * WIDTH, 24, 8)
        self.up1 = ResnetBlock(2 * WIDTH, 2 * WIDTH)
        self.grow = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)
        self.up2 = ResnetBlock(2 * WIDTH, WIDTH)
        self.norm_out = nn.GroupNorm(4, WIDTH)
        self.conv_out = nn.Conv2d(WIDTH, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time2(F.silu(self.time1(_steps(step, WIDTH))))
        first = self.down1(self.conv_in(sample), time)
        x = self.down2(self.shrink(first), time)
        x = self.up1(self.attend(x, text), time)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up2(torch.cat([x, first], 1), time)
        return self.conv_out(F.silu(self.norm_out(x)))  # type: ignore[no-any-return]


def _noisy(batch: int, size: int) -> dict[str, torch.Tensor]:
    step = torch.linspace(3, 700, batch + 1)[1:]
    return {**noise("sample", batch, 4, size, size), "step": step, **noise("text", batch, 5, 24)}


UNET = Case(
    name="unet",
    tested="norms of groups, resizing, skips that are put beside",
    build=lambda: randomise(UNet()),
    inputs=_noisy,
    dims={"sample": {0: BATCH}, "step": {0: BATCH}, "text": {0: BATCH}},
    example=(2, 16),
    others=((3, 16), (1, 16)),
    plan={
        "time1": "colwise",
        "time2": "rowwise",
        "**.conv1": "colwise",
        "**.time": "colwise",
        "**.conv2": "rowwise",
        "**.short": "rowwise",
        "**.q_proj": "colwise",
        "**.k_proj": "colwise",
        "**.v_proj": "colwise",
        "**.o_proj": "rowwise",
        "**.gate": "colwise",
        "**.up": "colwise",
        "**.down": "rowwise",
        "shrink": "colwise_gather_output",
        "grow": "colwise_gather_output",
        "conv_out": {"inputs": ["R"]},  # or else a batch that the ranks divide is cut for the last norm
    },
    # The second convolution, to which a short cut is added before the sum; attention to itself, to the text, the MLP.
    layers=(
        Layers("down1", 1, {"all_reduce": 1}),
        Layers("down2", 1, {"all_reduce": 1}),
        Layers("attend", 1, {"all_reduce": 3}),
        Layers("up1", 1, {"all_reduce": 1}),
        Layers("up2", 1, {"all_reduce": 1}),
    ),
    outside={"all_reduce": 1, "all_gather": 2},  # the step; the halved image, the doubled one
    cut=0.98,  # 3,812 of 274,276 numbers whole: first and last convolution 2,340, norms 960, row-wise biases 512
    flops=0.98,
)


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by six parts of one vector."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = Attention(width, width, heads)
        self.fc1, self.fc2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        normed = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(normed, normed)
        normed = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(normed)))  # type: ignore[no-any-return]


class DiT(nn.Module):
    """Patches in, a step and a label as condition, patches out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 48, 2, 2)
        self.positions = nn.Parameter(torch.zeros(64, 48))
        self.label = nn.Embedding(10, 48)
        self.time1, self.time2 = nn.Linear(WIDTH, 96), nn.Linear(96, 48)
        self.blocks = nn.ModuleList(DiTBlock(48, 8) for _ in range(2))
        self.norm = nn.LayerNorm(48, elementwise_affine=False)
        self.modulation = nn.Linear(48, 2 * 48)
        self.out = nn.Linear(48, 2 * 2 * 4)

    def forward(self, sample: torch.Tensor, step: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.patches(sample)
        height = x.shape[2]
        x = x.flatten(2).transpose(1, 2) + self.positions
        condition = self.time2(F.silu(self.time1(_steps(step, WIDTH)))) + self.label(label)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, -1)
        x = self.out(self.norm(x) * (1 + scale) + shift)
        x = x.reshape(x.shape[0], height, -1, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).flatten(4, 5).flatten(2, 3)


def _labelled(batch: int, size: int) -> dict[str, torch.Tensor]:
    sample = _noisy(batch, size)
    return {"sample": sample["sample"], "step": sample["step"], "label": torch.arange(batch) * 3 % 10}


DIT = Case(
    name="dit",
    build=lambda: randomise(DiT()),
    inputs=_labelled,
    dims={"sample": {0: BATCH}, "step": {0: BATCH}, "label": {0: BATCH}},
    example=(2, 16),
    others=((3, 16), (1, 16)),
    plan={
        "patches": "colwise_gather_output",
        "label": "colwise_gather_output",
        "time1": "colwise",
        "time2": "rowwise",
        "**.q_proj": "colwise",
        "**.k_proj": "colwise",
        "**.v_proj": "colwise",
        "**.o_proj": "rowwise",
        "**.fc1": "colwise",
        "**.fc2": "rowwise",
        "**.modulation": "colwise_gather_output",
        "modulation": "colwise_gather_output",
        "out": "colwise_gather_output",
    },
    # Attention's output projection, the MLP's second layer; the packed modulation.
    layers=(Layers("blocks.*", 2, {"all_reduce": 2, "all_gather": 1}),),
    outside={"all_reduce": 1, "all_gather": 4},  # the step; the patches, the label, the last modulation, the output
    cut=0.96,  # 3,312 of 92,464 numbers whole: positions 3,072, row-wise biases 240
    flops=0.99,
)

CASES = [UNET, DIT]
