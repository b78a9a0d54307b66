"""Check the invariants of every stage on the program itself."""

from __future__ import annotations

from torch import fx

from tpcompiler.errors import InternalError
from tpcompiler.ir import edit
from tpcompiler.ir.node_placement import PLACEMENT, placement_of
from tpcompiler.ir.program import LocalProgram, LoweredProgram, PlacedProgram, Program, pin, reshard


def check_invariants(program: Program) -> None:
    """Check the invariants of the program's stage.

    Raises:
        InternalError: names the stage, the node and the violation.
    """
    for node in program.graph.nodes:
        if isinstance(program, PlacedProgram):
            _check_mark(node, program)
            _check_operands(node, program)
        if isinstance(program, LoweredProgram):
            _require(node.target not in (pin, reshard), node, program, "is still a marker")
        if isinstance(program, LocalProgram) and node.op == "call_function" and edit.is_tensor(node):
            sizes = (s for s in edit.shape(node))
            _require(all(not isinstance(s, int) or s >= 0 for s in sizes), node, program, "has a negative size")
    program.graph.lint()


def _check_mark(node: fx.Node, program: Program) -> None:
    _require(PLACEMENT in node.meta, node, program, "has no placement")
    mark = placement_of(node)
    values = edit.outputs(node) if node.op != "output" else ()
    _require(len(mark.shardings) == len(values), node, program, "has another number of shardings than of tensors")
    for sharding, value in zip(mark.shardings, values, strict=True):
        _require(sharding.ndim == value.ndim, node, program, f"of {value.ndim} dims has a sharding of {sharding.ndim}")
        cut = [axis for dim in sharding.dims for axis in dim.axes] + [axis for axis, _ in sharding.partial]
        _require(len(cut) == len(set(cut)), node, program, "uses a mesh axis twice")


def _check_operands(node: fx.Node, program: Program) -> None:
    _require(node.target is not pin, node, program, "is still a pin")
    for operand, want in zip(edit.operands(node), placement_of(node).wants, strict=False):
        _require(
            placement_of(operand).shardings[0] == want,
            node,
            program,
            f"has '{operand.name}' in another sharding than it needs",
        )


def _require(holds: bool, node: fx.Node, program: Program, what: str) -> None:
    if not holds:
        raise InternalError(
            f"{type(program).__name__}: '{node.name}' {what}",
            help="report this with the model and the plan",
            used_at=edit.source_line(node),
        )
