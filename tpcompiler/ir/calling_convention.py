"""A program's calling convention as plain data: the facts that no graph records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from tpcompiler.runtime.records import LARGEST, Calling


def calling_of(program: ExportedProgram, guards: Sequence[str]) -> Calling:
    """Return a program's pytrees, argument names, ranges of sizes, assertions on inputs, and constant inputs."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    assertions = [node for node in program.graph.nodes if node.op == "call_function" and "_assert" in str(node.target)]
    return Calling(
        takes=tree_text(signature.in_spec),
        returns=tree_text(signature.out_spec),
        names=list(signature.forward_arg_names or ()),
        ranges={
            str(symbol): [_end(bounds.lower), _end(bounds.upper)]
            for symbol, bounds in sorted(program.range_constraints.items(), key=str)
        },
        asserted=sorted({*guards, *map(_assertion, assertions)}),
        constants=[
            f"{spec.arg.name}={spec.arg.value!r}"
            for spec in program.graph_signature.input_specs
            if isinstance(spec.arg, ConstantArgument)
        ],
    )


def tree_text(spec: Any) -> str:
    """Return the types, keys and leaves of a pytree, in order, as one line."""
    return " ".join(str(spec).split())


def _assertion(node: fx.Node) -> str:
    """Describe an assertion in the graph by its failure message."""
    return f"{node.target}: {' '.join(arg for arg in node.args if isinstance(arg, str))}"


def _end(size: Any) -> int | None:
    """Return a bound of a range; None if it is infinite or too large to matter."""
    return int(size) if size.is_Integer and 0 <= size < LARGEST else None
