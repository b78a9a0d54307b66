"""The only code that touches `fx.Graph`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec
from torch.fx.node import map_aggregate

from tpcompiler._torch import aten
from tpcompiler._torch import copy_graph as copy_graph

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FRAME = re.compile(r'^[ \t]*File "?(?P<path>[^"\n]*)"?, line (?P<line>\d+)(?P<where>, in [^,\n]*)?', re.MULTILINE)
BACKWARD = "tpcompiler_backward"  # on a call that only gradients need
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch.export's entry for an op outside of any module
KEPT_META = ("nn_module_stack", "stack_trace", BACKWARD)


def fake(node: fx.Node) -> Any:
    """Return the value that torch.export recorded for a node: fake tensors, or a number that may be symbolic."""
    return node.meta["val"]


def record(node: fx.Node, value: Any) -> None:
    """Record a node's value, which `fake` returns."""
    node.meta["val"] = value


def shape(node: fx.Node) -> Any:
    return node.meta["val"].shape


def ndim(node: fx.Node) -> int:
    return node.meta["val"].ndim  # type: ignore[no-any-return]


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def outputs(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors that a node produces (none for numbers)."""
    return tensors_in(node.meta.get("val"))


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors among the results of a call."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, torch.Tensor)) if isinstance(value, (tuple, list)) else ()


def producer(value: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that makes a value, and the value's place among the tensors that this node makes."""
    if value.target is not operator.getitem:
        return value, 0
    source: Any = value.args[0]
    return source, sum(isinstance(each, torch.Tensor) for each in fake(source)[: value.args[1]])


def results(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield the values that a node makes, each with its place among the tensors."""
    if is_tensor(node):
        yield node, 0
        return
    for user in node.users:
        if user.target is operator.getitem and is_tensor(user):
            yield user, producer(user)[1]


def operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands, positional first; repeated operands repeat (`mul(x, x)` has two)."""
    tensors: list[fx.Node] = []
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, (list, tuple, dict, slice)):
            fx.node.map_arg(argument, lambda inner: tensors.append(inner) if is_tensor(inner) else None)
        elif is_tensor(argument):
            tensors.append(argument)  # type: ignore[arg-type]
    return tensors


def map_operands(node: fx.Node, change: Callable[[int, fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `(args, kwargs)` of the node with every tensor operand replaced by `change(index, operand)`."""
    index = -1

    def visit(arg: Any) -> Any:
        nonlocal index
        if is_tensor(arg):
            index += 1
            return change(index, arg)
        return arg

    args = map_aggregate(node.args, visit)
    kwargs = map_aggregate(node.kwargs, visit)
    return args, dict(kwargs)


def replace_operand(node: fx.Node, index: int, new: fx.Node) -> None:
    node.args, node.kwargs = map_operands(node, lambda i, old: new if i == index else old)


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by schema name, with defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            arguments[argument.name] = node.args[position]
        else:
            arguments[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return arguments


def arguments(node: fx.Node) -> SimpleNamespace:
    """Return the node's arguments as `bound` does, as attributes: `arguments(node).dim`."""
    return SimpleNamespace(**bound(node))


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Replace one argument, named as in the op's schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            if position < len(node.args):
                node.update_arg(position, value)
            else:
                node.update_kwarg(name, value)


def count_slices_from_start(graph: fx.Graph) -> None:
    """Replace negative starts and ends of slices, which count from the end: of a shard, that is somewhere else."""
    for node in calls(graph):
        if node.target not in (aten.slice.Tensor, aten.slice_copy.Tensor, aten.slice_scatter.default):
            continue
        args = bound(node)
        size = shape(operands(node)[0])[args["dim"]]
        for name in ("start", "end"):
            if isinstance(size, int) and isinstance(args[name], int) and args[name] < 0:
                set_argument(node, name, max(0, args[name] + size))


def allow_copy(node: fx.Node) -> None:
    """Replace a view by a reshape, which takes an operand of any layout in memory."""
    if node.target in VIEWS:
        node.target, node.args, node.kwargs = aten.reshape.default, tuple(bound(node).values()), {}


def inherit_meta(node: fx.Node, origin: fx.Node) -> None:
    """Give an inserted node the module and source line of the node that it serves."""
    for key in KEPT_META:
        if key in origin.meta and key not in node.meta:
            node.meta[key] = origin.meta[key]


def insert_after(node: fx.Node, target: Callable[..., Any], args: Sequence[Any], name: str) -> fx.Node:
    """Insert a call right after `node` (after all placeholders, if it is one); the call inherits its meta."""
    place = node
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    graph = node.graph
    with graph.inserting_after(place):
        call = graph.create_node("call_function", target, tuple(args), name=name)
    inherit_meta(call, node)
    return call


def insert_before(node: fx.Node, target: Callable[..., Any], args: Sequence[Any], name: str) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(node):
        call = graph.create_node("call_function", target, tuple(args), name=name)
    inherit_meta(call, node)
    return call


def replace_uses(node: fx.Node, new: fx.Node, keep: Iterable[fx.Node] = ()) -> None:
    """Make every user of `node` use `new`, except the users in `keep`."""
    exempt = set(keep)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in exempt)


def erase(node: fx.Node) -> None:
    node.graph.erase_node(node)


def reorder(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Put all nodes of a graph into this order, in which every node follows its operands."""
    output = graph.output_node()
    for node in nodes:
        if node is not output:
            output.prepend(node)


def graft(node: fx.Node, body: fx.Graph, inputs: Sequence[Any], meta: Mapping[str, Any]) -> list[fx.Node]:
    """Replace `node` by the nodes of `body`, whose placeholders become `inputs`. Return the inserted nodes.

    A body with several outputs needs one user of `node` (a getitem) per output; these users are replaced too.
    """
    return _graft(node, body, inputs, meta)[0]


def rewrite(node: fx.Node, body: fx.Graph, inputs: Sequence[Any]) -> list[fx.Node]:
    """Graft, and give each result the name of the value that it replaces: they are the same values."""
    inserted, results = _graft(node, body, inputs, {})
    for name, result in results.items():
        if result in inserted:
            result.name = name
    return inserted


def _graft(
    node: fx.Node, body: fx.Graph, inputs: Sequence[Any], meta: Mapping[str, Any]
) -> tuple[list[fx.Node], dict[str, Any]]:
    """Graft; return the inserted nodes, and the replacement of each replaced value by that value's name."""
    copies: dict[fx.Node, Any] = {}
    inserted: list[fx.Node] = []
    feed = iter(inputs)
    graph = node.graph
    result: Any = None
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(feed)
            elif inner.op == "output":
                result = fx.node.map_arg(inner.args[0], lambda old: copies[old])
            else:
                new = graph.node_copy(inner, lambda old: copies[old])
                new.meta = {"val": inner.meta.get("val"), **meta}
                inherit_meta(new, node)
                copies[inner] = new
                inserted.append(new)
    if isinstance(result, (list, tuple)):
        replaced = dict(zip(list(node.users), result, strict=True))
        for user, part in replaced.items():
            replace_uses(user, part)
            erase(user)
    else:
        replaced = {node: result}
        replace_uses(node, result)
    erase(node)
    return inserted, {old.name: new for old, new in replaced.items()}


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder of this name, also if fx would change it: the signature names inputs, maybe `input` or `id`."""
    made = graph.placeholder(name)
    made.name = name
    return made


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node under its name, as `add_input`, with the copies of its operands."""
    made = graph.node_copy(node, copies.__getitem__)
    made.name = node.name
    return made


def placeholders(program: ExportedProgram) -> Iterator[tuple[fx.Node, InputSpec]]:
    """Yield each placeholder with its entry in the signature, in order."""
    yield from zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the call nodes in order; safe while the current one is replaced."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            yield node


def calls_by_module(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Return the call nodes inside each module, in order."""
    inside: dict[str, list[fx.Node]] = {}
    for node in calls(graph):
        for path in dict.fromkeys(module_paths(node)):
            inside.setdefault(path, []).append(node)
    return inside


def nodes_behind(values: Iterable[Any]) -> Iterator[fx.Node]:
    """Yield the nodes among these values, and all that they are computed from, nearest first."""
    ahead = list(dict.fromkeys(value for value in values if isinstance(value, fx.Node)))
    found = set(ahead)
    for each in ahead:  # it grows
        yield each
        fresh = [operand for operand in each.all_input_nodes if operand not in found]
        found.update(fresh)
        ahead += fresh


def is_collective(node: fx.Node) -> bool:
    """Return True if a node starts a collective (its wait does not count)."""
    name = str(node.target)
    return node.op == "call_function" and name.startswith("_c10d_functional.") and "wait_tensor" not in name


def is_wait(node: fx.Node) -> bool:
    return "wait_tensor" in str(node.target)


def started(wait: fx.Node) -> fx.Node:
    """Return what a wait waits for: a collective's start, which may have several results."""
    return producer(wait.all_input_nodes[0])[0]


def waits_of(start: fx.Node) -> list[fx.Node]:
    """Return the waits for a collective: one, or one for each of its results."""
    parts = [user for user in start.users if user.target is operator.getitem]
    return [wait for value in (start, *parts) for wait in value.users if is_wait(wait)]


def source_line(node: fx.Node) -> str:
    """Return `model.py:31, in forward` for the user's code that made the node (torch's own frames skipped), or ""."""
    trace = str(node.meta.get("stack_trace") or "")
    lines = [frame for frame in FRAME.finditer(trace) if "<eval_with" not in frame["path"]]
    if not lines:
        return ""
    outside = [frame for frame in lines if "/torch/" not in frame["path"]]
    last = (outside or lines)[-1]
    return f"{last['path'].rsplit('/', 1)[-1]}:{last['line']}{last['where'] or ''}"


def module_path(node: fx.Node) -> str:
    """Return the FQN of the innermost module that the node came from, or ""."""
    paths = module_paths(node)
    return paths[-1] if paths else ""


def module_paths(node: fx.Node) -> list[str]:
    """Return the FQNs of all modules around the node, outermost first, without the root's empty name."""
    paths = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
    return [path for path in paths if path and path != NO_MODULE]
