"""How a program is called, as plain data: what of it no graph says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from tpcompiler.runtime.manifest_form import LARGEST


def calling_of(program: ExportedProgram, guards: Sequence[str]) -> dict[str, Any]:
    """The pytrees that it takes and returns, its arguments' names, the ranges of sizes, what it asserts of inputs."""
    signature = program.module_call_graph[0].signature
    assert signature is not None
    assertions = [node for node in program.graph.nodes if node.op == "call_function" and "_assert" in str(node.target)]
    return {
        "takes": tree_text(signature.in_spec),
        "returns": tree_text(signature.out_spec),
        "names": list(signature.forward_arg_names or ()),
        "ranges": {
            str(symbol): [_end(known.lower), _end(known.upper)]
            for symbol, known in sorted(program.range_constraints.items(), key=str)
        },
        "asserted": sorted({*guards, *map(_assertion, assertions)}),
        "constants": [
            f"{spec.arg.name}={spec.arg.value!r}"
            for spec in program.graph_signature.input_specs
            if isinstance(spec.arg, ConstantArgument)
        ],
    }


def tree_text(spec: Any) -> str:
    """The types, keys and leaves of a pytree, in order."""
    return " ".join(str(spec).split())


def _assertion(node: fx.Node) -> str:
    """An assertion in the graph, by what it says when it fails."""
    return f"{node.target}: {' '.join(arg for arg in node.args if isinstance(arg, str))}"


def _end(size: Any) -> int | None:
    """None where there is none: infinity, of either sign, or more than there can be."""
    return int(size) if size.is_Integer and 0 <= size < LARGEST else None
