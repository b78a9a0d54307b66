"""One process: run the ranks that it hosts, and write what came out.

With `train`, three steps of AdamW on this process's samples; else three calls, with `compiled` of the package.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler

directory, how = Path(sys.argv[1]), sys.argv[2]
module = tpcompiler.load(directory, same_bits=True, training=how == "train", compiled=how == "compiled")
process = dist.get_rank()
calls = torch.load(directory.parent / f"{dist.get_world_size()}.calls")[process]
results = []
if how == "train":
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for args in calls:
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        results += [loss.detach().clone(), module.clip_grad_norm_(0.5)]
        optimizer.step()
    results.append({name: each.detach() for name, each in module.named_parameters()})
else:
    results = [module(*args) for args in calls]
torch.save(results, directory.parent / f"{dist.get_world_size()}.{process}.results")
