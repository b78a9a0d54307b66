"""One rank: changes of the placements of tensors, and their gradients."""

import os
import sys
from pathlib import Path

import torch

import tpcompiler

out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
mesh, shape, changes = torch.load(out / "asked")
results = []
for source, target, gradient, parts, weights in changes:
    x = parts[rank].requires_grad_(weights is not None)
    made = tpcompiler.redistribute(x, mesh, source, target, shape=shape, gradient=gradient)
    if weights is not None:
        made.backward(weights[rank])
    results.append((made.detach(), x.grad))
torch.save(results, out / f"{rank}.results")
