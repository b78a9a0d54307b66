"""One call of a rank's program on an inputs file, with its outputs by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tpcompiler._torch import tree_flatten
from tpcompiler.errors import InputsError, UnsupportedError
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.inputs import read_inputs
from tpcompiler.runtime.manifest_form import is_whole


def refuse_sharded_boundary(manifest: Manifest) -> None:
    """Files hold whole tensors.

    Raises:
        UnsupportedError: an input or an output of which each rank holds a part.
    """
    for what, rows in (("input", manifest.inputs), ("output", manifest.outputs)):
        for row in rows:
            if not is_whole(row["sharding"]):
                raise UnsupportedError(
                    f"{what} {row['name']!r} is sharded ({row['sharding']}); tpcompiler run takes and writes whole "
                    "tensors only",
                    help=f"convert with that {what} at R, or call tpcompiler.load in a program of your own",
                )


def run_file(module: Any, manifest: Manifest, path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Call what `load` returned on an inputs file; its tensor outputs by the manifest's names.

    Raises:
        InputsError: an inputs file that does not fit, or sizes that the program refuses.
    """
    args, kwargs = read_inputs(path, module.exported_program)
    try:
        with torch.no_grad():
            result = module(*args, **kwargs)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:  # of a guard, or of an op
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputsError(f"{path}: the program does not run: {line}", help="check the sizes and values") from error
    tensors = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    return {row["name"]: tensor for row, tensor in zip(manifest.outputs, tensors, strict=True)}


class Summary(NamedTuple):
    """What is said of a tensor; `largest` is a magnitude. One without elements has neither, a complex mean is text."""

    name: str
    shape: list[int]
    dtype: str
    mean: float | str | None
    largest: float | None


def summarize(tensors: Mapping[str, torch.Tensor]) -> list[Summary]:
    found = []
    for name, tensor in tensors.items():
        numbers = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        mean, largest = (numbers.mean().item(), numbers.abs().amax().item()) if numbers.numel() else (None, None)
        said = f"{mean:.6g}" if isinstance(mean, complex) else mean
        found.append(Summary(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), said, largest))
    return found
