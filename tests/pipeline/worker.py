"""One rank: load each artifact, make its calls in order, write what this rank got."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tpcompiler
from tpcompiler._torch import tree_map

folder = Path(sys.argv[1])
torch.set_num_threads(1)
for name in sys.argv[2:]:
    calls, options = torch.load(folder / f"{name}.calls", weights_only=False)
    module = tpcompiler.load(folder / name, **options)
    results = []
    for program, args, kwargs in calls:
        made = (module[program] if program else module)(*args, **kwargs)
        results.append(tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, made))
    torch.save(results, folder / f"{name}.{dist.get_rank()}.made")
