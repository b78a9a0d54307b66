"""Rows of the table: what is around a call, and calls from Python."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import tpcompiler
from tests.bad_input.row import Row, called, loaded, text
from tests.runtime.models import PLAN, export_divided, mlp_inputs
from tpcompiler import load, parallelize
from tpcompiler.errors import (
    ArtifactError,
    BudgetError,
    InputsError,
    LaunchError,
    MeshError,
    PlanError,
    ProgramError,
    ShardingError,
    UnsupportedError,
)

CONVERT = "tpcompiler convert model.pt2 --tp 2 --plan plan.yaml"
LONG = "a" * 300
RUN = "tpcompiler run out --inputs in.safetensors"


def read_only(patch: pytest.MonkeyPatch) -> None:
    """For root no folder is read-only."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    patch.setattr(tempfile, "mkdtemp", refuse)


def no_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


def one_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)


ENVIRONMENTS = [
    Row(
        "not started by torchrun",
        RUN,
        "this process is in no group: RANK and WORLD_SIZE are not set",
        "start it with torchrun --nproc-per-node 2",
    ),
    Row(
        "RANK alone",
        f"RANK=0 {RUN}",
        "this process is in no group: WORLD_SIZE is not set",
        "start it with torchrun --nproc-per-node 2",
    ),
    Row(
        "WORLD_SIZE alone",
        f"WORLD_SIZE=2 {RUN}",
        "this process is in no group: RANK is not set",
        "start it with torchrun --nproc-per-node 2",
    ),
    Row(
        "WORLD_SIZE is no number",
        f"RANK=0 WORLD_SIZE=two {RUN}",
        "WORLD_SIZE is 'two', which is not a number",
        "start it with torchrun, which sets it",
    ),
    Row(
        "RANK is no number",
        f"RANK=first WORLD_SIZE=2 {RUN}",
        "RANK is 'first', which is not a number",
        "start it with torchrun, which sets it",
    ),
    Row(
        "RANK is below zero",
        f"RANK=-1 WORLD_SIZE=2 {RUN}",
        "RANK is '-1', which is not a number",
        "start it with torchrun, which sets it",
    ),
    Row(
        "RANK is outside of the world",
        f"RANK=2 WORLD_SIZE=2 {RUN}",
        "RANK is 2 in a world of 2",
        "use a rank from 0 to 1",
    ),
    Row(
        "another number of processes than of ranks",
        f"RANK=0 WORLD_SIZE=3 {RUN}",
        "the artifact is for 2 ranks, this world has 3",
        "start it with torchrun --nproc-per-node 2, or convert for 3",
    ),
    Row(
        "no address to meet at",
        f"RANK=0 WORLD_SIZE=2 {RUN}",
        "the ranks have no place to meet: MASTER_ADDR is not set",
        "start it with torchrun --nproc-per-node 2",
    ),
    Row(
        "a port that is no number",
        f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=http {RUN}",
        "MASTER_PORT is 'http', which is not a number",
        "start it with torchrun, which sets it",
    ),
    Row(
        "an impossible port",
        f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=99999 {RUN}",
        "MASTER_PORT is 99999, and the last port is 65535",
        "start it with torchrun --nproc-per-node 2",
    ),
    Row(
        "no GPU for programs that need one",
        "RANK=0 WORLD_SIZE=2 tpcompiler run cuda --inputs in.safetensors",
        "the artifact is for CUDA, and torch finds no CUDA device here",
        "run it on a machine with GPUs, or convert the model again with --device cpu",
        spoil=no_gpu,
    ),
    Row(
        "fewer GPUs than processes",
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 tpcompiler run cuda --inputs in.safetensors",
        "2 processes on this machine, and torch finds 1 CUDA device: NCCL needs one each",
        "start 1 on a machine, each of which sees all its GPUs (CUDA_VISIBLE_DEVICES)",
        spoil=one_gpu,
    ),
    Row(
        "LOCAL_RANK is no number",
        "RANK=0 WORLD_SIZE=2 LOCAL_RANK=x tpcompiler run cuda --inputs in.safetensors",
        "LOCAL_RANK is 'x', which is not a number",
        "start it with torchrun, which sets it",
        spoil=one_gpu,
    ),
    Row(
        "an outputs file in a folder that does not exist",
        f"{RUN} --outputs none/o.safetensors",
        "cannot write none/o.safetensors: none is not a directory",
        "make it first",
    ),
    Row(
        "no place to write",
        CONVERT,
        "Invalid value for -o: give the directory to write with -o, or --dry-run",
        "tpcompiler convert --help lists the options",
    ),
    Row(
        "a directory that exists, found before the model is read",
        "tpcompiler convert plan.yaml --tp 2 --plan plan.yaml -o out",
        "out exists already",
        "choose another directory, or pass --force",
    ),
    Row(
        "a directory that is no artifact, to be replaced",
        "tpcompiler convert plan.yaml --tp 2 --plan plan.yaml -o mine --force",
        "mine exists and is not an artifact (it has no manifest.json)",
        "choose another directory",
        spoil=lambda patch: Path("mine").mkdir(),
    ),
    Row(
        "an artifact with a file of someone else's in it, to be replaced",
        "tpcompiler convert plan.yaml --tp 2 --plan plan.yaml -o out --force",
        "out holds 'notes.txt', which is not part of an artifact",
        "move it elsewhere, or choose another directory",
        spoil=text("out/notes.txt", "mine"),
    ),
    Row(
        "a directory with another program's manifest, to be replaced",
        "tpcompiler convert plan.yaml --tp 2 --plan plan.yaml -o mine --force",
        "mine exists and is not an artifact (its manifest.json is another's)",
        "choose another directory",
        spoil=lambda patch: (Path("mine").mkdir(), Path("mine/manifest.json").write_text('{"name": "page"}')),
    ),
    Row(
        "a file where the directory belongs",
        f"{CONVERT} -o plan.yaml",
        "plan.yaml exists already",
        "choose another directory, or pass --force",
    ),
    Row(
        "a file where its folder belongs",
        f"{CONVERT} -o plan.yaml/new",
        "cannot write plan.yaml/new: plan.yaml is not a directory",
        "choose another directory",
    ),
    Row(
        "a link to nothing where its folder belongs",
        f"{CONVERT} -o away/new",
        "cannot write away/new: away is not a directory",
        "choose another directory",
        spoil=lambda patch: Path("away").symlink_to("nowhere"),
    ),
    Row(
        "a folder that is read-only, found before the model is read",
        "tpcompiler convert plan.yaml --tp 2 --plan plan.yaml -o new",
        "cannot write new: . cannot be written",
        "choose another directory",
        spoil=lambda patch: patch.setattr(os, "access", lambda path, mode: mode != os.W_OK),
    ),
    Row(
        "a name that is too long",
        f"{CONVERT} -o {LONG}",
        f"cannot write {LONG}: File name too long",
        "choose another directory",
    ),
    Row(
        "a folder that cannot be written",
        f"{CONVERT} -o new",
        "cannot write new: Permission denied",
        "choose a directory that can be written",
        spoil=read_only,
    ),
]


