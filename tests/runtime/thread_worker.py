"""One rank whose programs several threads call: `thread_worker.py DIRECTORY HOW`; prints what became of each call.

HOW: "at once" (a second thread of rank 0 calls while the first one's call waits for rank 1), "in turn" (a thread for
each call, one after the other), "inside" (a call from within a call, by the same thread).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpcompiler
from tpcompiler.errors import TpCompilerError
from tpcompiler.runtime.turns import taking_turns

directory, how = Path(sys.argv[1]), sys.argv[2]
compiled = (directory / "out" / "compiled.pt2").exists()
programs = tpcompiler.load(directory / "out", compiled=compiled)
x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
refused = directory / "refused"


def call(name: str, scale: float) -> None:
    try:
        said = f"{programs[name](x * scale).sum():.3f}"
    except TpCompilerError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{name}: {said}", flush=True)


def in_thread(name: str, scale: float) -> threading.Thread:
    thread = threading.Thread(target=call, args=(name, scale))
    thread.start()
    return thread


def wait(ready: Any) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


if how == "at once" and dist.get_rank() == 0:
    first = in_thread("one", 1)
    time.sleep(1)  # it waits for rank 1
    call("two", 1)
    refused.touch()
    first.join()
    call("one", 1)
elif how == "at once":
    wait(refused.exists)
    call("one", 1)
    call("two", 1)
elif how == "in turn":
    for at in range(6):
        in_thread(("one", "two")[at % 2], at).join()
else:
    with taking_turns(["tp=2:tp"]):  # as in a call
        call("one", 1)
