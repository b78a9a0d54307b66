"""Clean exit: end gloo's threads before the interpreter.

A gloo thread releases a collective's tensors a moment after the caller has them, and takes the GIL to do so. If the
interpreter is already shutting down, that aborts the process: "terminate called without an active exception".
Destroying a group ends its threads, but only if nothing else refers to it. So groups are destroyed at exit, and this
module keeps no reference to one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
import weakref

import torch.distributed as dist


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the group when the script ends, in any way, unless the caller has destroyed it already."""
    atexit.register(_destroy, weakref.ref(group))


def _destroy(reference: weakref.ref[dist.ProcessGroup]) -> None:
    group = reference()
    if group is not None:
        with contextlib.suppress(ValueError):  # the caller has destroyed it, and something still refers to it
            dist.destroy_process_group(group)


def release_default_group() -> None:
    """Import the module of torch that would keep the default group alive, before the group exists for it.

    `torch.export.load` imports `torch.distributed.nn.functional`, whose functions take the default group of that moment
    as the default of an argument. `destroy_process_group` could then not end that group's threads.
    """
    name, world = "torch.distributed.nn.functional", dist.group.WORLD
    if name in sys.modules:
        return
    dist.group.WORLD = None
    try:
        importlib.import_module(name)
    finally:
        dist.group.WORLD = world
