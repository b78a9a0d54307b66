"""One rank: what it calls, by torch's count and by ours, and whether that is what its files say."""

from __future__ import annotations

import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import tpcompiler
from tpcompiler.report.measured import WatchedCollectives, compare_counts

directory, shape = sys.argv[1], [int(size) for size in sys.argv[2].split(",")]
module = tpcompiler.load(directory)
x = torch.ones(shape)
with torch.no_grad(), WatchedCollectives() as watched, CommDebugMode() as theirs:
    module(x, torch.ones(2, 5, 8))
told = {str(op).rpartition(".")[2]: count for op, count in theirs.get_comm_counts().items() if count}
ours = Counter(call.kind for call in watched.calls)
assert told == {"all_reduce": ours["all_reduce"], "all_gather_into_tensor": ours["all_gather"]}, (told, ours)
if dist.get_rank() == 0:
    rows = compare_counts(tpcompiler.open(directory).only, watched.calls, {"x": x, "other": torch.ones(2, 5, 8)})
    print([(row.layer, row.kind, row.called, row.called_bytes, row.agrees) for row in rows])
dist.destroy_process_group()
