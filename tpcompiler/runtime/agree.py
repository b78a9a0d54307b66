"""Let all ranks compare facts before their first collective: each publishes its own and reads those of the others."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpcompiler._torch import default_store
from tpcompiler.errors import LaunchError, TpCompilerError, reason
from tpcompiler.runtime.artifact import VERSION, Manifest
from tpcompiler.runtime.records import is_whole

WAIT = timedelta(minutes=5)  # longer than another rank needs to read its shard, shorter than a person waits
POLL = 0.02  # seconds between polls of the store
RESTART = "find the first error in the logs of all ranks, and restart the job"

_turns: Counter[tuple[int, ...]] = Counter()  # of each set of ranks, as the others may not take part


@contextmanager
def agreeing(
    timeout: timedelta, among: Sequence[int] | None = None, help: str = "give all ranks the same, and restart the job"
) -> Iterator[dict[str, Any]]:
    """Exchange the facts that the block puts in the dict; if the block fails, the other ranks receive its error.

    Args:
        among: the ranks that take part, this one included; all by default.
        help: what to do if a rank has other facts.

    Raises:
        LaunchError: a rank did not arrive in time, failed, or has other facts.
    """
    mine: dict[str, Any] = {}
    ranks = tuple(among if among is not None else range(dist.get_world_size()))
    _turns[ranks] += 1
    of = f"all {len(ranks)}" if among is None else ",".join(map(str, ranks))
    key = f"tpcompiler/{of}/{_turns[ranks]}"
    try:
        yield mine
    except TpCompilerError as error:
        _publish(key, {"error": error.message})
        raise
    except Exception as error:
        _publish(key, {"error": f"{type(error).__name__}: {error}"})
        raise
    _publish(key, mine)
    for rank, theirs in _collect_facts(key, timeout, ranks).items():
        for name in {**mine, **theirs}:
            own, other = mine.get(name, "nothing"), theirs.get(name, "nothing")
            if own != other:
                raise LaunchError(f"{name} is {own} on rank {dist.get_rank()}, and {other} on rank {rank}", help=help)


def artifact_facts(manifest: Manifest) -> dict[str, Any]:
    """Return the facts that must be the same on all ranks: the artifact, the world, the versions that run it."""
    data = json.dumps([manifest.files, manifest.mesh, manifest.groups], sort_keys=True)
    return {
        "the artifact": f"SHA-256 {hashlib.sha256(data.encode()).hexdigest()[:12]}..",
        "the world": manifest.world_size,
        "the version of torch": torch.__version__,
        "the version of tpcompiler": VERSION,
    }


def input_facts(named: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, Any]:
    """Return the dtype and shape of every input, plus a hash of the content for inputs that every rank gets whole."""
    rows = {row.name: row for row in manifest.inputs}
    facts = {}
    for name, value in named.items():
        whole = is_whole(rows[name].sharding)
        # Ranks have different sizes along a dim that is cut unevenly; each rank's program checks its own.
        sizes = ", ".join(
            str(size) if whole or isinstance(known, str) else str(known)
            for size, known in zip(value.shape, rows[name].shape, strict=True)
        )
        facts[f"input {name!r}"] = f"{value.dtype} [{sizes}]" + (f" of content {digest_of(value)}" if whole else "")
    return facts


def digest_of(value: torch.Tensor) -> str:
    """Return the beginning of the SHA-256 of a tensor's elements."""
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:12]


def _publish(key: str, facts: Mapping[str, Any]) -> None:
    default_store().set(f"{key}/{dist.get_rank()}", json.dumps(facts))


def _collect_facts(key: str, timeout: timedelta, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the facts of every rank, in order; raise the error of a failed rank as soon as it arrives."""
    store = default_store()
    deadline = time.monotonic() + timeout.total_seconds()
    facts: dict[int, dict[str, Any]] = {}
    try:
        while len(facts) < len(ranks):
            for rank in ranks:
                if rank not in facts and store.check([f"{key}/{rank}"]):
                    facts[rank] = json.loads(store.get(f"{key}/{rank}"))
                    if "error" in facts[rank]:
                        raise _consequent_error(
                            f"rank {rank} has failed: {facts[rank]['error']}", help="fix that rank and restart the job"
                        )
            if time.monotonic() > deadline:
                late = ", ".join(str(rank) for rank in ranks if rank not in facts)
                raise LaunchError(f"rank {late} did not arrive within {timeout.total_seconds():g} s", help=RESTART)
            time.sleep(POLL)
    except RuntimeError as error:  # includes torch's DistNetworkError
        raise _consequent_error("the process where the ranks meet has ended", help=RESTART) from error
    return {rank: facts[rank] for rank in ranks}


def _consequent_error(message: str, *, help: str) -> LaunchError:
    """Return the error of a rank that fails because another rank failed."""
    error = LaunchError(message, help=help)
    error.follows = True
    return error


@contextmanager
def named_failures(groups: Mapping[str, Sequence[Sequence[int]]]) -> Iterator[None]:
    """Explain a failed collective: another rank has ended, or never reached it.

    Args:
        groups: the process groups that the collective may run in, as in `Manifest.groups`.

    Raises:
        LaunchError: instead of the errors that gloo or NCCL raise.
    """
    try:
        yield
    except RuntimeError as error:
        line = reason(error)
        opaque = "API call failed" in line  # a package's only text before torch 2.13, whatever failed in it
        if not opaque and not any(w in line.lower() for w in ("gloo", "nccl", "connection", "timed out", "timeout")):
            raise
        own = {name: next((r for r in of if dist.get_rank() in r), []) for name, of in groups.items()}
        named = " or ".join(f"{name!r} (ranks {', '.join(map(str, r))})" for name, r in own.items() if len(r) > 1)
        raise _consequent_error(
            f"rank {dist.get_rank()}: {'the package has failed, as it does when ' * opaque}a collective of the group "
            f"{named} has failed: another rank has ended, or did not reach it ({line})",
            help=RESTART,
        ) from error
