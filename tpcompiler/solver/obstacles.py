"""Sizes that a number of ranks does not divide: heads, packed blocks, quantisation groups, vocabulary, features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpcompiler._torch import OpOverload, aten
from tpcompiler.ir import edit
from tpcompiler.ir.dim_sharding import DimSharding
from tpcompiler.ir.names import fold_layers, layer_of
from tpcompiler.ir.program import PlannedProgram
from tpcompiler.ir.static import computed_from_leaves
from tpcompiler.ir.text import op_name
from tpcompiler.solver.solution import Solution

CASTS = (aten._to_copy.default, aten.clone.default)
KINDS = (
    "heads",
    "kv heads",
    "features of a packed block",
    "quantisation groups",
    "entries of the vocabulary",
    "features",
)


@dataclass(frozen=True)
class Obstacle:
    """So many of a kind that ranks deal out evenly, or not, and the layers that have them, `*` for repeated ones."""

    kind: str
    count: int
    layers: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.count:,} {self.kind} ({self.layers[0]}{more})"


def find_obstacles(found: Solution) -> list[Obstacle]:
    """Find the sizes that the search shards over the model's axis, in the order of `KINDS`."""
    heads = {each for program in found.programs for each in _heads(found, program)}
    most = {layer: max(count for count, other in heads if other == layer) for _, layer in heads}
    named = [(_kind_of_heads(count, most[layer]), count, layer) for count, layer in sorted(heads)]
    layers: dict[tuple[str, int], dict[str, None]] = {}
    for kind, count, layer in (*named, *(each for program in found.programs for each in _cuts(found, program))):
        if kind != "features" or not any(layer.startswith(f"{other}.") for other in most):  # as its heads say
            layers.setdefault((kind, count), {})[layer] = None
    made = (Obstacle(kind, count, tuple(names)) for (kind, count), names in layers.items())
    return sorted(made, key=lambda each: (KINDS.index(each.kind), each.count))


def _kind_of_heads(count: int, most: int) -> str:
    """Several heads of queries share one of keys and values, so a module has fewer of these."""
    return "kv heads" if count < most and most % count == 0 else "heads"


def _heads(found: Solution, program: PlannedProgram) -> Iterator[tuple[int, str]]:
    """A view of an activation that makes two dims of one that is cut: the outer one is heads."""
    weights = computed_from_leaves(program.graph, dict(program.leaves()).keys())
    for node in edit.calls(program.graph):
        choice = found.choices.get(node)
        if choice is None or node.target not in edit.VIEWS or node in weights:
            continue
        whole, made = edit.shape(edit.operands(node)[0]), edit.shape(node)
        outer = list(zip(made, made[1:], choice.made[0].dims, strict=False))
        for size, cut in zip(whole, choice.wants[0].dims, strict=True):
            for count, inner, own in outer if isinstance(size, int) and _is_cut(cut, found) else ():
                if isinstance(count, int) and _is_cut(own, found) and count < size == count * inner:
                    yield count, fold_layers(edit.module_path(node)) or "the model"


def _cuts(found: Solution, program: PlannedProgram) -> Iterator[tuple[str, int, str]]:
    """Iterate over the sharded dims of weights, each with its layer."""
    caches = {name for _, name in program.written()}  # cut like the values that are written to them
    leaves = {node: fqn for node, fqn in program.leaves() if fqn not in caches}
    vocabularies = _vocabularies(program)
    quantised: dict[str, torch.Size] = {}  # the weight of such a layer, whose scales are by groups
    for node, fqn in leaves.items():
        value, layer = edit.fake(node), layer_of(fqn)
        if value.ndim > 1 and (value.dtype.itemsize == 1 or not value.is_floating_point()):
            quantised[layer] = max(quantised.get(layer, value.shape), value.shape, key=torch.Size.numel)
    for node, fqn in leaves.items():
        shape, layer = edit.shape(node), fold_layers(layer_of(fqn)) or "the model"
        whole = quantised.get(layer_of(fqn), shape)
        for dim, cut in enumerate(found.leaves[node].dims if len(shape) > 1 else ()):
            if not _is_cut(cut, found):
                continue
            if packed := [size for size, by in cut.parts if by.axes] or [cut.block] * bool(cut.block):
                yield from (("features of a packed block", size, layer) for size in packed)
            elif len(whole) == len(shape) and shape[dim] < whole[dim]:
                yield "quantisation groups", shape[dim], layer
            else:
                is_vocabulary = dim == 0 and shape[0] in vocabularies
                yield "entries of the vocabulary" if is_vocabulary else "features", shape[dim], layer


def _vocabularies(program: PlannedProgram) -> set[int]:
    """Return the row counts of the tables in which the program looks up its inputs."""
    inputs = set(program.user_inputs())
    for node in edit.calls(program.graph):
        target: Any = node.target
        if isinstance(target, OpOverload) and (target.is_view or target in CASTS) and node.args[0] in inputs:
            inputs.add(node)
    looked = [edit.operands(node) for node in edit.calls(program.graph) if op_name(node) == "embedding"]
    return {edit.shape(table)[0] for table, ids in looked if ids in inputs}


def _is_cut(cut: DimSharding, found: Solution) -> bool:
    return any(axis in found.model for axis in cut.axes)
