"""Let one thread at a time call a rank's programs: the order of calls is the order of collectives on every rank.

A lock would not do: if two threads of each rank wait for their turn, rank 0 may run one request first and rank 1 the
other, and each gets parts of the other's answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tpcompiler._torch import group_is_registered, resolve_group
from tpcompiler.errors import LaunchError

HELP = (
    "let one thread make all calls, from a queue whose requests all ranks take in the same order, and restart the job "
    "(docs/deploy.md)"
)


@dataclass
class _Turn:
    """The turn of the programs that use one process group; `spoiled`: two threads have called them at once."""

    lock: Any = field(default_factory=threading.RLock)
    spoiled: bool = False


_turns: dict[str, _Turn] = {}


@contextlib.contextmanager
def taking_turns(groups: Iterable[str]) -> Iterator[None]:
    """Keep other threads from calling programs of these process groups in the block; the same thread may call again.

    If another thread tries, both calls raise, and so does every later one: nobody knows which request the other ranks
    ran. The groups are closed, so that ranks that wait for this one raise too.

    Raises:
        LaunchError: another thread is in such a block, or was during this one.
    """
    names = sorted(groups)
    turns = [_turns.setdefault(name, _Turn()) for name in names]
    where = f"of the group {' and '.join(map(repr, names))} on rank {dist.get_rank()}" if names else ""
    with contextlib.ExitStack() as locks:
        for turn in turns:
            if not turn.lock.acquire(blocking=False):
                for each in turns:
                    each.spoiled = True
                raise LaunchError(
                    f"a second thread calls a program {where} while a first one does: every rank may run their "
                    "requests in another order, and mix up the answers",
                    help=HELP,
                )
            locks.callback(turn.lock.release)
        try:
            _refuse_spoiled(turns, f"no program {where} can be called any more: two threads have called at once")
            yield
            _refuse_spoiled(
                turns,
                f"a second thread called a program {where} during this call, whose answer may be another request's",
            )
        finally:
            if any(turn.spoiled for turn in turns):
                _close(names)


def _refuse_spoiled(turns: Iterable[_Turn], message: str) -> None:
    if any(turn.spoiled for turn in turns):
        raise LaunchError(message, help=HELP)


def _close(names: Iterable[str]) -> None:
    """Make other ranks that wait in these groups fail, so that they do not meet a call of another request."""
    for name in names if dist.get_backend() == "gloo" else ():
        if group_is_registered(name):
            with contextlib.suppress(ValueError):  # the caller has destroyed it
                dist.destroy_process_group(resolve_group(name))