def shifted(**changes: Any) -> tuple[Any, ...]:
    return tuple({**mlp_inputs(), **changes}.values())


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return x + shift


def call_divided(n: int) -> object:
    """Call a program of one rank, whose export took one of two branches."""
    with tempfile.TemporaryDirectory() as folder:
        parallelize(export_divided(), 1, {}).save(f"{folder}/out")
        return called(f"{folder}/out", torch.ones(3, 8), n)


def call_shifted(**given: torch.Tensor) -> object:
    """Call a program of one rank that takes `shift` by its name."""
    exported = torch.export.export(Shifted(), (torch.ones(2),), {"shift": torch.ones(2)})
    with tempfile.TemporaryDirectory() as folder:
        parallelize(exported, 1, {}).save(f"{folder}/out")
        return called(f"{folder}/out", torch.ones(2), **given)


CALLS = [
    Row(
        "`parallelize` of a path",
        lambda _: parallelize("model.pt2", 2, PLAN),
        "str is not an exported program",
        "pass what torch.export.export returned",
        code=ProgramError,
    ),
    Row(
        "`parallelize` of a module",
        lambda _: parallelize(nn.Linear(2, 2), 2, PLAN),
        "Linear is not an exported program",
        "pass what torch.export.export returned",
        code=ProgramError,
    ),
    Row(
        "a plan of another type",
        lambda program: parallelize(program, 2, 7),
        "7 is not a plan",
        "give a mapping of names to styles, or the path of a YAML or JSON file",
        code=PlanError,
    ),
    Row(
        "several programs without names",
        lambda program: parallelize([program, program], 2, PLAN),
        "several programs need a name each, got ['ExportedProgram', 'ExportedProgram']",
        'give {"prefill": exported_program, "decode": exported_program}',
        code=ProgramError,
    ),
    Row(
        '`device_type="tpu"`',
        lambda program: parallelize(program, 2, PLAN, device_type="tpu"),
        "device_type is 'tpu', not one of cpu and cuda",
        "give 'cpu' or 'cuda'",
        code=UnsupportedError,
    ),
    Row(
        '`memory="1kB"` with `plan="auto"`',
        lambda program: parallelize(program, 2, "auto", memory="1kB"),
        "a rank would hold 1.62 kB: weights 1.22 kB, caches 0 B, activations 400 B at the peak ('relu_1'); that is 624 B "
        "more than the limit of 1 kB. The largest weights there are 'layers.0.down.weight' 256 B, 'layers.0.up.weight' "
        "256 B, 'layers.1.down.weight' 256 B",
        "use more ranks, or a limit of at least 1624 bytes",
        code=ShardingError,
    ),
    Row(
        '`memory=24` with `plan="auto"`',
        lambda program: parallelize(program, 2, "auto", memory=24),
        "a rank's memory of 24 is 24 bytes",
        "did you mean '24GB'?",
        code=BudgetError,
    ),
    Row(
        "`rank_program(2)` of two",
        lambda program: parallelize(program, 2, PLAN).rank_program(2),
        "rank 2 is outside the mesh tp=2 of 2 ranks",
        "use a rank from 0 to 1",
        code=MeshError,
    ),
    Row(
        "`rank_program(-1)`",
        lambda program: parallelize(program, 2, PLAN).rank_program(-1),
        "rank -1 is outside the mesh tp=2 of 2 ranks",
        "use a rank from 0 to 1",
        code=MeshError,
    ),
    Row(
        "`verify` with too few arguments",
        lambda program: tpcompiler.open("out").verify(shifted()[:1], original=program),
        "the program takes 2 inputs, got 1",
        "pass what it was exported with: x, shift",
        code=InputsError,
    ),
    Row(
        "`verify` with a number for a tensor",
        lambda program: tpcompiler.open("out").verify(shifted(x=1.0), original=program),
        "input 'x' is of type float, the program takes one of type Tensor",
        "pass what it was exported with",
        code=InputsError,
    ),
    Row(
        "`verify` with another shape",
        lambda program: tpcompiler.open("out").verify(shifted(x=torch.ones(4, 8)), original=program),
        "input 'x' is torch.float32 [4, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        code=InputsError,
    ),
    Row(
        "a loaded program without a keyword argument",
        lambda _: call_shifted(),
        "the program was called with wrong arguments: keyword argument 'shift' is missing",
        "call it as (x, shift=...)",
        code=InputsError,
    ),
    Row(
        "a loaded program with another keyword argument",
        lambda _: call_shifted(shif=torch.ones(2)),
        "the program was called with wrong arguments: keyword argument 'shift' is missing; it has no keyword argument "
        "'shif'",
        "call it as (x, shift=...)",
        code=InputsError,
    ),
    Row(
        "a loaded program with too few arguments",
        lambda _: called("one", torch.ones(3, 8)),
        "the program takes 2 inputs, got 1",
        "pass what it was exported with: x, shift",
        code=InputsError,
    ),
    Row(
        "a loaded program with another shape",
        lambda _: called("one", *shifted(x=torch.ones(4, 8))),
        "input 'x' is torch.float32 [4, 8], the program takes torch.float32 [3, 8]",
        "give a tensor of that dtype and shape",
        code=InputsError,
    ),
    Row(
        "a loaded program with a number that the export excludes",
        lambda _: call_divided(1),
        "the program does not take these inputs: the export assumed that n != 1",
        "give inputs of which that holds, or export once more with an example of the others",
        code=InputsError,
    ),
    Row(
        "a directory that is there, from Python",
        lambda program: parallelize(program, 2, PLAN).save("out"),
        "out exists already",
        "choose another directory, or pass force=True",
        code=ArtifactError,
    ),
    Row(
        "`load` of no directory",
        lambda _: load("none"),
        "none does not exist",
        "make one with tpcompiler convert",
        code=ArtifactError,
    ),
    Row(
        "`load` in a world of another size",
        lambda _: loaded("out"),
        "the artifact is for 2 ranks, this world has 1",
        "start it with torchrun --nproc-per-node 2, or convert for 1",
        code=LaunchError,
    ),
]
