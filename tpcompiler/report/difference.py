"""Differences between two artifacts of one model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

from msgspec import structs

from tpcompiler.artifact.collective_records import predict_call, sent_seconds
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.artifact.summary import add_up
from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.cost.machine import Machine
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.cost.timeline import StepTime, duration
from tpcompiler.errors import ArtifactError
from tpcompiler.ir import edit
from tpcompiler.ir.names import fold_names, times
from tpcompiler.ir.shares import mesh_of
from tpcompiler.ir.text import op_name
from tpcompiler.report.outline import wire
from tpcompiler.report.written import Written
from tpcompiler.runtime.artifact import MODEL, Manifest
from tpcompiler.runtime.records import PlacedRecord, Record, mesh_text
from tpcompiler.terminal.printed import format_microseconds, format_unequal_bytes
from tpcompiler.terminal.tables import Part, Shown, Table


class Placement(Record, frozen=True):
    """A parameter, a buffer, an input or an output that is placed differently in the second artifact."""

    name: str  # its FQN, or the argument's, or the output's
    what: str  # the kind of parameter, or `input` or `output`
    first: str  # its sharding in the first
    second: str  # its sharding in the second


class Traffic(Record, frozen=True):
    """Collectives of one kind and cause in a module that differ in number or bytes."""

    module: str  # the layer
    kind: str  # `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`
    why: str  # `inherent`, `plan-demanded` or `fallback`
    first: tuple[int, int]  # their number, and their wire bytes of a call and rank, in the first
    second: tuple[int, int]  # likewise in the second


class ArtifactDifference(Record, Shown, frozen=True, kw_only=True):
    """The differences between two artifacts, and their totals."""

    equal: bool  # true if nothing differs
    machine: str  # whose seconds are meant
    meshes: tuple[
        dict[str, int | list[int]], dict[str, int | list[int]]
    ]  # of the first and of the second, as of all pairs here
    device_types: tuple[str, str]  # "cpu" or "cuda"
    placements: list[Placement]  # those that differ
    collectives: list[Traffic]  # those that differ in number or bytes
    wire_bytes: tuple[int, int]  # of one call, of a rank
    held_bytes: tuple[list[int], list[int]]  # of parameters, buffers and constants, by rank
    sent_seconds: tuple[float, float]  # of one call's collectives on the machine, one after the other
    steps: tuple[StepTime, StepTime]  # of the whole call

    def totals(self) -> list[tuple[str, str, str]]:
        """Return rows of text: the name of a total, its value in the first artifact and in the second."""
        axes = [mesh_text(mesh) for mesh in self.meshes]
        held = format_unequal_bytes(*map(max, self.held_bytes))
        sent = format_unequal_bytes(*self.wire_bytes)
        microseconds = [format_microseconds(seconds) for seconds in self.sent_seconds]
        return [
            ("mesh", axes[0], axes[1]),
            ("device", *self.device_types),
            ("held by the rank that holds most", held[0], held[1]),
            ("sent by a rank in a call", sent[0], sent[1]),
            (f"us of the collectives on {self.machine}", microseconds[0], microseconds[1]),
            (f"one call on {self.machine}", duration(self.steps[0].total), duration(self.steps[1].total)),
        ]

    def placements_alike(self) -> list[tuple[str, list[str], Placement]]:
        """Fold placements of repeated layers into rows: the pattern of the names, the names, the first placement."""
        named = {each.name: each for each in self.placements}
        alike = fold_names({name: structs.astuple(each)[1:] for name, each in named.items()})
        return [(pattern, names, named[names[0]]) for pattern, names in alike]

    def collectives_alike(self) -> list[tuple[str, list[str], Traffic]]:
        """Fold collectives of repeated layers into rows: the pattern of the modules, the modules, the first traffic."""
        of_module: dict[str, list[Traffic]] = defaultdict(list)
        for each in self.collectives:
            of_module[each.module].append(each)
        alike = fold_names(
            {module: tuple(structs.astuple(each)[1:] for each in found) for module, found in of_module.items()}
        )
        return [(pattern, modules, each) for pattern, modules in alike for each in of_module[modules[0]]]

    def parts(self) -> Iterator[Part]:
        if self.equal:
            yield "equal: the same mesh, placements, collectives and bytes (weights are not compared)"
            return
        yield Table("in all", ("", "first", "second"), self.totals())
        placed = [
            (pattern, each.what, each.first, each.second, times(names))
            for pattern, names, each in self.placements_alike()
        ]
        yield Table("placements that differ", ("name", "kind", "first", "second", ""), placed)
        traffic = []
        for pattern, modules, each in self.collectives_alike():
            (count, sent), (count_after, sent_after) = each.first, each.second
            pairs = f"{count:,} -> {count_after:,}", " -> ".join(format_unequal_bytes(sent, sent_after))
            traffic.append((pattern, each.kind, each.why, *pairs, times(modules)))
        headers = ("module", "kind", "why", "count", "wire bytes", "")
        yield Table("collectives that differ, in each module", headers, traffic)


def find_differences(
    first: ArtifactProgram, second: ArtifactProgram, machine: str | os.PathLike[str] | None = None
) -> ArtifactDifference:
    """Compare how two artifacts of one model are placed, and what they send and hold (`ParallelProgram.diff`).

    Raises:
        ArtifactError: a file is damaged or, without trust, could run code; or the artifacts are of two models.
        MachineError: the description of the machine cannot be read.
    """
    both = first.manifest, second.manifest
    name = both[0].asked.machine
    here, there = (machine_of(structs.replace(each.asked, machine=name), machine) for each in both)
    _refuse_other_model((first, second))
    a, b = both
    placed, sent = (_placements(a), _placements(b)), (_traffic(a), _traffic(b))
    placements = [
        Placement(name, what, placed[0][what, name], placed[1][what, name])
        for what, name in placed[0]
        if placed[0][what, name] != placed[1][what, name]
    ]
    traffic = (Traffic(*key, *(each.get(key, (0, 0)) for each in sent)) for key in {**sent[0], **sent[1]})
    collectives = [each for each in traffic if each.first != each.second]
    meshes, device_types = (a.mesh, b.mesh), (a.device_type, b.device_type)
    wire_bytes, held_bytes = (wire(a.collectives), wire(b.collectives)), (held_per_rank(a), held_per_rank(b))
    pairs = (meshes, device_types, wire_bytes, held_bytes)
    return ArtifactDifference(
        equal=not placements and not collectives and all(first == second for first, second in pairs),
        machine=here.name,
        meshes=meshes,
        device_types=device_types,
        placements=placements,
        collectives=collectives,
        wire_bytes=wire_bytes,
        held_bytes=held_bytes,
        sent_seconds=(
            sent_seconds(a.collectives, here, mesh_of(a)),
            sent_seconds(b.collectives, there, mesh_of(b)),
        ),
        steps=(_step(first, here), _step(second, there)),
    )


def _step(program: ArtifactProgram, machine: Machine) -> StepTime:
    written = Written.of(program)
    return predict_call(written.graph, written.manifest, machine).total


def _refuse_other_model(both: tuple[ArtifactProgram, ArtifactProgram]) -> None:
    described = [_described(program.manifest) for program in both]
    names = [name for name in {**described[0], **described[1]} if described[0].get(name) != described[1].get(name)]
    files = [program.manifest.files.get(MODEL) for program in both]
    if not names and (None in files or files[0] != files[1]):
        graphs = [program.original().graph for program in both]
        described = [{f"call '{node.name}'": op_name(node) for node in edit.calls(graph)} for graph in graphs]
        names = [name for name in {**described[0], **described[1]} if described[0].get(name) != described[1].get(name)]
    if names:
        said = " and ".join(
            f"{each.get(names[0], 'none')} in {program.title}" for each, program in zip(described, both, strict=True)
        )
        raise ArtifactError(f"two models: {names[0]} is {said}", help="compare artifacts that are made of one model")


def _described(manifest: Manifest) -> dict[str, str]:
    """Describe a model's inputs, leaves and outputs; a dynamic size is `*`, since a divided size has another symbol."""
    return {f"{what} '{row.name}'": f"{row.dtype}[{', '.join(map(_size, row.shape))}]" for what, row in _rows(manifest)}


def _rows(manifest: Manifest) -> Iterator[tuple[str, PlacedRecord]]:
    """Tensors, inputs and outputs, each with its kind."""
    yield from ((row.kind, row) for row in manifest.tensors)
    yield from (("input", row) for row in manifest.inputs)
    yield from (("output", row) for row in manifest.outputs)


def _size(size: int | str) -> str:
    return str(size) if isinstance(size, int) else "*"


def _placements(manifest: Manifest) -> dict[tuple[str, str], str]:
    return {(what, row.name): row.sharding for what, row in _rows(manifest)}


def _traffic(manifest: Manifest) -> dict[tuple[str, str, str], tuple[int, int]]:
    totals = add_up(manifest.collectives, lambda row: (row.module, row.kind, row.why))
    return {key: (count, sent) for key, (count, _, sent) in totals.items()}
