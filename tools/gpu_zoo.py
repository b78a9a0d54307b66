"""The models of tests/zoo on a GPU, all ranks in lock step: `python -m tools.gpu_zoo [--device cpu] [NAME ...]`.

Each is exported on the CPU, converted for the device by its own plan, and compared there with the whole model, at the
size of the example; in bfloat16 with `--dtype`. So are the same programs without their first collective, which must
not be right. Exits with 1 if anything that was run is not as it must be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.export import ExportedProgram

import tpcompiler
from tests.zoo.case import Case
from tests.zoo.faults import collectives_of, without_collective
from tests.zoo.index import CASES
from tests.zoo.measure import strain
from tools.gpu_check import name_of, on_device
from tpcompiler.parallel.program_subject import compared_calls, subject_of
from tpcompiler.runtime.artifact import SINGLE


class Found(NamedTuple):
    """Of a model on a number of ranks: the worst output, or why there is none."""

    name: str
    ranks: int
    error: float = 0.0
    tolerance: float = 0.0
    ok: bool = False
    caught: bool | None = None  # whether all ranks without their first collective are not right; None without any
    reason: str = ""


def cast(case: Case, dtype: torch.dtype) -> Case:
    """The case with weights and inputs of a dtype."""

    def inputs(batch: int, size: int) -> dict[str, torch.Tensor]:
        made = case.inputs(batch, size)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}

    return replace(case, build=lambda: case.build().to(dtype), inputs=inputs)


def run(name: str, device: str, dtype: str, worlds: Sequence[int]) -> list[Found]:
    """What the model's ranks answer on the device, beside the whole model."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # otherwise convolutions of float32 are none
    warnings.simplefilter("ignore")
    try:
        case = CASES[name] if dtype == "float32" else cast(CASES[name], getattr(torch, dtype))
        exported = case.export(False)
        whole = on_device(exported, device)
    except Exception as error:  # torch's own: the others are wanted all the same
        return [Found(name, 0, reason=_line(error))]
    return [_compare(case, exported, whole, device, world) for world in worlds]


def _compare(case: Case, exported: ExportedProgram, whole: ExportedProgram, device: str, world: int) -> Found:
    try:
        made = tpcompiler.parallelize(exported, world, case.asked(), device_type=device)
        there = {key: value.to(device) for key, value in case.inputs(*case.example).items()}
        subject = replace(subject_of(made.only), reference=whole, intermediate=None)
        report = compared_calls({SINGLE: subject}, [(SINGLE, (), there)])
        caught = None
        if names := collectives_of(subject.programs[0]):
            damaged = [without_collective(program, names[0]) for program in subject.programs]
            caught = not compared_calls({SINGLE: replace(subject, programs=damaged)}, [(SINGLE, (), there)]).ok
    except Exception as error:
        return Found(case.name, world, reason=_line(error))
    worst = max(report.outputs, key=strain)
    return Found(case.name, world, worst.rel, worst.tolerance, report.ok, caught)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def main(words: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="models of tests/zoo")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--ranks", type=int, action="append", help="one number of them; without it 2 and 4")
    options.add_argument("--processes", type=int, default=2)
    asked = options.parse_args(words)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here: nothing was checked (try --device cpu)", file=sys.stderr)
        return 2
    began, found = time.perf_counter(), list[Found]()
    with multiprocessing.get_context("spawn").Pool(asked.processes, maxtasksperchild=10) as pool:
        given = [(name, asked.device, asked.dtype, asked.ranks or (2, 4)) for name in asked.names or CASES]
        for each in [pool.apply_async(run, one) for one in given]:
            for row in each.get():
                found.append(row)
                said = row.reason or f"{row.error:.1e} of {row.tolerance:.1e} {'right' if row.ok else 'WRONG'}"
                said += ", and also without a collective" * (row.caught is False)
                print(f"{row.name}, {row.ranks} ranks: {said}", flush=True)
    ran = [row for row in found if not row.reason]
    caught = [row.caught for row in ran if row.caught is not None]
    print(
        f"{name_of(asked.device)}; torch {torch.__version__}; {asked.dtype}: {len({row.name for row in ran})} models, "
        f"{len(ran)} conversions, {sum(not row.ok for row in ran)} wrong, {len(found) - len(ran)} not run; "
        f"{len(caught)} without their first collective, {caught.count(False)} of them right all the same; "
        f"largest tolerance {max((row.tolerance for row in ran), default=0):.1e}; {time.perf_counter() - began:.0f} s"
    )
    return int(not ran or not all(row.ok for row in found) or False in caught)


if __name__ == "__main__":
    sys.exit(main())
