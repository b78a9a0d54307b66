"""One rank: load each saved artifact, run it on the saved inputs, write what this rank got."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tpcompiler.runtime.inputs import read_inputs

folder = Path(sys.argv[1])
torch.set_num_threads(1)
for name in sys.argv[2:]:  # several artifacts in one process: their group names must not collide
    module = tpcompiler.load(folder / name)
    args, kwargs = read_inputs(folder / f"{name}.safetensors", module.exported_program)
    with torch.no_grad():
        result = module(*args, **kwargs)
    values = result.values() if isinstance(result, dict) else [result]
    torch.save([v for v in values if isinstance(v, torch.Tensor)], folder / f"{name}.{dist.get_rank()}.out")
