"""A row of the table, the directory that it starts from, and ways to spoil that."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.export import ExportedProgram

from tests.runtime.models import PLAN, PLAN_TEXT, export_conv, export_mlp, mlp_inputs
from tpcompiler import load, parallelize
from tpcompiler.checkpoint.files import INDEX
from tpcompiler.errors import TpCompilerError
from tpcompiler.runtime.artifact import sha256
from tpcompiler.runtime.model_file import read_model

Spoil = Callable[[pytest.MonkeyPatch], object]


@dataclass(frozen=True)
class Row:
    """What is wrong; what is called where `spoil` has made it so; what is said, and the one thing to do.

    `call` is a command line, with variables of the environment before it, or a call from Python on the model's program.
    It is done in a copy of the directory that `write_good` writes. `code` is the exit code, or the exception's class; under
    torchrun that of the rank. With code 0 the message is a note on standard error.
    """

    what: str
    call: str | Callable[[ExportedProgram], object]
    message: str
    help: str = ""
    where: str = ""
    spoil: Spoil = lambda patch: None
    code: int | type[TpCompilerError] = 2

    @property
    def text(self) -> str:
        return (
            self.message + (f"\n  help: {self.help}" if self.help else "") + (f"\n  {self.where}" if self.where else "")
        )


def write_good(directory: Path) -> ExportedProgram:
    """A model, another one, a plan, inputs, and artifacts of the model for two ranks, for one, and for two GPUs.

    And a checkpoint in two files, with an artifact for two ranks whose weights are still to be cut from it.
    """
    program = export_mlp()
    torch.export.save(program, directory / "model.pt2")
    torch.export.save(export_conv(), directory / "other.pt2")
    (directory / "plan.yaml").write_text(PLAN_TEXT)
    save_file(mlp_inputs(), directory / "in.safetensors")
    parallelize(program, 2, PLAN).save(directory / "out")
    parallelize(program, 1, PLAN).save(directory / "one")
    parallelize(program, 2, PLAN, device_type="cuda").save(directory / "cuda")
    parallelize(read_model(directory / "out" / "model.pt2"), 2, PLAN).save(directory / "uncut")
    write_checkpoint(directory / "checkpoint", program)
    return program


def write_checkpoint(directory: Path, program: ExportedProgram) -> None:
    directory.mkdir()
    names, where = sorted(program.state_dict), {}
    for at in range(2):
        file = f"model-0000{at + 1}-of-00002.safetensors"
        save_file({name: program.state_dict[name].detach().contiguous() for name in names[at::2]}, directory / file)
        where.update(dict.fromkeys(names[at::2], file))
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))


def loaded(directory: str, **asked: Any) -> Any:
    """`tpcompiler.load` in a world of one process."""
    with world_of_one():
        return load(directory, **asked)


def called(directory: str, *args: Any, **kwargs: Any) -> Any:
    """What a loaded program gives, in a world of one process."""
    with world_of_one():
        return load(directory)(*args, **kwargs)


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def text(name: str, content: str) -> Spoil:
    return lambda patch: Path(name).write_text(content)


def content(name: str, made: bytes) -> Spoil:
    return lambda patch: Path(name).write_bytes(made)


def zipped(name: str, *entries: str) -> Spoil:
    def write(patch: pytest.MonkeyPatch) -> None:
        with zipfile.ZipFile(name, "w") as archive:
            for entry in entries:
                archive.writestr(entry, "")

    return write


def manifest(change: Callable[[dict[str, Any]], object], directory: str = "out") -> Spoil:
    """The manifest changed."""

    def write(patch: pytest.MonkeyPatch) -> None:
        path = Path(directory) / "manifest.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return write


def fields(**new: object) -> Spoil:
    """The manifest with other fields."""
    return manifest(lambda data: data.update(new))


def state(file: str, change: Callable[[dict[str, Any]], object]) -> Spoil:
    """A file whose tensors are changed."""

    def write(patch: pytest.MonkeyPatch) -> None:
        with _rewritten(Path(file)) as path:
            program = torch.export.load(path)
            change(program.state_dict)
            torch.export.save(program, path)

    return write


def entries(file: str, change: Callable[[str, bytes], bytes | None]) -> Spoil:
    """A file whose archive has other entries, or fewer."""

    def write(patch: pytest.MonkeyPatch) -> None:
        with _rewritten(Path(file)) as path:
            with zipfile.ZipFile(path) as source:
                found = {name: source.read(name) for name in source.namelist()}
            with zipfile.ZipFile(path, "w") as target:
                for name, before in found.items():
                    if (after := change(name, before)) is not None:
                        target.writestr(name, after)

    return write


def exchanged(a: str, b: str) -> Spoil:
    """Two files that have changed places, with hashes that fit."""

    def write(patch: pytest.MonkeyPatch) -> None:
        with _rewritten(Path(a)), _rewritten(Path(b)):
            first, second = Path(a).read_bytes(), Path(b).read_bytes()
            Path(a).write_bytes(second)
            Path(b).write_bytes(first)

    return write


@contextmanager
def _rewritten(path: Path) -> Iterator[Path]:
    """The manifest beside the file, where there is one, has the new hash: only the content is wrong."""
    yield path
    if path.with_name("manifest.json").exists():
        manifest(lambda data: data["files"].update({path.name: sha256(path)}), str(path.parent))(pytest.MonkeyPatch())


def state_of(new: Mapping[str, torch.Tensor]) -> Callable[[dict[str, Any]], object]:
    """Weights in the place of those of the same names."""
    return lambda held: held.update({name: torch.nn.Parameter(value) for name, value in new.items()})
