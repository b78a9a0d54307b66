"""The way out: gloo's threads end before the interpreter does.

A thread of gloo lets go of a collective's tensors a moment after the caller has them, and takes the GIL to do so. If
the interpreter is shutting down by then, that aborts the process: "terminate called without an active exception".
Destroying a group ends its threads, but only if nothing else refers to it. So groups are destroyed at exit, and nothing
here holds one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import weakref

import torch.distributed as dist


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the group when the script ends, however it ends, unless the caller has by then."""
    atexit.register(_destroy, weakref.ref(group))


def _destroy(held: weakref.ref[dist.ProcessGroup]) -> None:
    group = held()
    if group is not None:
        with contextlib.suppress(ValueError):  # the caller has destroyed it, and something still refers to it
            dist.destroy_process_group(group)


def release_default_group() -> None:
    """Import the module of torch that would keep the default group alive, before it can.

    The functions of `torch.distributed.nn.functional`, which `torch.export.load` imports, have the default group as it
    is at their import for the default of an argument. `destroy_process_group` then does not end that group's threads.
    """
    name, world = "torch.distributed.nn.functional", dist.group.WORLD
    if name in sys.modules:
        return
    dist.group.WORLD = None
    try:
        importlib.import_module(name)
    finally:
        dist.group.WORLD = world
