"""What all ranks must agree on before their first collective: each says what it has, and sees what the others have."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpcompiler._torch import default_store
from tpcompiler.errors import LaunchError, TpCompilerError, reason
from tpcompiler.runtime.artifact import VERSION, Manifest
from tpcompiler.runtime.manifest_form import is_whole

WAIT = timedelta(minutes=5)  # for others: longer than reading a shard takes, shorter than a person waits
POLL = 0.02  # seconds between looks at the store
RESTART = "look for the first error in the logs of all ranks, and start all of them anew"

_turns: Iterator[int] = itertools.count()


@contextmanager
def agreeing(timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Exchange what the block puts in the dict; an error in the block is told to the others before it goes on.

    Raises:
        LaunchError: a rank that did not come in time, one that failed, or one that said something else.
    """
    mine: dict[str, Any] = {}
    key = f"tpcompiler/{next(_turns)}"
    try:
        yield mine
    except TpCompilerError as error:
        _say(key, {"error": error.message})
        raise
    except Exception as error:
        _say(key, {"error": f"{type(error).__name__}: {error}"})
        raise
    _say(key, mine)
    for rank, theirs in enumerate(_heard(key, timeout)):
        for what, value in mine.items():
            if theirs.get(what) != value:
                raise LaunchError(
                    f"{what} is {value} on rank {dist.get_rank()}, and {theirs.get(what)} on rank {rank}",
                    help="give all ranks the same, and start all anew",
                )


def artifact_facts(manifest: Manifest) -> dict[str, Any]:
    """What must be the same on all ranks: the artifact, the world, the versions that run it."""
    data = json.dumps([manifest.files, manifest.mesh, manifest.groups], sort_keys=True)
    return {
        "the artifact": f"SHA-256 {hashlib.sha256(data.encode()).hexdigest()[:12]}..",
        "the world": manifest.world_size,
        "the version of torch": torch.__version__,
        "the version of tpcompiler": VERSION,
    }


def input_facts(named: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, Any]:
    """Dtype and shape of every input; of one that all ranks are given whole, a hash of its content too."""
    rows = {row["name"]: row for row in manifest.inputs}
    facts = {}
    for name, value in named.items():
        whole = is_whole(rows[name]["sharding"])
        # Of a dim that is cut unevenly each rank has its own number of rows, which its program knows.
        sizes = ", ".join(
            str(size) if whole or isinstance(known, str) else str(known)
            for size, known in zip(value.shape, rows[name]["shape"], strict=True)
        )
        facts[f"input {name!r}"] = f"{value.dtype} [{sizes}]" + (f" of content {_digest(value)}" if whole else "")
    return facts


def _digest(value: torch.Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:12]


def _say(key: str, what: Mapping[str, Any]) -> None:
    default_store().set(f"{key}/{dist.get_rank()}", json.dumps(what))


def _heard(key: str, timeout: timedelta) -> list[dict[str, Any]]:
    """What every rank has said, in order; an error of one as soon as it is there."""
    store, ranks = default_store(), range(dist.get_world_size())
    deadline = time.monotonic() + timeout.total_seconds()
    heard: dict[int, dict[str, Any]] = {}
    try:
        while len(heard) < len(ranks):
            for rank in ranks:
                if rank not in heard and store.check([f"{key}/{rank}"]):
                    heard[rank] = json.loads(store.get(f"{key}/{rank}"))
                    if "error" in heard[rank]:
                        raise _following(
                            f"rank {rank} has failed: {heard[rank]['error']}", help="mend that rank, and start all anew"
                        )
            if time.monotonic() > deadline:
                late = ", ".join(str(rank) for rank in ranks if rank not in heard)
                raise LaunchError(f"rank {late} did not come within {timeout.total_seconds():g} s", help=RESTART)
            time.sleep(POLL)
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise _following("the process in which the ranks meet has ended", help=RESTART) from error
    return [heard[rank] for rank in ranks]


def _following(message: str, *, help: str) -> LaunchError:
    """Return the error of a rank that fails because another one has."""
    error = LaunchError(message, help=help)
    error.follows = True
    return error


@contextmanager
def named_failures(groups: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[None]:
    """Say of a collective that fails what it means: another rank has ended, or has not come to it.

    Args:
        groups: the process groups that it may be of, as `Manifest.groups`.

    Raises:
        LaunchError: in place of what gloo or NCCL raise.
    """
    try:
        yield
    except RuntimeError as error:
        line = reason(error)
        unsaid = "API call failed" in line  # what a package says before torch 2.13, whatever has failed in it
        if not unsaid and not any(w in line.lower() for w in ("gloo", "nccl", "connection", "timed out", "timeout")):
            raise
        own = {name: next((r for r in of if dist.get_rank() in r), []) for name, of in groups.items()}
        named = " or ".join(f"{name!r} (ranks {', '.join(map(str, r))})" for name, r in own.items() if len(r) > 1)
        raise _following(
            f"rank {dist.get_rank()}: {'the package has failed, as it does where ' * unsaid}a collective of the group "
            f"{named} has failed: another rank has ended, or did not come to it ({line})",
            help=RESTART,
        ) from error
