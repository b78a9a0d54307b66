"""Find the parts of tensors that ranks of one artifact send to those of another, prove that all arrive, price it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy

from tpcompiler._torch import WRITTEN_KINDS
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.errors import ArtifactError, InternalError, UnsupportedError, explaining
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.runtime.handover import HandedTensor, Handover, Move
from tpcompiler.runtime.records import Record, TensorRecord
from tpcompiler.runtime.target import replacing
from tpcompiler.runtime.weights import dtype_of
from tpcompiler.terminal.printed import format_bytes, format_microseconds
from tpcompiler.terminal.tables import Part, Shown, Table

Programs = Mapping[str, ArtifactProgram]
MESSAGE = 1_000_000  # bytes that a link sends in about the time that a message costs whatever its length
Runs = tuple[tuple[range, ...], ...]  # the elements that a rank holds, in each dim
Pair = tuple[TensorRecord, TensorRecord]  # a tensor as the source has it, and as the target does


class SentBytes(Record, frozen=True):
    """The bytes that one rank of the source sends to one of the target, in one message."""

    source: int  # the rank that sends
    target: int  # the rank that receives
    parts: int  # of tensors
    bytes: int  # of all of them


class HandoverTable(Record, Shown, frozen=True):
    """A handover of buffers or weights, and what it costs."""

    handover: Handover  # the parts
    sent: list[SentBytes]  # by receiver and sender
    bytes: int  # of all parts
    machine: str  # whose seconds are meant
    seconds: float  # until the busiest rank has sent or received all of its bytes

    def parts(self) -> Iterator[Part]:
        made = self.handover
        yield (
            f"{made.source_ranks} ranks hand {len(made.tensors)} tensors to {made.target_ranks} ranks: "
            f"{format_bytes(self.bytes)}, {format_microseconds(self.seconds)} us on {self.machine}"
        )
        yield ""
        alike: Counter[tuple[str, str, str, str]] = Counter()
        for each in made.tensors.values():
            alike[str(each.shape), each.dtype, each.source_sharding, each.target_sharding] += 1
        rows = [(str(count), *key) for key, count in alike.items()]
        yield Table("tensors", ("count", "shape", "dtype", "on the source", "on the target"), rows)
        pairs = [(str(e.source), str(e.target), str(e.parts), format_bytes(e.bytes)) for e in self.sent]
        headers = ("from rank", "to rank", "parts", "bytes")
        yield Table("messages", headers, pairs, right=headers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parts as JSON, for `tpcompiler.join_handover`.

        Raises:
            ArtifactError: the file cannot be written.
        """
        with explaining(f"cannot write {os.fspath(path)}", "check the path"), replacing(Path(path)) as file:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(self.handover), indent=1) + b"\n")


def price_handover(
    source: Programs, target: Programs, machine: str | os.PathLike[str] | None = None, *, weights: bool = False
) -> HandoverTable:
    """Find the handover between two artifacts (`_find_handover`), and price it.

    Raises:
        ArtifactError: as `_find_handover`.
        MachineError: the machine is unknown or faulty.
    """
    made = _find_handover(source, target, weights=weights)
    on = machine_of(next(iter(source.values())).manifest.asked, machine)
    parts, sent, busy = Counter[tuple[int, int]](), Counter[tuple[int, int]](), Counter[tuple[str, int]]()
    for move in made.moves:
        count = _bytes(made, move)
        parts[move.target, move.source] += 1
        sent[move.target, move.source] += count
        busy["source", move.source] += count
        busy["target", move.target] += count
    return HandoverTable(
        handover=made,
        sent=[SentBytes(source=s, target=t, parts=parts[t, s], bytes=sent[t, s]) for t, s in sorted(sent)],
        bytes=sum(sent.values()),
        machine=on.name,
        seconds=on.transfer_seconds(max(busy.values(), default=0)),
    )


def _bytes(made: Handover, move: Move) -> int:
    itemsize = dtype_of(made.tensors[move.tensor].dtype).itemsize
    return prod(stop - start for start, stop in move.source_slice) * itemsize


