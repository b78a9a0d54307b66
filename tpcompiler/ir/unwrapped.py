"""Weights that are tensor subclasses, such as torchao's quantised ones, as the plain tensors that they consist of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, TensorArgument

from tpcompiler._torch import LEAF_KINDS, is_wrapper_subclass
from tpcompiler.errors import UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.bodies import read_bodies
from tpcompiler.ir.local import fake_mode_of
from tpcompiler.ir.rebuilt import copy_signature, rebuilt

READ = "export.access_subclass_inner_tensor.default"


def unwrap_subclasses(program: ExportedProgram) -> ExportedProgram:
    """The program with a leaf for each tensor that a subclass is made of, named as torch's parametrizations are.

    Before    w = up.weight            Int8Tensor of qdata i8[256, 128] and scale f32[256, 1]
              q = access_subclass_inner_tensor(w, "qdata")
    After     q = up.parametrizations.weight.original0
              s = up.parametrizations.weight.original1

    Torch itself, where it decomposes such a program, and torchao's `unwrap_tensor_subclass` give the same names.

    Raises:
        UnsupportedError: a subclass that an op takes as a whole.
    """
    held = {**program.constants, **program.state_dict}
    kept = program.graph_signature.input_specs
    wrapped = {
        spec.target for spec in kept if spec.kind in LEAF_KINDS and is_wrapper_subclass(held.get(str(spec.target)))
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
        if str(user.target) != READ:
            raise UnsupportedError(
                f"'{user.name}' ({user.target}) takes a weight that is a tensor subclass as a whole",
                help="unwrap the weights before the export: torchao.utils.unwrap_tensor_subclass(model)",
                used_at=edit.source_line(user),
            )
        _take_parts(user, (*path, str(user.args[1])), parts)
    edit.erase(node)
