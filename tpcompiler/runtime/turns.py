"""Let one thread at a time call a rank's programs: the order of calls is the order of collectives on every rank.

A lock would not do: if two threads of each rank wait for their turn, rank 0 may run one request first and rank 1 the
other, and each gets parts of the other's answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from tpcompiler._torch import group_is_registered, resolve_group
from tpcompiler.errors import LaunchError

HELP = (
    "let one thread make all calls, from a queue whose requests all ranks take in the same order, and restart the job "
    "(docs/deploy.md)"
)


_locks: dict[str, Any] = {}  # by process group
_spoiled: set[str] = set()  # groups whose programs two threads have called at once


@contextlib.contextmanager
def taking_turns(groups: Iterable[str]) -> Iterator[None]:
    """Keep other threads from calling programs of these process groups in the block; the same thread may call again.

    If another thread tries, both calls raise, and so does every later one: nobody knows which request the other ranks
    ran. The groups are closed, so that ranks that wait for this one raise too.

    Raises:
        LaunchError: another thread is in such a block, or was during this one.
    """
    names = sorted(groups)
    where = f"of the group {' and '.join(map(repr, names))} on rank {dist.get_rank()}" if names else ""
    with contextlib.ExitStack() as locks:
        for name in names:
            lock = _locks.setdefault(name, threading.RLock())
            if not lock.acquire(blocking=False):
                _spoiled.update(names)
                raise LaunchError(
                    f"a second thread calls a program {where} while a first one does: every rank may run their "
                    "requests in another order, and mix up the answers",
                    help=HELP,
                )
            locks.callback(lock.release)
        try:
            if not _spoiled.isdisjoint(names):
                raise LaunchError(
                    f"no program {where} can be called any more: two threads have called at once", help=HELP
                )
            yield
            if not _spoiled.isdisjoint(names):
                raise LaunchError(
                    f"a second thread called a program {where} during this call, whose answer may be another request's",
                    help=HELP,
                )
        finally:
            if not _spoiled.isdisjoint(names):
                _close(names)


def _close(names: Iterable[str]) -> None:
    """Make other ranks that wait in these groups fail, so that they do not meet a call of another request."""
    for name in names if dist.get_backend() == "gloo" else ():
        if group_is_registered(name):
            with contextlib.suppress(ValueError):  # the caller has destroyed it
                dist.destroy_process_group(resolve_group(name))
