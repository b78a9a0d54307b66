"""One rank: train the artifact `out` of a directory on this rank's share of `batches`, write its parameters."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler

directory = Path(sys.argv[1])
module = tpcompiler.load(directory / "out", training=True)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
rank, norms, losses = dist.get_rank(), [], []
for batches in torch.load(directory / "batches"):
    optimizer.zero_grad()
    for ids in batches:  # gradients add up
        own = ids.chunk(2)[rank // 2]
        loss = module(own, own) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    norms.append(module.clip_grad_norm_(0.5))
    optimizer.step()
loss = module(own, own)
loss.backward(retain_graph=True)
try:
    loss.backward()
    again = ""
except RuntimeError as error:
    again = str(error)
torch.save(
    (losses, norms, {name: each.detach() for name, each in module.named_parameters()}, again),
    directory / f"{rank}.made",
)
dist.destroy_process_group()
