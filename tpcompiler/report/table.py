"""The text form of an artifact, for terminals and diffs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.errors import one_line
from tpcompiler.report.items import Item, seen_from
from tpcompiler.report.outline import Group, counted, outline_of, wire
from tpcompiler.runtime.records import Collective, Record
from tpcompiler.terminal.printed import format_bytes

GUTTER = 14  # wide enough for `P(sum) -> S(1)` on one axis, so that changes of sharding stand out
WIDEST = 44  # longer shardings may overlap the next column


class ProgramItem(Record, frozen=True, kw_only=True):
    """An input, an op, a collective or an output of a rank's program."""

    name: str  # of the first node that it stands for
    kind: Literal["input", "op", "collective", "gone", "output"]  # of the item
    ops: list[str]  # the ops that it stands for
    module: str  # the layer
    sharding: str  # of the value that it makes; of a collective the change
    value: str  # dtype and local shape
    sources: list[str]  # the items that it reads
    tensors: list[str]  # the parameters, buffers and constants that it reads
    writes: list[str]  # the buffers and inputs that its value is written back to
    collective: Collective | None  # its record
    note: str  # the reason, and the line of code


class RankProgram(Record, frozen=True, kw_only=True):
    """The program of a rank."""

    mesh: dict[str, int | list[int]]  # axis -> degree, or the unequal shares of its ranks
    rank: int  # whose program it is
    bytes: int  # of parameters, buffers and constants on one device
    bytes_here: int  # the same on this rank
    items: list[ProgramItem]  # inputs, ops, collectives and outputs, in order


def artifact_text(program: ArtifactProgram, rank: int = 0) -> str:
    """Return ops, shardings and collectives by module, repeated layers once.

    Shapes of values are local, those of weights global.

    Raises:
        ArtifactError: the artifact is missing or damaged, or the rank is outside its world.
    """
    outline = outline_of(program, rank)
    manifest, widest = outline.manifest, _widest(outline.root)
    lines = [
        f"mesh {outline.mesh}, rank {rank} of {manifest.world_size}",
        f"parameters: {format_bytes(outline.bytes_here)} of {format_bytes(outline.bytes_whole)}",
        f"per call: {counted(manifest.collectives)}; {format_bytes(wire(manifest.collectives))} on the wire",
        "",
        *_rows(outline.root, 0, GUTTER if widest <= GUTTER else min(widest + 2, WIDEST)),
    ]
    return "\n".join(map(one_line, lines)) + "\n"


def artifact_rows(program: ArtifactProgram, rank: int = 0) -> RankProgram:
    """Return the content of `artifact_text` as data: every op, input, output and collective in order, in all layers.

    Raises:
        ArtifactError: as `artifact_text`.
    """
    outline = outline_of(program, rank)
    return RankProgram(
        mesh=outline.manifest.mesh,
        rank=rank,
        bytes=outline.bytes_whole,
        bytes_here=outline.bytes_here,
        items=[
            ProgramItem(
                name=item.name,
                kind=item.kind,
                ops=list(item.ops),
                module=item.module,
                sharding=item.sharding,
                value=item.value,
                sources=list(item.sources),
                tensors=[leaf.name for leaf in item.leaves],
                writes=[leaf.name for leaf in item.writes],
                collective=item.record,
                note=item.note,
            )
            for item in outline.items
        ],
    )


def _widest(group: Group) -> int:
    return max((len(m.sharding) if isinstance(m, Item) else _widest(m) for m in group.members), default=0)


def _rows(group: Group, depth: int, gutter: int) -> Iterator[str]:
    for member in group.members:
        if isinstance(member, Item):
            gap = "  " * (len(member.sharding) >= gutter > GUTTER)
            yield f"{member.sharding:{gutter}}{gap}{'  ' * depth}{_item(member, group.path)}"
            continue
        title = seen_from(group.path, member.title)
        if member.count > 1:
            records = member.records()
            title += f"  each: {counted(records)}; {format_bytes(wire(records))} on the wire"
        yield " " * gutter + "  " * depth + title
        yield from _rows(member, depth + 1, gutter)


def _item(item: Item, path: str) -> str:
    record = item.record
    name = seen_from(path, item.module) if item.kind in ("op", "collective") else item.kind
    what = item.label + (f" ({', '.join(item.detail)})" if item.detail else "")
    parts = [name, what, item.value]
    if item.leaves:
        leaves = (f"{leaf.named_in(path, item.module)} {leaf.sharding} {leaf.shape}" for leaf in item.leaves)
        parts.append(", ".join(leaves))
    if item.writes:
        parts.append(f"writes {', '.join(leaf.named_in(path, item.module) for leaf in item.writes)}")
    if record is not None:
        payload, sent = map(format_bytes, (record.payload_bytes, record.wire_bytes))
        parts.append(f"{payload} over {record.axis}, {sent} on the wire")
        if record.why != "inherent":
            parts.append(f"{record.why}: {record.reason}")
    return "  ".join(filter(None, parts))
