"""Exported programs and graphs derived from others, without torch's redundant work."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import _convert_guards_to_code, _get_shape_env
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen, _Namespace
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

LEAF_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
WRITTEN_KINDS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)
GRADIENT_KINDS = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)
RETURNED_KINDS = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT, *GRADIENT_KINDS)


def input_values(program: ExportedProgram) -> dict[str, Any]:
    """Return the recorded (fake) value of each of a graph's inputs, leaves included, by the node's name."""
    return {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}


def module_inputs(program: ExportedProgram, module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Pair the placeholders of `program.module()` with the program's inputs: (node, the recorded value).

    They correspond by position: a copy of a graph renames a node that is called as a builtin, such as `input`.
    """
    values = input_values(program)
    nodes = module.graph.find_nodes(op="placeholder")
    return [(node, values[spec.arg.name]) for node, spec in zip(nodes, user_inputs(program), strict=True)]


def user_inputs(program: ExportedProgram) -> list[InputSpec]:
    """Return the specifications of the inputs that a caller passes, in order."""
    return [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]


def all_tensors(program: ExportedProgram) -> dict[str, Any]:
    """Return the parameters, buffers and constants, by name."""
    return {**program.constants, **program.state_dict}


def graph_modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the module and the bodies in it."""
    return [each for each in module.modules() if isinstance(each, fx.GraphModule)]


def names_in_python(names: Iterable[str]) -> list[str]:
    """Return the names that torch gives to the inputs of a function of these names: Python's own words get a number."""
    space = _Namespace()
    return [space.create_name(name, None) for name in names]


GUARD_FAILED = "Guard failed: "
GUARDED = re.compile(r"\bL\['(\w+)'\]")  # an input, as a guard names it


