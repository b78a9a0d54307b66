"""One rank of a world with copies of a program: train, write a checkpoint, go on; read it in a fresh module, go on."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tpcompiler
from tests.training.ways import step

directory, degree = Path(sys.argv[1]), int(sys.argv[2])
batches = torch.load(directory / "batches")
made = {}


def fresh():
    module = tpcompiler.load(directory / "out", training=True, check_inputs=True)["train"]
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


module, optimizer = fresh()
for x in batches[:2]:
    step(module, optimizer, x)
dcp.save(module.distributed_state(optimizer), checkpoint_id=directory / "checkpoint")
made["losses"] = [step(module, optimizer, x) for x in batches[2:]]
module, optimizer = fresh()
dcp.load(module.distributed_state(optimizer), checkpoint_id=directory / "checkpoint")
made["resumed"] = [step(module, optimizer, x) for x in batches[2:]]
module, optimizer = fresh()  # other batches for each copy
made["apart"] = [step(module, optimizer, x) for x in batches + dist.get_rank() // degree]
try:
    module.distributed_state(optimizer)
except tpcompiler.LaunchError as error:
    made["refused"] = str(error)
torch.save(made, directory / str(dist.get_rank()))
dist.destroy_process_group()
