"""Models of images with rows cut: halos, statistics of norms, and the keys and values of attention; never an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.export import export

import tpcompiler
from tests.zoo.case import randomise

CUT = {"cp": "S(2)"}
HEIGHT, WIDTH, CHANNELS = 64, 8, 16


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """A machine whose ops take long next to its links, as those of a full-size decoder do: here they are small."""
    path = tmp_path / "slow.yaml"
    links = [{"latency": 0.0, "bandwidth": 1e10}]
    path.write_text(yaml.safe_dump({"flops": 1e11, "memory_bandwidth": 2e11, "memory": 8e10, "links": links}))
    return str(path)


def gathered(program: tpcompiler.ParallelProgram) -> list[tuple[int, str]]:
    return [(each.payload_bytes, each.module) for each in program.collectives() if each.kind == "all_gather"]


class Decoder(nn.Module):
    """The decoder of an image model of diffusers, in its own modules."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        blocks = 2
        model: Any = AutoencoderKL(  # type: ignore[no-untyped-call]
            block_out_channels=(CHANNELS // 2, CHANNELS),
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
        )
        self.decoder = model.decoder

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_decoder_of_diffusers(world: int, machine: str) -> None:
    """Fourteen group norms reduce two numbers a group; fourteen convolutions of 3 x 3 exchange rows."""
    x = torch.randn(1, 4, HEIGHT, WIDTH)
    exported = export(randomise(Decoder()).eval(), (x,))
    program = tpcompiler.parallelize(exported, {"cp": world}, {}, inputs=[CUT], outputs=[CUT], machine=machine)
    tokens = HEIGHT * WIDTH * CHANNELS * 4
    assert gathered(program) == [(tokens, "decoder.mid_block.attentions.0")] * 2  # keys and values
    kinds = [each.kind for each in program.collectives()]
    norms = sum(isinstance(each, nn.GroupNorm) for each in Decoder().modules())
    windows = sum(isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3) for each in Decoder().modules())
    assert (kinds.count("all_reduce"), kinds.count("all_to_all")) == (2 * norms, windows)
    assert program.verify((x,)).ok
    assert program.check().ok
