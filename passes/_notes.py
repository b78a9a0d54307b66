"""Notes of the report about a marked program, apart from its collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import torch
from torch import fx
from torch.export import ExportedProgram

from tpcompiler.ir import edit
from tpcompiler.ir.control_flow import all_calls
from tpcompiler.ir.dim_sharding import DimSharding, apportion, chunk, divides
from tpcompiler.ir.draws import draws
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers
from tpcompiler.ir.node_placement import placement_of
from tpcompiler.ir.placements import describe_sharding
from tpcompiler.ir.program import BOTH, Note, PlacedProgram, PlannedProgram, tied
from tpcompiler.ir.text import op_name, value_text
from tpcompiler.runtime.pt2 import has_pickled_examples
from tpcompiler.terminal.printed import format_bytes


def notes_of(program: PlacedProgram) -> tuple[Note, ...]:
    """Return the notes that follow from the marks and the source program.

    They report idle axes, random ops, conds with both branches computed, leaves sharded unevenly or in a special way,
    and example inputs that are not written.
    """
    both = (Note("both", node.meta[BOTH]) for node in program.graph.nodes if BOTH in node.meta)
    return (*_idle(program), *_random(program.graph), *both, *_cuts(program), *_examples(program.source))


def _idle(program: PlacedProgram) -> tuple[Note, ...]:
    """Note the axes over which no value is sharded or pending, and how to shard a batch over them."""
    mesh = program.mesh
    marks = (placement_of(node) for node in program.graph.nodes if node.op != "output")
    active = {axis for mark in marks for each in (*mark.shardings, *mark.wants) for axis in each.axes}
    batch = next((node.name for node in program.user_inputs() if edit.ndim(node)), None)
    texts = []
    for axis in mesh.names:
        if mesh.degree(axis) > 1 and axis not in active:
            alike = f"ranks that differ in {axis} alone compute the same"
            how = f'; to cut the batch, inputs={{"{batch}": {{"{axis}": "S(0)"}}}}, or --input {batch}={axis}:S(0)'
            cuts_batch = batch is not None and axis != mesh.model_axis
            texts.append(f"{axis}={mesh.degree(axis)}: {alike}{how if cuts_batch else ''}")
    return tuple(Note("idle", text) for text in texts)


def _random(graph: fx.Graph) -> tuple[Note, ...]:
    """Note how the ranks must be seeded to draw the same numbers."""
    drawing = Counter(op_name(node) for node in all_calls(graph) if draws(node))
    ops = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in drawing.items())
    return (Note("random", f"{ops}: seed every rank alike, torch.manual_seed"),) if drawing else ()


def _examples(source: ExportedProgram) -> tuple[Note, ...]:
    if source.example_inputs is None or not has_pickled_examples(source):
        return ()
    return (Note("examples", "the written programs have none: a file could hold these only as a pickle"),)


def _cuts(program: PlacedProgram) -> tuple[Note, ...]:
    """Note leaves in parts, blocks or units, and the excess of an uneven cut's largest share; layers fold to `*`."""
    mesh, first_of = program.mesh, tied(program)
    counts: Counter[str] = Counter()
    for leaf, fqn in program.leaves():
        sharding, value = placement_of(leaf).shardings[0], edit.fake(leaf)
        if first_of[leaf.name] != leaf.name:
            continue
        phrases = []
        if not all(cut.is_plain for cut in sharding.dims):
            text = sharding.text(mesh)
            phrases.append(f"{text} ({describe_sharding(text, mesh)})")
        phrases += [
            f"dim {dim}'s {text}" for dim, cut in enumerate(sharding.dims) for text in _dealt(cut, value, dim, mesh)
        ]
        if value.numel() and not mesh.is_unequal(sharding.axes) and not sharding.is_even(value.shape, mesh):
            sizes = [sharding.local_bytes(value.shape, value.itemsize, mesh, rank) for rank in range(mesh.world_size)]
            phrases.append(f"the largest share is {max(sizes) * len(sizes) / sum(sizes):.2f} times an even one")
        if phrases:
            counts[f"{fold_layers(fqn)}: {', '.join(phrases)}"] += 1
    return _counted("cut", counts)


def shared_leaves(asked: PlannedProgram, program: PlacedProgram) -> tuple[Note, ...]:
    """Note planned leaves that fewer ranks shard than the plan requested: the remaining ranks hold copies."""
    counts: Counter[str] = Counter()
    for leaf, fqn in program.leaves():
        if constraint := asked.fixed(leaf):
            wanted = asked.mesh.size(constraint.sharding.cut_axes)
            times = wanted // program.mesh.size(placement_of(leaf).shardings[0].cut_axes)
            if times > 1:
                counts[f"{fold_layers(fqn)}: {times} ranks hold the same share"] += 1
    return _counted("shared", counts)


def whole_leaves(asked: PlannedProgram, program: PlacedProgram) -> tuple[Note, ...]:
    """Note matrices that stay whole in layers that a style shards, such as scales looked up by group."""
    counts: Counter[str] = Counter()
    for leaf, fqn in program.leaves():
        value = edit.fake(leaf)
        is_matrix = sum(size != 1 for size in value.shape) > 1 and leaf.users
        constraint = asked.constraints.get(leaf.name)
        is_whole = is_matrix and placement_of(leaf).shardings[0].is_replicated
        if constraint is not None and constraint.request is None and is_whole:
            counts[
                f"{fold_layers(fqn)}: {value_text(value)}, {format_bytes(value.numel() * value.element_size())}"
            ] += 1
    return _counted("whole", counts)


def _dealt(cut: DimSharding, value: torch.Tensor, dim: int, mesh: Mesh) -> Iterator[str]:
    """Yield the shares of whole units that come nearest to those of an unequal axis, where they are not the same."""
    for size, how in cut.parts or ((value.shape[dim], cut),):
        piece = size
        for axis, block, unit in how.levels:
            piece, shares = block or piece, mesh.deals(axis)
            if isinstance(shares, tuple) and not divides(piece, mesh.pieces(axis) * unit):
                counts, units = apportion(piece // unit, shares), f"units of {unit}" if unit > 1 else "elements"
                yield f"{piece // unit} {units} are dealt {':'.join(map(str, counts))}, the nearest to {mesh}"
            piece = chunk(piece, shares, 0, unit)[1]


def _counted(kind: Literal["cut", "shared", "whole"], texts: Counter[str]) -> tuple[Note, ...]:
    """Make a note of each text, with the number of leaves that have it."""
    return tuple(Note(kind, f"{text} (x {count})" if count > 1 else text) for text, count in texts.items())
