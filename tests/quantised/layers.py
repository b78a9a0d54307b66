"""Linear layers over quantised weights, as their formats hold them and as people write them for export."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """[k/8, n] of eight numbers each -> [k, n]."""
    return ((packed.unsqueeze(1) >> torch.arange(0, 32, 4, dtype=torch.int32).view(1, -1, 1)) & 15).flatten(0, 1)


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """[k, n/8] of eight numbers each -> [k, n]."""
    return ((packed.unsqueeze(2) >> torch.arange(0, 32, 4, dtype=torch.int32).view(1, 1, -1)) & 15).flatten(1, 2)


def packed(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


class Gptq(nn.Module):
    """4 bits: the rows packed, the zero points' columns packed, and for each row the number of its group."""

    def __init__(self, k: int, n: int, group: int = 32) -> None:
        super().__init__()
        self.register_buffer("qweight", packed(k // 8, n))
        self.register_buffer("qzeros", packed(k // group, n // 8))
        self.register_buffer("scales", torch.rand(k // group, n) * 0.02)
        self.register_buffer("g_idx", torch.arange(k, dtype=torch.int32)[torch.randperm(k)] // group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.g_idx.long()
        return x @ ((unpack_rows(self.qweight) - unpack_columns(self.qzeros)[group]) * self.scales[group])


class Awq(nn.Module):
    """4 bits: the columns packed, of weights and zero points."""

    def __init__(self, k: int, n: int, group: int = 32) -> None:
        super().__init__()
        self.group = group
        self.register_buffer("qweight", packed(k, n // 8))
        self.register_buffer("qzeros", packed(k // group, n // 8))
        self.register_buffer("scales", torch.rand(k // group, n) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros, scales = (each.repeat_interleave(self.group, 0) for each in (unpack_columns(self.qzeros), self.scales))
        return x @ ((unpack_columns(self.qweight) - zeros) * scales)


class BlockFp8(nn.Module):
    """8 bits in blocks of 32 x 32 that have a scale each, as DeepSeek-V3's."""

    def __init__(self, k: int, n: int, block: int = 32) -> None:
        super().__init__()
        self.block = block
        self.weight = nn.Parameter(torch.randn(n, k).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.rand(n // block, k // block) * 0.1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.weight.shape
        blocks = self.weight.float().view(n // self.block, self.block, k // self.block, self.block)
        return F.linear(x, (blocks * self.weight_scale_inv[:, None, :, None]).view(n, k))


class Int8Packed(nn.Module):
    """torch's own kernel for 8-bit weights, with a scale for each row."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (n, k), dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.rand(n) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scales)
        return made


class Int4Packed(nn.Module):
    """torch's own kernel for 4-bit weights on CPUs, which lie packed in 64 rows together."""

    def __init__(self, k: int, n: int, group: int = 32) -> None:
        super().__init__()
        self.group = group
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 1)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(torch.rand(k // group, n, 2) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.weight, self.group, self.scales_and_zeros
        )
        return made


class Pair(nn.Module):
    """Two of them, with something between."""

    def __init__(self, kind: type[nn.Module], outer: int = 128, inner: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = kind(outer, inner), kind(inner, outer)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x)))
        return made


class Mlp(nn.Module):
    """For what quantises a model of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x)))
        return made
