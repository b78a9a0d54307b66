"""Rows of the table: packages that this process does not run, and machines that make none."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bad_input.row import Row, Spoil, loaded
from tpcompiler._torch import inductor
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.artifact import sha256
from tpcompiler.runtime.package import find_capability

AGAIN = "package it again here: tpcompiler package one"


def packaged(**changed: Any) -> Spoil:
    """The artifact for one rank, with a package that is named and is none."""

    def write(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        manifest = json.loads(Path("one/manifest.json").read_text())
        for name in (files := ("compiled.pt2", "runner.so")):
            (Path("one") / name).write_bytes(b"code")
        called = shutil.copy("one/program.pt2", "one/compiled_model_0.pt2")
        manifest["compiled"] = {
            "files": {**dict.fromkeys(files, "0" * 64), "compiled_model_0.pt2": sha256(Path(called))},
            "models": {"model": {"model_0": [0]}},
            "device_type": "cpu",
            "torch": torch.__version__,
            "compiler": "c++",
            "strides": {},
            "capability": find_capability("cpu"),
            "threads": 1,
            **changed,
        }
        Path("one/manifest.json").write_text(json.dumps(manifest))

    return write


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    patch.setattr(inductor, "compiler", none)


def copying_compiler(patch: pytest.MonkeyPatch) -> None:
    def build(*_: object, **__: object) -> list[str]:
        library = Path(tempfile.mkdtemp(dir=".."), "model.so")
        library.write_bytes(b"std::locale and no name of another library")
        return [str(library)]

    patch.setattr(inductor, "compiler", lambda: "/opt/gcc/bin/g++")
    patch.setattr(inductor, "compile_module", build)


PACKAGES = [
    Row(
        "there is no package",
        lambda _: loaded("one", compiled=True),
        "one has no package",
        "make one: tpcompiler package one",
        code=ArtifactError,
    ),
    Row(
        "it is of another torch",
        lambda _: loaded("one", compiled=True),
        f"the package in one is of torch 2.0.0, this is {torch.__version__}",
        AGAIN,
        spoil=packaged(torch="2.0.0"),
        code=ArtifactError,
    ),
    Row(
        "it is for another CPU",
        lambda _: loaded("one", compiled=True),
        "the package in one is for a CPU with avx9, which this one lacks",
        AGAIN,
        spoil=packaged(capability=["avx9"]),
        code=ArtifactError,
    ),
    Row(
        "it is for another number of threads",
        lambda _: loaded("one", compiled=True),
        "the package in one is for 4 threads, this process has 1",
        "set OMP_NUM_THREADS=4, or package it again with threads=1",
        spoil=packaged(threads=4),
        code=ArtifactError,
    ),
    Row(
        "it is not what was written",
        lambda _: loaded("one", compiled=True),
        "one/compiled.pt2 has SHA-256 5694d08a2e53.., the manifest says 000000000000..",
        AGAIN,
        spoil=packaged(),
        code=ArtifactError,
    ),
    Row(
        "a record of it in the wrong form",
        "tpcompiler inspect one",
        "one/manifest.json is damaged at $.compiled.threads: expected int, got str",
        "convert the model again",
        spoil=packaged(threads="many"),
    ),
    Row(
        "no compiler",
        "tpcompiler package out",
        "there is no C++ compiler here: No working C++ compiler found",
        "install g++, or name one with CXX=...",
        spoil=without_compiler,
    ),
    Row(
        "a compiler that copies the C++ library",
        "tpcompiler package out",
        "/opt/gcc/bin/g++ puts the C++ library into what it builds, which would crash next to torch's",
        "use a compiler that links libstdc++.so, such as CXX=/usr/bin/g++",
        spoil=copying_compiler,
    ),
    Row(
        "a package without weights to check it with",
        "tpcompiler package uncut",
        "uncut has no weights of rank 0: its model was exported without",
        "cut them: tpcompiler cut uncut --checkpoint DIR",
    ),
    Row(
        "a package of what is no artifact",
        "tpcompiler package none",
        "none does not exist",
        "make one with tpcompiler convert",
    ),
    Row(
        "symmetric memory for a program that runs on the CPU",
        "tpcompiler convert model.pt2 --tp 2 --plan plan.yaml --collectives symm_mem -o new",
        "symmetric memory is of GPUs, and these programs are for 'cpu'",
        "convert with --device cuda, or leave the collectives to NCCL or gloo",
    ),
    Row(
        "NCCL for a program that runs on the CPU",
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 tpcompiler run out --inputs in.safetensors "
        "--backend nccl",
        "the artifact is for cpu, and NCCL sends between GPUs only",
        "use the backend gloo, or convert the model again with --device cuda",
    ),
]