def _find_handover(source: Programs, target: Programs, *, weights: bool = False) -> Handover:
    """Return the parts of the buffers that the source's programs write, from its ranks to those of the target.

    Of ranks that hold equal shares, the one that has sent the fewest bytes sends the next part. All parts from one rank
    to another are one message, which counts as `MESSAGE` bytes more.

    Args:
        weights: of the target's parameters instead, and of its persistent buffers that the source writes, such as
            running statistics, in the target's dtype. One side may have them in a module more, as a model with its
            loss: `model.lm_head.weight` for `lm_head.weight`.

    Raises:
        ArtifactError: the source writes no buffer, or one side lacks a tensor or has it with another shape or dtype.
        UnsupportedError: the programs of a side run over different ranks, as stages do.
    """
    meshes = [_mesh(programs) for programs in (source, target)]
    pairs = _weights(source, target) if weights else _caches(source, target)
    tensors: dict[str, HandedTensor] = {}
    sides: list[tuple[TensorRecord, list[Runs], list[Runs]]] = []
    for row, other in pairs:
        tensors[other.name] = HandedTensor(
            shape=list(other.shape),
            dtype=other.dtype,
            source_sharding=row.sharding,
            target_sharding=other.sharding,
            source_name=row.name if row.name != other.name else None,
        )
        sides.append((other, _runs(row, meshes[0]), _runs(other, meshes[1])))
    sides.sort(key=lambda each: -len({*each[1]}))  # first those with one holder for each share
    sent = Counter[tuple[int, int]]()
    moves = [move for each in sides for move in _moves(*each, sent)]
    moves.sort(key=lambda move: (move.target, move.source))
    made = Handover(source_ranks=meshes[0].world_size, target_ranks=meshes[1].world_size, tensors=tensors, moves=moves)
    if wrong := find_wrong_move(made, source, target):
        raise InternalError(f"the handover is not sound: {wrong}", help="report this with both artifacts")
    return made


def find_wrong_move(handover: Handover, source: Programs, target: Programs) -> str:
    """Return what is wrong with a handover, or "": each element of each target share must come once, from its place."""
    rows = _rows(target, "parameter")
    pairs = _weights(source, target) if handover.tensors.keys() & rows.keys() else _caches(source, target)
    arriving: dict[tuple[str, int], list[Move]] = {}
    for move in handover.moves:
        arriving.setdefault((move.tensor, move.target), []).append(move)
    for row, other in pairs:
        sides = (row, _mesh(source)), (other, _mesh(target))
        sent, wanted = ([*map(_elements, _runs(each, mesh))] for each, mesh in sides)
        for rank, own in enumerate(wanted):
            count = numpy.zeros([len(dim) for dim in own], numpy.int64)
            for move in arriving.pop((other.name, rank), ()):
                here, there = _part(own, move.target_slice), _part(sent[move.source], move.source_slice)
                if not all(map(numpy.array_equal, here, there)):
                    return f"rank {move.source} sends rank {rank} other elements of {other.name!r} than it holds"
                count[tuple(slice(*dim) for dim in move.target_slice)] += 1
            if (count != 1).any():
                return f"rank {rank} gets elements of {other.name!r} {count.min()} to {count.max()} times, and not once"
    return f"rank {next(iter(arriving))[1]} holds no {next(iter(arriving))[0]!r}, and gets some" if arriving else ""


def _caches(source: Programs, target: Programs) -> list[Pair]:
    written, held = _written_buffers(source), _rows(target, "buffer")
    if not written:
        raise ArtifactError(
            f"{_title(source)} writes no buffer: there is nothing to hand over",
            help="export the model with a static cache (tpcompiler export --prefill-decode)",
        )
    for name, row in written.items():
        other = held.get(name)
        if other is None or (other.shape, other.dtype) != (row.shape, row.dtype):
            lacks = "has none" if other is None else f"has it as {other.dtype}{other.shape}"
            raise ArtifactError(
                f"{_title(source)} writes {name!r}, {row.dtype}{row.shape}, and {_title(target)} {lacks}",
                help="convert both from one model, exported with the same batch and cache",
            )
    return [(row, held[name]) for name, row in written.items()]


def _weights(source: Programs, target: Programs) -> list[Pair]:
    held = {row.name: row for program in source.values() for row in program.manifest.tensors}
    wanted = {name: row for name, row in _rows(target, "parameter").items() if row.tied_to is None}
    if not wanted:
        raise ArtifactError(
            f"{_title(target)} has no parameter: there is nothing to hand over", help="look for buffers"
        )
    first = next(iter(wanted))
    modules = {("", "")}  # around all of the source's, and of the target's
    modules |= {(name.removesuffix(first), "") for name in held if name.endswith(f".{first}")}
    modules |= {("", first.removesuffix(name)) for name in held if first.endswith(f".{name}")}
    tried = {each: _pairs(held, wanted, *each) for each in sorted(modules)}
    if whole := [each for each in tried if len(tried[each]) == len(wanted)]:
        if len(whole) > 1 and whole[0] != ("", ""):
            names = " or ".join(repr(tried[each][0][0].name) for each in whole)
            raise ArtifactError(
                f"{_title(target)} holds {first!r}, which may be {names} of {_title(source)}",
                help="give both sides the same names",
            )
        return [*tried[whole[0]], *_statistics(source, target, *whole[0])]
    nearest = max(tried, key=lambda each: len(tried[each]))
    found = {other.name for _, other in tried[nearest]}
    name, other = next((name, row) for name, row in wanted.items() if name not in found)
    row = held.get(nearest[0] + name.removeprefix(nearest[1]))
    lacks = "has none" if row is None else f"has it as {row.shape}"
    raise ArtifactError(
        f"{_title(target)} holds {name!r}, {other.dtype}{other.shape}, and {_title(source)} {lacks}",
        help="convert both from one model",
    )


