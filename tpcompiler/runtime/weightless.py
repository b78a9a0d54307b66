"""Programs exported without weights, to be converted first and then filled from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import nn
from torch.export import ExportedProgram

from tpcompiler._torch import (
    FakeTensor,
    all_tensors,
    archive_stream,
    input_values,
    mode_of_parameters,
    save_program,
    skip_fake_truncations,
)
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.pt2 import Pt2

LARGE = 1 << 20  # bytes
MARK = "tpcompiler_weightless.json"  # an extra file in the .pt2 with the names: torch would read zeros


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Make models that take no memory: in this block every parameter of a module becomes a fake tensor.

    Buffers, such as the frequencies of rotary embeddings, are computed as usual. The model can be cast like any other
    (`model.to(torch.bfloat16)`), in the block or later. Export it in the block too, and write it with
    `tpcompiler.save_weightless`.
    """
    mode = mode_of_parameters()
    register = nn.Module.register_parameter

    def register_fake(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not isinstance(param, FakeTensor):
            with mode:
                fake = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
            self._parameters[name] = nn.Parameter(fake, requires_grad=param.requires_grad)

    with skip_fake_truncations(), patch.object(nn.Module, "register_parameter", register_fake):
        yield


def weightless_names(program: ExportedProgram) -> set[str]:
    """Return the parameters, buffers and constants that have no values."""
    return {name for name, value in all_tensors(program).items() if isinstance(value, FakeTensor)}


def lazy_zeros(like: torch.Tensor) -> torch.Tensor:
    """Return zeros of a tensor's shape and dtype that take no memory until they are written."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    data = numpy.zeros(like.numel() * like.element_size(), numpy.uint8)  # unlike torch's: untouched pages of calloc
    return torch.from_numpy(data).view(like.dtype).view(like.shape)


def save_weightless(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write a program whose weights have no values, and mark them: torch would read them as zeros.

    Large buffers of zeros, such as caches, take no room in the file either.

    Raises:
        OSError: the file cannot be written.
    """
    state, constants = dict(program.state_dict), dict(program.constants)
    names = weightless_names(program)
    zeros = {name for name, value in constants.items() if name not in names and _is_large(value) and not value.any()}
    hollow = {name: hollow_like(value) for name, value in {**constants, **state}.items() if name in names | zeros}
    try:
        for target in (program.state_dict, program.constants):
            target.update({name: hollow[name] for name in target.keys() & hollow.keys()})
        save_marked(program, path, names, {**constants, **state}, zeros)
    finally:
        program.state_dict.update(state)
        program.constants.update(constants)


def save_marked(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    names: Collection[str],
    values: dict[str, Any],
    zeros: Collection[str] = (),
) -> None:
    """Write a program whose tensors of these names are hollow, with a mark that lists them, their ties, and the zeros.

    Raises:
        OSError: the file cannot be written.
    """
    first: dict[int, str] = {}
    marks: dict[str, str | None] = dict.fromkeys(sorted(zeros))
    marks |= {name: first.setdefault(id(values[name]), name) for name in sorted(names)}
    with archive_stream(Path(path)) as file:
        save_program(program, file, extra_files={MARK: json.dumps(marks)})


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() > LARGE


def hollow_like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype that takes no room in a file."""
    if not value.numel():  # it takes no room, and torch computes a negative size for an expanded one
        hollow = torch.empty(value.shape, dtype=value.dtype)
    else:
        hollow = torch.zeros((), dtype=value.dtype).expand(value.shape)
    return nn.Parameter(hollow, value.requires_grad) if isinstance(value, nn.Parameter) else hollow


def empty_hollow(program: ExportedProgram, file: Pt2) -> None:
    """Put fake tensors into a program where its file marks missing values, and zeros where it marks zeros.

    Raises:
        ArtifactError: the mark names a tensor that the program does not have.
    """
    tied = _read_mark(file)
    if not tied:
        return
    inputs, specs = input_values(program), program.graph_signature.input_specs
    taken = {spec.target: inputs[spec.arg.name] for spec in specs if spec.target is not None}
    values = {first: taken[name] for name, first in tied.items() if first is not None and name in taken}
    if lacking := sorted(tied.keys() - program.state_dict.keys() - program.constants.keys()):
        raise ArtifactError(
            f"{file.path} marks {lacking[0]!r} as without values, and has no such tensor", help="export the model again"
        )
    fakes: dict[str, torch.Tensor] = {}
    for target in (program.state_dict, program.constants):
        for name in sorted(target.keys() & tied.keys()):
            first = tied[name]
            if name not in taken and first not in values:  # torch keeps a shared constant under all names
                del target[name]
                continue
            value = taken.get(name) if first is None else values.get(first)
            if not isinstance(value, FakeTensor):
                raise ArtifactError(f"{file.path} marks {name!r} as without values", help="export the model again")
            if first is None:
                target[name] = lazy_zeros(value)
                continue
            if first not in fakes:
                grad = target[name].requires_grad
                is_leaf = isinstance(target[name], nn.Parameter)
                fakes[first] = nn.Parameter(value, requires_grad=grad) if is_leaf else value
            target[name] = fakes[first]


def _read_mark(file: Pt2) -> dict[str, str | None]:
    """Return the mark: name -> the first of the tensors tied to it, or None for zeros."""
    if f"extra/{MARK}" not in file.names():
        return {}
    data = json.loads(file.text(f"extra/{MARK}"))
    if isinstance(data, dict) and all(isinstance(first, str | None) for first in data.values()):
        return data
    raise ArtifactError(f"{file.path}: its {MARK} is damaged", help="export the model again")
