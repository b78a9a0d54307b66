"""Replace quantisers' tensor subclasses by plain weights, and drop the weights that nothing uses any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, TensorArgument

from tpcompiler._torch import LEAF_KINDS, all_tensors, is_wrapper_subclass
from tpcompiler.frontend.refused import refuse_others
from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import copy_with_bodies
from tpcompiler.ir.exported import copy_signature, rebuilt
from tpcompiler.ir.leaf_values import computed_from_leaves
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import Note, Program, tied
from tpcompiler.terminal.printed import format_bytes

READ = "export.access_subclass_inner_tensor.default"


def with_plain_weights(program: ExportedProgram) -> ExportedProgram:
    """Return the program as it is converted and compared: unwrapped, without replaced weights."""
    return drop_replaced(unwrap_subclasses(program))[0]


def unwrap_subclasses(program: ExportedProgram) -> ExportedProgram:
    """Return the program with one leaf per tensor in a subclass, named as torch's parametrizations are.

    Before    w = up.weight            Int8Tensor of qdata i8[256, 128] and scale f32[256, 1]
              q = access_subclass_inner_tensor(w, "qdata")
    After     q = up.parametrizations.weight.original0
              s = up.parametrizations.weight.original1

    torch itself, when it decomposes such a program, and torchao's `unwrap_tensor_subclass` give the same names. A
    subclass that an op takes whole stays, for torch to unwrap.

    Raises:
        ProgramError: no exported program.
    """
    refuse_others(program)
    values = all_tensors(program)
    wrapped = {
        spec.target
        for node, spec in edit.placeholders(program)
        if spec.kind in LEAF_KINDS and is_wrapper_subclass(value := values.get(str(spec.target)))
        if _is_read_alone(node, value)
    }
    if not wrapped:
        return program
    graph = copy_with_bodies(program.graph_module)
    state = {name: value for name, value in program.state_dict.items() if name not in wrapped}
    constants = {name: value for name, value in program.constants.items() if name not in wrapped}
    specs = []
    for node, (_, spec) in zip(graph.find_nodes(op="placeholder"), edit.placeholders(program), strict=True):
        if spec.target not in wrapped:
            specs.append(spec)
            continue
        layer, _, name = str(spec.target).rpartition(".")
        parts = {}
        for number, (path, value) in enumerate(_plain(values[str(spec.target)])):
            fqn = f"{layer}.parametrizations.{name}.original{number}".removeprefix(".")
            with graph.inserting_before(node):
                parts[path] = graph.placeholder(f"{node.name}_{number}")
            with fake_mode_of(graph):  # `from_tensor` would create symbols for its sizes
                parts[path].meta["val"] = torch.empty_strided(
                    tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
                )
            specs.append(replace(spec, arg=TensorArgument(name=parts[path].name), target=fqn))
            is_parameter = spec.kind is InputKind.PARAMETER
            home = state if spec.target in program.state_dict else constants
            home[fqn] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
        _take_parts(node, (), parts)
    signature = ExportGraphSignature(specs, copy_signature(program.graph_signature).output_specs)
    return rebuilt(program, graph, signature, constants, state)


def _plain(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the tensors in a subclass, each with the attributes that lead to it."""
    names, _ = value.__tensor_flatten__()
    for name in names:
        inner = getattr(value, name)
        if is_wrapper_subclass(inner):
            yield from (((name, *path), plain) for path, plain in _plain(inner))
        else:
            yield (name,), inner.detach()


def _take_parts(node: fx.Node, path: tuple[str, ...], parts: dict[tuple[str, ...], fx.Node]) -> None:
    """Make users that read an attribute of a subclass (or an attribute's attribute) take the tensor itself."""
    if path in parts:
        edit.replace_uses(node, parts[path])
    for user in list(node.users):
        _take_parts(user, (*path, str(user.args[1])), parts)
    edit.erase(node)


def _is_read_alone(node: fx.Node, value: Any) -> bool:
    """Return True if all users of a subclass only read attributes of it."""
    return not is_wrapper_subclass(value) or all(
        str(user.target) == READ and _is_read_alone(user, getattr(value, str(user.args[1]))) for user in node.users
    )


def drop_replaced(program: ExportedProgram) -> tuple[ExportedProgram, tuple[Note, ...]]:
    """Return the program without weights that their layers replaced by others, and notes about these.

    Before    up.weight f32[256, 128], _frozen_param0 i8[256, 128]      as PT2E leaves them
              linear(x, dequantize_per_channel(_frozen_param0, ..))     in the module up
    After     _frozen_param0 i8[256, 128]

    Unused parts of a weight in parts are dropped too, such as zero points that are always zero. A parameter that is
    unused for another reason stays, because a checkpoint of the model has it.
    """
    view, values = Program(program, program.graph), all_tensors(program)
    if any(fqn not in values for _, fqn in view.leaves()):
        return program, ()  # refused later
    dropped = {node.name: fqn for node, fqn in _replaced(view)}
    if not dropped:
        return program, ()
    graph, names = copy_with_bodies(program.graph_module), set(dropped.values())
    for node in graph.find_nodes(op="placeholder"):
        if node.name in dropped:
            edit.erase(node)
    signature = copy_signature(program.graph_signature)
    specs = [spec for spec in signature.input_specs if spec.target not in names]
    state, constants = ({n: v for n, v in h.items() if n not in names} for h in (program.state_dict, program.constants))
    converted = rebuilt(program, graph, ExportGraphSignature(specs, signature.output_specs), constants, state)
    sizes = {fqn: view.state(fqn).numel() * view.state(fqn).element_size() for fqn in dropped.values()}
    return converted, tuple(Note("dropped", f"{fqn}: {format_bytes(size)}") for fqn, size in sizes.items())


def _replaced(program: Program) -> Iterator[tuple[fx.Node, str]]:
    leaves, first_of = dict(program.leaves()), tied(program)
    used_leaves = {node: fqn for node, fqn in leaves.items() if node.users}
    tied_to_used = {first_of[node.name] for node in used_leaves}
    unused = {node: fqn for node, fqn in leaves.items() if first_of[node.name] not in tied_to_used}
    if not unused:
        return
    static = computed_from_leaves(program.graph, leaves.keys())
    takers = [n for n in edit.calls(program.graph) if n not in static and any(o in static for o in edit.operands(n))]
    weights = {weight_of(fqn) for fqn in used_leaves.values()}
    own = {layer_of(fqn) for node, fqn in used_leaves.items() if edit.ndim(node) > 1}
    served = {path for node in takers for path in edit.module_paths(node)} - own  # served by weights of other layers
    for node, fqn in unused.items():
        is_part = weight_of(fqn) != fqn and weight_of(fqn) in weights
        if is_part or (layer_of(fqn) in served and edit.ndim(node) > 1):
            yield node, fqn
