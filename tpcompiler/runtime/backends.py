"""What a backend of collectives cannot send, found before the first call: there, every rank raises another text."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import OpOverload
from tpcompiler.errors import UnsupportedError

FLOAT8 = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)}
# Tried with torch 2.13, each dtype with each collective.
GLOO_LACKS = {torch.int16, torch.uint16, torch.uint32, torch.uint64, *FLOAT8}
GLOO_LACKS_OF_COMPLEX = {"all_to_all_single", "product", "max", "min"}


def refuse_unsendable(program: ExportedProgram, backend: str) -> None:
    """Check that the backend has every collective of the program, for its dtype.

    Raises:
        UnsupportedError: gloo has it not.
    """
    for node in program.graph.nodes:
        target = node.target
        if backend != "gloo" or not isinstance(target, OpOverload) or target.namespace != "_c10d_functional":
            continue
        dtype = node.args[0].meta["val"].dtype
        words = [target._schema.name.partition("::")[2], *map(str, node.args[1:2])]  # and what a reduction does
        if dtype in GLOO_LACKS or (dtype.is_complex and not GLOO_LACKS_OF_COMPLEX.isdisjoint(words)):
            what = words[0] if "reduce" not in words[0] else " by ".join(words)
            raise UnsupportedError(
                f"'{node.name}' sends {str(dtype).removeprefix('torch.')}, for which gloo has no {what}",
                help="cast it to another dtype in the model (int16 to int32), and export and convert again",
            )
