"""The single-device program, as what all ranks are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler._torch import HigherOrderOperator, OpOverload, functional_copy
from tpcompiler.errors import ProgramError
from tpcompiler.frontend.written_back import find_hidden_views, find_overwritten, keep_old_values, spell_out_copies
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import has_bodies
from tpcompiler.ir.draws import draws
from tpcompiler.verify.promote import Promoted, promoted
from tpcompiler.verify.simulate import RankResult, simulate

# In bfloat16 the bounds are 0.06 to 0.13, and leaving one all_reduce of 8 layers out changes the logits by 0.14. So a
# program in less than float32 is compared once more with all of it in float32, where they are about 1e-5.
WIDE = torch.float32


def is_narrow(program: ExportedProgram) -> bool:
    floats = (v.dtype for node in program.graph.nodes for v in edit.outputs(node) if v.is_floating_point())
    return any(torch.finfo(dtype).bits < torch.finfo(WIDE).bits for dtype in floats)


def runnable(program: ExportedProgram) -> ExportedProgram:
    """The program as the user exported it, to be the reference; a functional copy where `simulate` wants one."""
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, fx.GraphModule)]
    runs = program.dialect != "TRAINING" or all(_runs(node) for graph in graphs for node in graph.nodes)
    if runs and not any(find_overwritten(program)):
        return program
    try:
        made = functional_copy(spell_out_copies(program), find_hidden_views(program))
    except Exception as error:  # whatever torch raises of programs that it cannot make functional
        raise ProgramError(
            f"there is nothing to compare with: torch cannot make the program functional: {_first_line(error)}",
            help="register what forward changes as buffers, each in memory of its own",
        ) from error
    return keep_old_values(made)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _runs(node: fx.Node) -> bool:
    """Whether it gives the same in any dtype, by itself: it does not draw or write (to a copy in one dtype, to the
    thing itself in another), or set a mode for other calls."""
    if node.op != "call_function":
        return node.op != "call_module"
    if isinstance(node.target, OpOverload):
        # Batch norm writes its statistics, and its schema does not say so.
        unsaid = "batch_norm" in str(node.target) and edit.bound(node).get("training")
        return not (node.target._schema.is_mutable or draws(node) or unsaid)
    if isinstance(node.target, HigherOrderOperator):
        return has_bodies(node) or str(node.target) == "wrap_with_set_grad_enabled"
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch")  # of sizes


def run_single(program: ExportedProgram, flat: Sequence[Any], dtype: torch.dtype | None = None) -> RankResult:
    """A single-device program by itself; with a dtype, every floating-point value in that dtype."""
    if dtype is None:
        return simulate([program], [flat])[0]
    return simulate([Promoted(program, dtype)], [[promoted(v, dtype) for v in flat]])[0]
