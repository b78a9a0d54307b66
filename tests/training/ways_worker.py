"""One rank: train artifacts of a directory in the ways of `tests/training/ways.py`, write what comes out."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import tpcompiler
from tests.training.ways import master_weights, momentum, overflowing, scaled, step

directory, ways = Path(sys.argv[1]), sys.argv[2:]
batches = torch.load(directory / "batches")
for way in ways:
    module = tpcompiler.load(directory / way.split("_")[0], training=True)
    rank, samples = dist.get_rank(), batches
    if way.startswith("dp"):
        samples = batches.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    made = {}
    if way == "tp_momentum":
        made["losses"] = momentum(module, samples)
    elif way == "dp_sums":  # of two batches each, over dp once
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for one, two in samples.view(-1, 2, *samples.shape[1:]):
            optimizer.zero_grad()
            with module.no_sync():
                module(one).backward()
            module(two).backward()
            optimizer.step()
    elif way == "f32_scaled":
        scaler = ShardedGradScaler("cpu", init_scale=2.0**110, process_group=dist.group.WORLD)
        made["scales"] = scaled(module, overflowing(samples), scaler)
    elif way == "bf16":
        made["master"] = master_weights(module, samples)
    elif way.endswith("_write"):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        mine = samples.chunk(2, 1)[rank // 2] if way == "four_write" else samples
        made["losses"] = [step(module, optimizer, x) for x in mine[:2]]
        dcp.save(module.distributed_state(optimizer), checkpoint_id=directory / "checkpoint")
    elif way.endswith("_resume"):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        with torch.no_grad():
            for each in module.parameters():
                each.zero_()
        dcp.load(module.distributed_state(optimizer), checkpoint_id=directory / "checkpoint")
        made["read"] = {name: each.detach().clone() for name, each in module.named_parameters()}
        made["losses"] = [step(module, optimizer, x) for x in samples[2:]]
    made["parameters"] = {name: each.detach() for name, each in module.named_parameters()}
    torch.save(made, directory / f"{way}.{rank}")
dist.destroy_process_group()
