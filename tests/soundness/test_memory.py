"""How much memory the check of a large vocabulary takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tpcompiler
from tests.launch import fork_code

VOCABULARY = 64_000
MOST = 256  # MiB; at sizes of 24 the logits of one rank take 70, and every step of a gather makes them again
CHECK = """
import sys, threading
from pathlib import Path
import tpcompiler

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

peak, ended = 0, threading.Event()
def watch():
    global peak
    while not ended.wait(0.005):
        peak = max(peak, own())

check = tpcompiler.open(sys.argv[1]).check
before = own()
watching = threading.Thread(target=watch, daemon=True)  # an error in the check ends the process
watching.start()
report = check()
ended.set()
watching.join()
print(report.ok, peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("ranks", [3, 2])
def test_gathered_logits_are_checked_at_short_sizes(ranks: int, tmp_path: Path) -> None:
    """A batch and a length that are dynamic: at large sizes the logits are many times the largest tensor."""
    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=1, max=4096)
    exported = torch.export.export(
        nn.Sequential(nn.Linear(4, VOCABULARY, bias=False)),
        (torch.randn(3, 5, 4),),
        dynamic_shapes=({0: batch, 1: length},),
    )
    tpcompiler.parallelize(exported, ranks, {"0": "colwise"}, outputs=["R"]).save(tmp_path / "out")
    done = fork_code(CHECK, tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stderr
    ok, took = done.stdout.split()[-2:]
    assert ok == "True"
    assert int(took) < MOST
