"""Bytes and seconds of a handover, by pair of ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec

from tpcompiler.artifact.handover import Programs, find_handover
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.errors import ArtifactError, reason
from tpcompiler.runtime.handover import Handover, Move
from tpcompiler.runtime.records import Record
from tpcompiler.runtime.target import replacing
from tpcompiler.runtime.weights import dtype_of
from tpcompiler.terminal.printed import format_bytes, format_microseconds
from tpcompiler.terminal.tables import Part, Shown, Table


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
        try:
            with replacing(Path(path)) as file:
                file.write_bytes(msgspec.json.format(msgspec.json.encode(self.handover), indent=1) + b"\n")
        except OSError as error:
            raise ArtifactError(f"cannot write {os.fspath(path)}: {reason(error)}", help="check the path") from error


def price_handover(
    source: Programs, target: Programs, machine: str | os.PathLike[str] | None = None, *, weights: bool = False
) -> HandoverTable:
    """Find the handover between two artifacts (`find_handover`), and price it.

    Raises:
        ArtifactError: as `find_handover`.
        MachineError: the machine is unknown or faulty.
    """
    made = find_handover(source, target, weights=weights)
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
