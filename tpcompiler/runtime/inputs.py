"""The inputs file: safetensors with one tensor per tensor input, under the input's name. No pickles.

`inspect` prints the names. Inputs that were constants at export (None, bools, numbers) are not in the file: the program
knows them. An outputs file has the same form, with the names of the outputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from tpcompiler._torch import tree_unflatten
from tpcompiler.errors import ArtifactError, InputsError


def read_inputs(path: str | os.PathLike[str], program: ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` for the program, from an inputs file.

    Raises:
        InputsError: not a safetensors file; a tensor that is missing, unknown, or of another shape or dtype.
    """
    try:
        tensors = load_file(os.fspath(path))
    except FileNotFoundError as error:
        raise InputsError(f"inputs file {path} does not exist", help="give the path of a safetensors file") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise InputsError(
            f"{path} is not a safetensors file: {error}",
            help="write it with safetensors.torch.save_file({name: tensor}, path)",
        ) from error
    return arrange_inputs(tensors, program, str(path))


def arrange_inputs(
    tensors: Mapping[str, torch.Tensor], program: ExportedProgram, where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Named tensors in the program's calling convention, `(args, kwargs)`; `where` names their origin in errors.

    Raises:
        InputsError: a tensor that is missing, unknown, or of another shape or dtype.
    """
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in specs if isinstance(spec.arg, TensorArgument)]
    if unknown := sorted(set(tensors) - set(names)):
        raise InputsError(
            f"{where}: the program has no input {unknown[0]!r}", help=f"its inputs are {', '.join(names)}"
        )
    flat: list[Any] = []
    for spec in specs:
        if isinstance(spec.arg, ConstantArgument):
            flat.append(spec.arg.value)
        elif spec.arg.name not in tensors:
            raise InputsError(f"{where}: input {spec.arg.name!r} is missing", help=f"its inputs are {', '.join(names)}")
        else:
            check_tensor(spec.arg.name, tensors[spec.arg.name], values[spec.arg.name], f"{where}: ")
            flat.append(tensors[spec.arg.name].to(values[spec.arg.name].device.type))  # the current one of its type
    if program.call_spec.in_spec is None:
        return tuple(flat), {}
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


def check_tensor(name: str, given: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Compare an input with the program's own (fake) value for it; dynamic sizes may be anything.

    Raises:
        InputsError: another shape or dtype; `where` comes first.
    """
    same = given.ndim == expected.ndim and all(
        not isinstance(size, int) or size == got for got, size in zip(given.shape, expected.shape, strict=True)
    )
    if not same or given.dtype != expected.dtype:
        raise InputsError(
            f"{where}input {name!r} is {given.dtype} {list(given.shape)}, the program takes {expected.dtype} "
            f"[{', '.join(str(s) for s in expected.shape)}]",
            help="give a tensor of that dtype and shape",
        )


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an inputs or outputs file.

    Raises:
        ArtifactError: the file cannot be written.
    """
    # Clones: two names of one memory are an error for safetensors.
    written = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(written, os.fspath(path))
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"cannot write {path}: {error}", help="check the folder, the free space and the permissions"
        ) from error
