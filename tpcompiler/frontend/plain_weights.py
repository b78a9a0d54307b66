"""What quantisers leave behind: weights that are tensor subclasses, and weights that nothing uses any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, TensorArgument

from tpcompiler._torch import LEAF_KINDS, is_wrapper_subclass
from tpcompiler.frontend.refused import refuse_others
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import read_bodies
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.names import layer_of, weight_of
from tpcompiler.ir.program import Note, Program, tied
from tpcompiler.ir.rebuilt import copy_signature, rebuilt
from tpcompiler.ir.static import computed_from_leaves
from tpcompiler.terminal.printed import format_bytes

READ = "export.access_subclass_inner_tensor.default"


def with_plain_weights(program: ExportedProgram) -> ExportedProgram:
    """The program as it is converted, and as what is converted is compared with: see the two functions below."""
    return drop_replaced(unwrap_subclasses(program))[0]


def unwrap_subclasses(program: ExportedProgram) -> ExportedProgram:
    """The program with a leaf for each tensor that a subclass is made of, named as torch's parametrizations are.

    Before    w = up.weight            Int8Tensor of qdata i8[256, 128] and scale f32[256, 1]
              q = access_subclass_inner_tensor(w, "qdata")
    After     q = up.parametrizations.weight.original0
              s = up.parametrizations.weight.original1

    Torch itself, where it decomposes such a program, and torchao's `unwrap_tensor_subclass` give the same names.
    What an op takes as a whole stays, for torch to take apart.

    Raises:
        ProgramError: no exported program.
    """
    refuse_others(program)
    held = {**program.constants, **program.state_dict}
    kept = program.graph_signature.input_specs
    wrapped = {
        spec.target
        for node, spec in zip(program.graph.find_nodes(op="placeholder"), kept, strict=True)
        if spec.kind in LEAF_KINDS and is_wrapper_subclass(value := held.get(str(spec.target)))
        if _is_read_alone(node, value)
    }
    if not wrapped:
        return program
    graph = edit.copy_graph(program.graph)
    read_bodies(graph, program.graph_module)
    state = {name: value for name, value in program.state_dict.items() if name not in wrapped}
    constants = {name: value for name, value in program.constants.items() if name not in wrapped}
    specs = []
    for node, spec in zip(graph.find_nodes(op="placeholder"), kept, strict=True):
        if spec.target not in wrapped:
            specs.append(spec)
            continue
        layer, _, name = str(spec.target).rpartition(".")
        parts = {}
        for number, (path, value) in enumerate(_plain(held[str(spec.target)])):
            fqn = f"{layer}.parametrizations.{name}.original{number}".removeprefix(".")
            with graph.inserting_before(node):
                parts[path] = graph.placeholder(f"{node.name}_{number}")
            with fake_mode_of(graph):  # `from_tensor` would make symbols of its sizes
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
    """The tensors in a subclass, each with the attributes that lead to it."""
    names, _ = value.__tensor_flatten__()
    for name in names:
        inner = getattr(value, name)
        if is_wrapper_subclass(inner):
            yield from (((name, *path), plain) for path, plain in _plain(inner))
        else:
            yield (name,), inner.detach()


def _take_parts(node: fx.Node, path: tuple[str, ...], parts: dict[tuple[str, ...], fx.Node]) -> None:
    """Let what reads an attribute of a subclass, or one of an attribute's, take the tensor itself."""
    if path in parts:
        edit.replace_uses(node, parts[path])
    for user in list(node.users):
        _take_parts(user, (*path, str(user.args[1])), parts)
    edit.erase(node)


def _is_read_alone(node: fx.Node, value: Any) -> bool:
    """Whether all that takes a subclass reads an attribute of it."""
    return not is_wrapper_subclass(value) or all(
        str(user.target) == READ and _is_read_alone(user, getattr(value, str(user.args[1]))) for user in node.users
    )


def drop_replaced(program: ExportedProgram) -> tuple[ExportedProgram, tuple[Note, ...]]:
    """The program without the weights in whose place their layers use others, and what is said of them.

    Before    up.weight f32[256, 128], _frozen_param0 i8[256, 128]      as PT2E leaves them
              linear(x, dequantize_per_channel(_frozen_param0, ..))     in the module up
    After     _frozen_param0 i8[256, 128]

    Parts of a weight that is in parts are such too, like zero points that are always zero. A parameter that is not used
    for another reason stays: a checkpoint of the model has it.
    """
    read, held = Program(program, program.graph), {**program.constants, **program.state_dict}
    if any(fqn not in held for _, fqn in read.leaves()):
        return program, ()  # which is refused later
    dropped = {node.name: fqn for node, fqn in _replaced(read)}
    if not dropped:
        return program, ()
    graph, names = edit.copy_graph(program.graph), set(dropped.values())
    read_bodies(graph, program.graph_module)
    for node in graph.find_nodes(op="placeholder"):
        if node.name in dropped:
            edit.erase(node)
    signature = copy_signature(program.graph_signature)
    specs = [spec for spec in signature.input_specs if spec.target not in names]
    state, constants = ({n: v for n, v in h.items() if n not in names} for h in (program.state_dict, program.constants))
    made = rebuilt(program, graph, ExportGraphSignature(specs, signature.output_specs), constants, state)
    sizes = {fqn: read.state(fqn).numel() * read.state(fqn).element_size() for fqn in dropped.values()}
    return made, tuple(Note("dropped", f"{fqn}: {format_bytes(size)}") for fqn, size in sizes.items())


def _replaced(program: Program) -> Iterator[tuple[fx.Node, str]]:
    leaves, first_of = dict(program.leaves()), tied(program)
    used = {node: fqn for node, fqn in leaves.items() if node.users}
    tied_to_used = {first_of[node.name] for node in used}
    unused = {node: fqn for node, fqn in leaves.items() if first_of[node.name] not in tied_to_used}
    if not unused:
        return
    static = computed_from_leaves(program.graph, leaves.keys())
    takers = [n for n in edit.calls(program.graph) if n not in static and any(o in static for o in edit.operands(n))]
    weights = {weight_of(fqn) for fqn in used.values()}
    own = {layer_of(fqn) for node, fqn in used.items() if node.meta["val"].ndim > 1}
    served = {path for node in takers for path in edit.module_paths(node)} - own  # by others' weights
    for node, fqn in unused.items():
        is_part = weight_of(fqn) != fqn and weight_of(fqn) in weights
        if is_part or (layer_of(fqn) in served and node.meta["val"].ndim > 1):
            yield node, fqn