def tree_names(spec: Any) -> list[str]:
    """Return the path of every leaf of a pytree, as `logits`, `0` or `cache.0.key`; equal paths are numbered, `0#2`.

    If a class does not name its parts, leaves are numbered.
    """
    try:
        # Tensors, because the caches of transformers' exporters take numbers for constants.
        tensors = [torch.empty(0) for _ in range(spec.num_leaves)]
        leaves, _ = tree_flatten_with_path(tree_unflatten(tensors, spec))
    except ValueError:  # a class registered without names for its parts
        return [str(at) for at in range(spec.num_leaves)]
    names: list[str] = []
    times: Counter[str] = Counter()
    for path, _leaf in leaves:
        parts = (str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        name = ".".join(parts) or "output"
        times[name] += 1
        names.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return names


def guards_of(program: ExportedProgram) -> list[str]:
    """Return the assertions of `program.module()` on inputs, apart from shapes and ranges, as Python code."""
    return list(vars(program).get("_guards_code") or ())


def guards_on(guards: Sequence[str], names: Collection[str]) -> list[str]:
    """Return those that are on inputs of these names alone: a stage has also those on inputs of other stages."""
    return [each for each in guards if set(GUARDED.findall(each)).issubset(names)]


def set_guards(program: ExportedProgram, guards: Sequence[str]) -> None:
    """Replace the assertions on inputs."""
    program._guards_code = list(guards)


def find_failed_guard(program: ExportedProgram, values: Sequence[Any]) -> str:
    """Return the assertion of `program.module()` that these inputs, in the program's order, fail; empty for none."""
    guards = getattr(program.module(), "_guards_fn", None) if guards_of(program) else None
    if guards is None:  # torch makes none without an example
        return ""
    try:
        guards(*values)
    except AssertionError as error:
        return read_failed_guard(error)
    return ""


def read_failed_guard(error: BaseException) -> str:
    """Return the assertion on inputs that torch reports to have failed, as Python code; empty for another error."""
    text = str(error) if isinstance(error, AssertionError) else ""
    return text.removeprefix(GUARD_FAILED) if text.startswith(GUARD_FAILED) else ""


def check_built(program: ExportedProgram, names: Collection[str] | None = None, shared: Collection[Any] = ()) -> None:
    """Validate a program and compute its guards, as torch's constructor does at its end; only those on `names`.

    `shared`: sizes of which the program's inputs have shares; no guard is on those.
    """
    program.validate()  # type: ignore[no-untyped-call]
    with _without_guards(program, {size.node.expr for size in shared if isinstance(size, torch.SymInt)}):
        guards = _convert_guards_to_code(program.graph_module)  # type: ignore[no-untyped-call]
    program._guards_code = guards if names is None else guards_on(guards, names)


@contextlib.contextmanager
def _without_guards(program: ExportedProgram, sizes: Set[Any]) -> Iterator[None]:
    """Leave out the guards on inputs' sizes that equal one of these, in this block."""
    env = _get_shape_env(program.graph_module) if sizes else None  # type: ignore[no-untyped-call]
    if env is None:
        yield
        return
    gone = {symbol for symbol in env.var_to_sources if env.replacements.get(symbol, symbol) in sizes}
    before = env.guards
    env.guards = [guard for guard in before if not guard.expr.free_symbols & gone]
    try:
        yield
    finally:
        env.guards = before


def with_state(
    program: ExportedProgram,
    state_dict: dict[str, Any],
    constants: dict[str, Any],
    module_call_graph: Sequence[Any],
    example_inputs: Any,
) -> ExportedProgram:
    """Return the program over other tensors; its graph is the same object."""
    result = copy.copy(program)
    result._state_dict, result._constants = state_dict, constants
    result._module_call_graph, result._example_inputs = list(module_call_graph), example_inputs
    return result


def with_graph(program: ExportedProgram, root: Any, graph: torch.fx.Graph) -> ExportedProgram:
    """Return the program with another graph, whose bodies `root` holds.

    The graph's Python code is written and compiled at its first run; torch's constructors do that at once.
    """
    result = copy.copy(program)
    graph._codegen = CodeGen()  # flat
    result._graph_module = _LazyGraphModule(root, graph)
    result._graph_module.meta.update(program.graph_module.meta)
    result._state_dict, result._constants = dict(program.state_dict), dict(program.constants)
    result._range_constraints = dict(program.range_constraints)
    return result


def forget_index(value: torch.Tensor) -> None:
    """Make a fake CUDA tensor name `cuda` without an index, for writing.

    torch gives each such tensor an index, and reads it back with the current device's. Afterwards nothing can be
    computed with the tensor.
    """
    if isinstance(value, FakeTensor):
        name = "_fake_device" if hasattr(value, "_fake_device") else "fake_device"  # torch 2.13 made it a property
        setattr(value, name, torch.device(value.device.type))


def mode_of_parameters() -> FakeTensorMode:
    """Return a fake mode whose tensors `nn.Module.to` can convert.

    `Module.to` swaps fake parameters in place, which torch refuses for a tensor with a weak reference. torch keeps one
    to every result of an op, by the id of a meta tensor that is fresh each time: that memo is never used.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter.set_tensor_memo = lambda meta, fake: None  # type: ignore[assignment]
    return mode


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a graph with copies of all nodes under the same names, and shallow copies of their meta.

    `Graph.node_copy` checks every argument and searches for a new name, which takes most of a conversion's time.
    """
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    names, map_arg, copy_of = new._graph_namespace, fx.node.map_arg, copies.__getitem__
    for node in graph.nodes:
        args, kwargs = map_arg(node._args, copy_of), node._kwargs and map_arg(node._kwargs, copy_of)
        copied = copies[node] = fx.Node(new, node.name, node.op, node.target, args, kwargs, node.type)
        copied.meta.update(node.meta)
        base, _, number = node.name.rpartition("_")
        if base and number.isdecimal():
            names._base_count[base] = int(number)
        else:
            names._base_count.setdefault(node.name, 0)
        new._insert(copied)
    names._obj_to_name = {copied: copied.name for copied in copies.values()}
    names._used_names = set(names._obj_to_name.values())
    table = new._find_nodes_lookup_table.table
    for kind, nodes in graph._find_nodes_lookup_table.table.items():
        table[kind] = {copies[node]: None for node in nodes}
    new._len = len(copies)
    return new
