"""Every private name of torch's Inductor, apart from `_torch` itself because importing it takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch._inductor
from torch import fx
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.package.package import package_aoti

from tpcompiler._torch import archive_stream


def compile_module(
    module: fx.GraphModule, args: Sequence[torch.Tensor], threads: int, *, rounds: bool = False
) -> list[Any]:
    """Return one model's files for `write_package`: code without weights.

    No value is read: every tensor of the module is passed by name when the model is loaded.

    Args:
        rounds: round every value to its dtype, as kernels of one op do, so that bits do not depend on which ops share
            a kernel.
    """
    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "always_keep_tensor_constants": True,  # else small ones are written into the code
        "joint_graph_constant_folding": False,
        "cpp.threads": threads,  # by default, those of this process
        "emulate_precision_casts": rounds,
    }
    files = torch._inductor.aot_compile(module, tuple(args), options=options)
    assert isinstance(files, list)
    return files


def write_package(path: Path, models: Mapping[str, list[Any]]) -> None:
    """Write models by name into one file.

    Raises:
        OSError: the file cannot be written.
    """
    with archive_stream(path) as file:
        package_aoti(cast(Any, file), dict(models))


def compiler() -> str:
    """Return the C++ compiler that Inductor calls.

    Raises:
        RuntimeError: there is no compiler.
    """
    path: str = get_cpp_compiler()
    return path


@contextlib.contextmanager
def quiet_inductor() -> Iterator[None]:
    """Keep Inductor's logs off the terminal."""
    import logging

    logger = logging.getLogger("torch._inductor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
