"""One rank: three steps of AdamW on the artifact `out` of a directory, and the parameters after them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tests.training.zoo_steps import train

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out", training=True)
losses = train(module, torch.load(directory / "inputs"))
shares = {name: value.detach() for name, value in module.named_parameters()}
torch.save((losses, shares), directory / f"{dist.get_rank()}.made")
dist.destroy_process_group()
