"""The single-device program that all ranks are compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from tpcompiler.frontend.written_back import find_overwritten, keep_old_values
from tpcompiler.ir import edit
from tpcompiler.ir.exported import copy_signature
from tpcompiler.judge.compare.promote import Promoted, promoted
from tpcompiler.judge.compare.simulate import RankResult, simulate

# In bfloat16 the bounds are 0.06 to 0.13, and one missing all_reduce of 8 layers changes the logits by 0.14. So a
# program below float32 is compared once more with all of it in float32, where the bounds are about 1e-5.
WIDE = torch.float32


def is_narrow(program: ExportedProgram) -> bool:
    floats = (v.dtype for node in program.graph.nodes for v in edit.outputs(node) if v.is_floating_point())
    return any(torch.finfo(dtype).bits < torch.finfo(WIDE).bits for dtype in floats)


def reference_of(program: ExportedProgram) -> ExportedProgram:
    """Return the program that the user exported, whose ops run in order, in place.

    If a functional program returns the old value of a buffer that it writes, return a copy that clones the value:
    torch's own module would return another value than the graph specifies.
    """
    if not any(find_overwritten(program)):
        return program
    return keep_old_values(
        program._update(copy.deepcopy(program.graph_module), copy_signature(program.graph_signature))
    )


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """Run a single-device program; with a dtype, every floating-point value has that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([Promoted(program, dtype)], [[promoted(v, dtype) for v in flat]])[0]