def _pairs(held: Mapping[str, TensorRecord], wanted: Mapping[str, TensorRecord], more: str, less: str) -> list[Pair]:
    """Return the parameters that both sides have; the source's names begin with `more`, the target's with `less`."""
    named = ((held.get(more + name.removeprefix(less)), row) for name, row in wanted.items() if name.startswith(less))
    return [(held[own.holder], row) for own, row in named if own is not None and own.shape == row.shape]


def _statistics(source: Programs, target: Programs, more: str, less: str) -> list[Pair]:
    """Return the persistent buffers that the source writes and the target has, named as in `_pairs`.

    Raises:
        ArtifactError: one has another shape there.
    """
    written, held = _written_buffers(source, persistent=True), _rows(target, "buffer")
    named = {less + name.removeprefix(more): row for name, row in written.items() if name.startswith(more)}
    for name in sorted(named.keys() & held.keys()):
        if (own := named[name]).shape != (other := held[name]).shape:
            raise ArtifactError(
                f"{_title(source)} writes {own.name!r}, {own.dtype}{own.shape}, and {_title(target)} has it as "
                f"{other.shape}",
                help="convert both from one model",
            )
    return [(row, held[name]) for name, row in named.items() if name in held]


def _elements(held: Runs) -> list[Any]:
    """Return the place in the whole tensor of each element of a share, dim by dim."""
    return [numpy.array([at for run in dim for at in run], numpy.int64) for dim in held]


def _part(elements: Sequence[Any], where: Sequence[Sequence[int]]) -> list[Any]:
    return [dim[slice(*each)] for dim, each in zip(elements, where, strict=True)]


def _moves(
    row: TensorRecord, source: Sequence[Runs], target: Sequence[Runs], sent: Counter[tuple[int, int]]
) -> Iterator[Move]:
    """Yield the moves of one tensor; `sent` counts the bytes of each pair of ranks."""
    holders: dict[Runs, list[int]] = {}
    for rank, held in enumerate(source):
        holders.setdefault(held, []).append(rank)
    itemsize = dtype_of(row.dtype).itemsize
    for rank, wanted in enumerate(target):
        for held, ranks in holders.items():
            for parts in product(*map(_common, held, wanted)):
                sender = min(ranks, key=lambda each: _busy(each, rank, sent))
                sent[sender, rank] += prod(stop - start for (start, stop), _ in parts) * itemsize
                yield Move(
                    tensor=row.name,
                    source=sender,
                    source_slice=[list(own) for own, _ in parts],
                    target=rank,
                    target_slice=[list(other) for _, other in parts],
                )


def _busy(sender: int, target: int, sent: Mapping[tuple[int, int], int]) -> int:
    pairs = {pair for pair in sent if pair[0] == sender}
    return sum(sent[pair] for pair in pairs) + len(pairs | {(sender, target)}) * MESSAGE


def _common(held: Sequence[range], wanted: Sequence[range]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the elements of a dim that are in both, as (start, stop) in one share and in the other."""
    found, here = [], 0
    for own in held:
        there = 0
        for other in wanted:
            start, stop = max(own.start, other.start), min(own.stop, other.stop)
            if start < stop:
                first, second = here + start - own.start, there + start - other.start
                found.append(((first, first + stop - start), (second, second + stop - start)))
            there += len(other)
        here += len(own)
    return found


def _runs(row: TensorRecord, mesh: Mesh) -> list[Runs]:
    """Return the elements that each rank holds of a tensor; of a pending sum, the first rank has all."""
    sharding, ranks = row_sharding(row, mesh), [*map(mesh.coordinate, range(mesh.world_size))]
    dims = list(zip(sharding.dims, row.shape, strict=True))
    return [
        tuple(
            () if any(here[axis] for axis, _ in sharding.partial) else tuple(by.runs(size, mesh, here))
            for by, size in dims
        )
        for here in ranks
    ]


def _written_buffers(programs: Programs, *, persistent: bool = False) -> dict[str, TensorRecord]:
    signatures = [program.graph(0).graph_signature for program in programs.values()]
    names = {str(spec.target) for own in signatures for spec in own.output_specs if spec.kind in WRITTEN_KINDS}
    if persistent:
        names = names.difference(*(own.non_persistent_buffers for own in signatures))
    return {name: row for name, row in _rows(programs, "buffer").items() if name in names}


def _rows(programs: Programs, kind: str) -> dict[str, TensorRecord]:
    rows = [row for program in programs.values() for row in program.manifest.tensors]
    return {row.name: row for row in rows if row.kind == kind}


def _mesh(programs: Programs) -> Mesh:
    first, *others = (program.manifest for program in programs.values())
    if first.stage is not None or any((each.mesh, each.factors) != (first.mesh, first.factors) for each in others):
        raise UnsupportedError(
            f"the programs of {_title(programs)} run over different ranks",
            help="hand over between artifacts whose programs all run over all ranks",
        )
    return mesh_of(first)


def _title(programs: Programs) -> str:
    return next(iter(programs.values())).title
