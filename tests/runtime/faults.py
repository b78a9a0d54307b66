"""Worlds of two gloo processes: one does something wrong, and the other must say what."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch.export import Dim

from tests.launch import Ended, fork_ranks
from tests.runtime.models import Block, randomised
from tpcompiler import parallelize

WAIT = 6.0  # seconds that ranks wait for one another
START = 60.0  # for starting two interpreters with torch on a busy machine; the bound is on top of it

# What happens -> (what the culprit says, what the other rank says); None: it is dead.
FAULTS: dict[str, tuple[str | None, str]] = {
    "none": ("called: ", "called: "),
    "starts late": ("called: ", "called: "),
    "dies before loading": (None, "LaunchError: not all of 2 ranks arrived within 6 s"),
    "dies before loading: the first rank": (None, "LaunchError: not all of 2 ranks arrived within 6 s"),
    "another artifact": (
        "LaunchError: the artifact is SHA-256 ",
        "LaunchError: the artifact is SHA-256 ",
    ),
    "another world": (
        "LaunchError: the artifact is for 2 ranks, this world has 3",
        "LaunchError: not all of 2 ranks arrived within 6 s",
    ),
    "a damaged shard": ("ArtifactError: ", "LaunchError: rank 1 has failed: "),
    "inputs of another size": ("LaunchError: input 'x' is ", "LaunchError: input 'x' is "),
    "inputs of other content": ("LaunchError: input 'x' is ", "LaunchError: input 'x' is "),
    "inputs of another dtype": ("InputsError: input 'x' is ", "LaunchError: rank 1 has failed: input 'x' is "),
    "dies before calling": (
        None,
        "a collective of the group 'tp=2:tp' (ranks 0, 1) has failed: another rank has ended",
    ),
    "dies before calling: the first rank": (
        None,
        "a collective of the group 'tp=2:tp' (ranks 0, 1) has failed: another rank has ended",
    ),
    "never calls": (
        None,
        "a collective of the group 'tp=2:tp' (ranks 0, 1) has failed: another rank has ended, or did not reach it",
    ),
}


def write_artifacts(directory: Path) -> Path:
    """An artifact for two ranks, one of another model beside it, and a copy of it with a damaged shard."""
    for name, seed in (("good", 0), ("another", 1)):
        example = (torch.randn(3, 8),)
        program = torch.export.export(randomised(Block(), seed), example, dynamic_shapes=({0: Dim("rows")},))
        parallelize(program, 2, {"up": "colwise", "down": "rowwise"}).save(directory / name)
    shutil.copytree(directory / "good", directory / "damaged")
    shard = directory / "damaged" / "rank_1.pt2"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    return directory / "good"


def run_fault(artifact: Path, fault: str) -> Ended:
    """Run both ranks, of which neither is ended when the other fails.

    Raises:
        AssertionError: a rank that is still there after the bound.
    """
    worker = Path(__file__).parent / "fault_worker.py"
    return fork_ranks(2, worker, artifact, fault, str(WAIT), timeout=START + 3 * WAIT, together=False)


def wrong(fault: str, ended: Ended) -> str:
    """What is not as it must be, or nothing."""
    culprit = 0 if fault.endswith("first rank") else 1
    said, other_said = FAULTS[fault]
    for rank, words in ((culprit, said), (1 - culprit, other_said)):
        if words is not None and words not in ended.printed[rank]:
            return f"{fault}: rank {rank} says {ended.printed[rank]!r}, not {words!r}"
        if words is not None and (ended.codes[rank] == 0) != words.startswith("called"):
            return f"{fault}: rank {rank} exits with {ended.codes[rank]}"
    return ""
