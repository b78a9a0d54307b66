"""One call of a rank's program on an inputs file, with its outputs by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from tpcompiler._torch import tree_flatten
from tpcompiler.errors import InputsError, reason
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.inputs import arrange_inputs, read_tensors
from tpcompiler.runtime.records import Record


def run_file(
    module: Any, manifest: Manifest, path: str | os.PathLike[str], shares: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Call a loaded program on an inputs file; return its tensor outputs by the manifest's names.

    Args:
        shares: the rank's shares of the file's tensors, if inputs are cut.

    Raises:
        InputsError: the inputs file does not fit, or the program rejects its sizes.
    """
    result = call_on(module, read_tensors(path) if shares is None else shares, str(path))
    tensors = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
    return {row.name: tensor for row, tensor in zip(manifest.outputs, tensors, strict=True)}


def call_on(module: Any, given: Mapping[str, torch.Tensor], where: str) -> Any:
    """Call a loaded program on inputs by name; `where` names their origin in errors.

    Raises:
        InputsError: inputs do not fit, or the program rejects their sizes.
    """
    args, kwargs = arrange_inputs(given, module.exported_program, where)
    try:
        with torch.no_grad():
            return module(*args, **kwargs)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:  # from a guard or an op
        line = reason(error)
        raise InputsError(f"{where}: the program does not run: {line}", help="check the sizes and values") from error


class ReturnedTensor(Record, frozen=True):
    """A tensor that the program returned."""

    name: str  # of the output
    shape: list[int]  # of the whole
    dtype: str  # as torch names it
    mean: float | str | None  # text of complex numbers, null without elements
    largest: float | None  # the largest magnitude, null without elements


def summarize(tensors: Mapping[str, torch.Tensor]) -> list[ReturnedTensor]:
    rows = []
    for name, tensor in tensors.items():
        numbers = tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
        mean, largest = (numbers.mean().item(), numbers.abs().amax().item()) if numbers.numel() else (None, None)
        shown = f"{mean:.6g}" if isinstance(mean, complex) else mean
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append(ReturnedTensor(name, list(tensor.shape), dtype, shown, largest))
    return rows
