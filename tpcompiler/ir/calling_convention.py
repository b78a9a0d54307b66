"""A program's calling convention, which no graph records: as plain data, and with outputs that torch alone can load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from tpcompiler._torch import TreeSpec
from tpcompiler.runtime.records import LARGEST, Calling

PLAIN = (tuple, list, dict, OrderedDict)


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


def plain_outputs(spec: TreeSpec) -> tuple[TreeSpec, str | None]:
    """Replace every container class that is not plain Python by a dict; return the spec and the first such class."""
    if spec.is_leaf() or spec.type is None:
        return spec, None
    children, replaced = [], None
    for index in range(spec.num_children):
        child, inner = plain_outputs(spec.child(index))
        children.append(child)
        replaced = replaced or inner
    if spec.type in PLAIN:
        return TreeSpec(spec.type, spec.context, children), replaced
    kind = spec.context if isinstance(spec.context, type) else spec.type  # a namedtuple's class is its context
    replaced = f"{kind.__module__}.{kind.__qualname__}"
    keys = _keys_for(spec, len(children))
    return TreeSpec(dict, keys, children), replaced


def odd_keys(spec: TreeSpec) -> Iterator[object]:
    """Yield dict keys that torch's JSON does not preserve: `(1, 2)` comes back as a list."""
    if spec.type in (dict, OrderedDict):
        yield from (key for key in spec.context if not isinstance(key, str | int | float | None))
    for index in range(spec.num_children):
        yield from odd_keys(spec.child(index))


def _keys_for(spec: TreeSpec, count: int) -> list[Any]:
    """Return the field names of a registered class if its pytree context has them, else numbers."""
    context = spec.context
    parts = context if isinstance(context, (list, tuple)) else ()
    for candidate in (context, *parts, getattr(context, "_fields", None)):
        if (
            isinstance(candidate, (list, tuple))
            and len(candidate) == count
            and all(isinstance(k, str) for k in candidate)
        ):
            return list(candidate)
    return [str(index) for index in range(count)]
