"""Run a random program in real gloo processes, from its files, and compare them with the single device as `verify` does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import tpcompiler
from tests.launch import run_ranks
from tpcompiler.judge.compare.compare import compare_calls
from tpcompiler.judge.compare.simulate import RankResult
from tpcompiler.judge.compare.subject import shares_of
from tpcompiler.parallel.program_subject import subject_of

SECONDS = 120  # that the ranks may take, start included


def judge_processes(made: tpcompiler.ParallelProgram, calls: Sequence[tuple[torch.Tensor, ...]]) -> str:
    """Return what is wrong after these calls, one after another; nothing if all ranks equal the single device.

    Raises:
        AssertionError: a rank fails, or takes too long.
    """
    subject, ranks = subject_of(made.only), range(made.world_size)
    written = [list(made.rank_program(rank).graph_signature.buffers_to_mutate.values()) for rank in ranks]
    shares = [shares_of(subject, call, {}) for call in calls]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        made.save(directory / "out")
        for rank in ranks:
            torch.save(([own[rank] for own in shares], written[rank]), directory / f"{rank}.calls")
        run_ranks(made.world_size, Path(__file__).parent / "worker.py", directory, timeout=SECONDS)
        of_ranks = [torch.load(directory / f"{rank}.answers") for rank in ranks]
    answers = iter([[RankResult(*own[at]) for own in of_ranks] for at in range(len(calls))])
    report = compare_calls({"": replace(subject, run=lambda _: next(answers))}, [("", call, {}) for call in calls])
    return "" if report.ok else f"in processes: {report}"
