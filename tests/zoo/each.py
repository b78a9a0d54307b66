"""A piece of work for each model of the zoo, in processes that share it."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from tests.zoo.index import CASES

T = TypeVar("T")
Judge = Callable[[str], tuple[str, bool]]  # what is said of a model, and whether it is right


def in_processes(work: Callable[[str], T], names: Sequence[str], processes: int = 2) -> Iterator[T]:
    """What the work gives for each, in order. Processes are ended after ten, for what torch keeps; 0: in this one."""
    if not processes:
        yield from map(work, names)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _prepare, maxtasksperchild=10) as pool:
        yield from pool.imap(work, names)


def judge_each(judge: Judge, names: Sequence[str], how: str, wrong: str) -> int:
    """Print what is said of all models, or those named, and how many are wrong; 1 where one is."""
    asked, bad = list(names or CASES), 0
    for name, (said, ok) in zip(asked, in_processes(partial(_judged, judge), asked), strict=True):
        bad += not ok
        print(f"{name}: {said}", flush=True)
    print(f"{len(asked)} models{how}, {bad} of them {wrong}")
    return int(bad > 0)


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _judged(judge: Judge, name: str) -> tuple[str, bool]:
    began = time.perf_counter()
    try:
        said, ok = judge(name)
    except Exception as error:  # the others are wanted all the same
        said, ok = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", False
    return f"{said}, {time.perf_counter() - began:.1f} s", ok
