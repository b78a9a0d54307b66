"""The text form of an artifact: for terminals and for diffs."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tpcompiler.views.items import Item, seen_from
from tpcompiler.views.outline import Group, counted, outline_of, wire

GUTTER = 14  # wide enough for `P(sum) -> S(1)` on one axis, so that changes of sharding are easy to find


def artifact_text(directory: str | os.PathLike[str], rank: int = 0) -> str:
    """Ops, shardings and collectives by module, repeated layers once; shapes of values are local, of weights global.

    Raises:
        ArtifactError: no artifact, a damaged one, or a rank outside its world.
    """
    outline = outline_of(directory, rank)
    manifest = outline.manifest
    lines = [
        f"mesh {outline.mesh}, rank {rank} of {manifest.world_size}",
        f"parameter bytes: {outline.bytes_here:,} of {outline.bytes_whole:,}",
        f"per call: {counted(manifest.collectives)}; {wire(manifest.collectives):,} wire bytes",
        "",
        *_rows(outline.root, 0),
    ]
    return "\n".join(lines) + "\n"


def _rows(group: Group, depth: int) -> Iterator[str]:
    for member in group.members:
        if isinstance(member, Item):
            yield f"{member.sharding:{GUTTER}}{'  ' * depth}{_item(member, group.path)}"
            continue
        title = seen_from(group.path, member.title)
        if member.count > 1:
            records = member.records()
            title += f"  each: {counted(records)}; {wire(records):,} wire bytes"
        yield " " * GUTTER + "  " * depth + title
        yield from _rows(member, depth + 1)


def _item(item: Item, path: str) -> str:
    record = item.record
    name = seen_from(path, item.module) if item.kind in ("op", "collective") else item.kind
    what = item.label + (f" ({', '.join(item.detail)})" if item.detail else "")
    parts = [name, what, item.value]
    if item.leaves:
        leaves = (f"{leaf.named_in(path, item.module)} {leaf.sharding} {leaf.shape}" for leaf in item.leaves)
        parts.append(", ".join(leaves))
    if record is not None:
        parts.append(f"{record['payload_bytes']:,} bytes over {record['axis']}, {record['wire_bytes']:,} on the wire")
        if record["why"] != "inherent":
            parts.append(f"{record['why']}: {record['reason']}")
    return "  ".join(filter(None, parts))
