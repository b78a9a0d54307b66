"""Reject collectives that a backend cannot send before the first call, where each rank would raise a different text."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload
from tpcompiler.errors import UnsupportedError

FLOAT8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}
# Measured with torch 2.13: each dtype with each collective.
GLOO_LACKS = {torch.int16, torch.uint16, torch.uint32, torch.uint64, *FLOAT8}
GLOO_LACKS_OF_COMPLEX = {"all_to_all_single", "product", "max", "min"}


def refuse_unsendable(program: ExportedProgram, backend: str) -> None:
    """Check that the backend supports every collective of the program with its dtype.

    Raises:
        UnsupportedError: gloo does not support one.
    """
    for node in program.graph.nodes:
        target = node.target
        if backend != "gloo" or not isinstance(target, OpOverload) or target.namespace != "_c10d_functional":
            continue
        dtype = node.all_input_nodes[0].meta["val"].dtype
        names = [target._schema.name.partition("::")[2], *map(str, node.args[1:2])]  # and a reduction's op
        if dtype in GLOO_LACKS or (dtype.is_complex and not GLOO_LACKS_OF_COMPLEX.isdisjoint(names)):
            collective = names[0] if "reduce" not in names[0] else " by ".join(names)
            raise UnsupportedError(
                f"'{node.name}' sends {str(dtype).removeprefix('torch.')}, for which gloo has no {collective}",
                help="cast it to another dtype in the model (int16 to int32), and export and convert again",
            )
