"""The content of an artifact's page, as one JSON object."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from msgspec import to_builtins

from tpcompiler.artifact.collective_records import predict_call
from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.artifact.summary import add_up
from tpcompiler.checkpoint.leaves import held_per_rank
from tpcompiler.cost.machine_file import machine_of
from tpcompiler.cost.timeline import Times
from tpcompiler.errors import ShardingError, one_line
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import fold_layers, layer_around
from tpcompiler.ir.placements import describe_sharding
from tpcompiler.ir.sharding import Sharding
from tpcompiler.ir.shares import mesh_of, read_sharding, row_sharding
from tpcompiler.report.items import Item, color_of, numbered, seen_from
from tpcompiler.report.outline import Group, Outline, counted, legend_of, outline_of, sent, wire
from tpcompiler.report.slices import Slices, slices_of
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import Collective

NO_ADVICE: Mapping[str, str] = MappingProxyType({})
UNCOUNTED = "torch's counter does not know the op, or its sizes or rounds depend on values"

Row = TypeVar("Row")


def page_data(
    program: ArtifactProgram,
    rank: int = 0,
    *,
    first: ArtifactProgram | None = None,
    machine: str | os.PathLike[str] | None = None,
    advice: Mapping[str, str] = NO_ADVICE,
) -> dict[str, Any]:
    """Return the content of the page; rows refer to each other by index.

    With `first`, another artifact of the same model, rows also have their former state (`was`, `before`, `differs`),
    and `gone` lists its collectives without a counterpart. `advice`: reshard name -> the change of the plan that avoids
    the fallback.

    Raises:
        ArtifactError: the artifact is missing or damaged, or the rank is outside its world.
        MachineError: the description of the machine cannot be read.
    """
    outline = outline_of(program, rank, first=first)
    described = machine_of(outline.manifest.asked, machine)
    manifest, mesh = outline.manifest, mesh_of(outline.manifest)
    names = [item.name for item in outline.items if item.record is not None]
    times = predict_call(outline.program.graph, manifest, described)
    classes = program.classes()
    slices = _Slices(mesh, alike=len(classes) == 1)
    items = list(outline.root.items())
    place = {item.name: at for at, item in enumerate(items)}
    tensors = {row.name: at for at, row in enumerate(manifest.tensors)}
    drawn = {node: place[outline.drawn[item.name]] for item in outline.items for node in (item.name, *item.joined)}
    holder = {leaf.name: drawn[i.name] for i in reversed(outline.items) for leaf in (*i.writes, *i.leaves)}
    records = [
        {
            **to_builtins(record),
            "item": drawn[name],
            "layer": _layer(record.module),
            "advice": advice.get(record.reshard, ""),
        }
        for name, record in zip(names, manifest.collectives, strict=True)
    ]
    held = None if first is None else {row.name: row.sharding for row in first.manifest.tensors}
    drawn_tensors = [
        {
            **to_builtins(row),
            "words": describe_sharding(row.sharding, mesh),
            "item": holder.get(row.name, holder.get(row.holder)),
            "slices": slices.of(row.shape, row_sharding(row, mesh)),
            **({} if held is None else {"was": held[row.name] if held[row.name] != row.sharding else ""}),
        }
        for row in manifest.tensors
    ]
    drawn_items = [_item(item, place, tensors, slices, manifest) for item in items]
    if first is not None:
        for row, item in zip(drawn_items, items, strict=True):
            sends_otherwise = sent(item) != sent(item.before) if item.before else item.record is not None
            row["was"], row["before"] = item.was, item.before.record if item.before else None
            row["differs"] = bool(item.was or sends_otherwise or any(drawn_tensors[at]["was"] for at in row["tensors"]))
    data: dict[str, Any] = {
        "name": os.path.basename(os.path.abspath(program.title)),
        "mesh": outline.mesh,
        "rank": rank,
        "ranks": list(next(ranks for ranks in classes if rank in ranks)),
        "world": mesh.world_size,
        "device": manifest.device_type,
        "held": held_per_rank(manifest),
        "whole": outline.bytes_whole,
        "counted": counted(manifest.collectives),
        "wire": wire(manifest.collectives),
        "legend": {
            color: [(text, describe_sharding(text, mesh)) for text in texts]
            for color, texts in legend_of(outline.root).items()
        },
        "members": _members(outline.root, place),
        "records": records,
        "tensors": drawn_tensors,
        "items": drawn_items,
        "unknown": list(_unknown(times, outline.items, slices, manifest)),
        "slices": slices.rows,
        "alike": list(_alike(drawn_tensors)),
        "cost": {"layers": _costs(manifest.collectives, "layer"), "kinds": _costs(manifest.collectives, "kind")},
        "timeline": _timeline(times),
        "step": times.total,
        "machine": {"name": described.name, "flops": described.flops, "memory_bandwidth": described.memory_bandwidth},
        "chain": _chain(times, items, drawn),
    }  # fmt: skip
    if first is not None:
        data |= _gone_and_ends(outline, drawn)
    return printable(to_builtins(data))  # type: ignore[no-any-return]


class _Slices:
    """The slices of each layout, stored once. `alike`: all ranks have the same local shapes."""

    def __init__(self, mesh: Mesh, alike: bool) -> None:
        self.mesh, self.alike = mesh, alike
        self.rows: list[Slices] = []
        self._known: dict[Any, int] = {}

    def of(self, shape: Sequence[int | str], sharding: Sharding) -> int:
        key = (tuple(shape), sharding)
        if key not in self._known:
            self._known[key] = len(self.rows)
            self.rows.append(slices_of(shape, sharding, self.mesh))
        return self._known[key]

    def of_value(self, text: str, value: str) -> int | str:
        """Return the slices of a value with the local text `f32[2, 8]`, or why its global shape is unknown."""
        shaped = re.fullmatch(r"[\w.]+\[([^\[\]()]*)\]", value)
        if not shaped:
            return "it is not one tensor of plain sizes"
        if not text:
            return "nothing is claimed of its placement"
        if not self.alike:
            return "the ranks' local shapes differ"
        local = [int(size) if size.isdecimal() else size for size in shaped[1].split(", ") if size]
        try:
            sharding = read_sharding(text, self.mesh, len(local))
        except (ShardingError, ValueError):
            return f"its claim cannot be read: {text}"
        shape: list[int | str] = []
        for size, by in zip(local, sharding.dims, strict=True):
            times = self.mesh.size(by.axes)
            whole = sum(part for part, _ in by.parts) or (
                size * times if isinstance(size, int) else f"{times}*({size})"
            )
            shape.append(size if not by.axes else whole)
        return self.of(shape, sharding)


def _alike(tensors: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield tensors of repeated layers once: the pattern of their names, the index of the first, and their number."""
    facts = ("kind", "dtype", "shape", "sharding", "was", "tied_to")
    rows: dict[Any, list[int]] = {}
    for at, row in enumerate(tensors):
        alike = fold_layers(row["name"]), *(fold_layers(str(row.get(fact))) for fact in facts)
        rows.setdefault(alike, []).append(at)
    for (pattern, *_), places in rows.items():
        name = pattern if len(places) > 1 else tensors[places[0]]["name"]
        yield {"name": name, "first": places[0], "times": len(places)}


def _members(group: Group, place: Mapping[str, int]) -> list[Any]:
    return [
        place[member.name]
        if isinstance(member, Item)
        else {
            "path": member.path,
            "title": seen_from(group.path, member.title),
            "count": member.count,
            "counted": counted(member.records()),
            "wire": wire(member.records()),
            "members": _members(member, place),
        }
        for member in group.members
    ]


def _item(
    item: Item, place: Mapping[str, int], tensors: Mapping[str, int], slices: _Slices, manifest: Manifest
) -> dict[str, Any]:
    slice_rows = _slices_of(item, slices, manifest)
    return {
        "name": item.name,
        "kind": item.kind,
        "label": item.label,
        "ops": item.detail,
        "module": item.module,
        "sharding": item.sharding,
        "words": describe_sharding(item.sharding, slices.mesh),
        "color": color_of(item.sharding),
        "value": item.value,
        "slices": slice_rows if isinstance(slice_rows, int) else None,
        "unknown": slice_rows if isinstance(slice_rows, str) else "",
        "sources": [place[source] for source in item.sources],
        "tensors": [tensors[leaf.name] for leaf in item.leaves],
        "writes": [(leaf.name, tensors.get(leaf.name)) for leaf in item.writes],
        "note": item.note.split("\n"),
    }


def _slices_of(item: Item, slices: _Slices, manifest: Manifest) -> int | str | None:
    """Return the slices of an item's value, or why they are unknown; None if the program has no such value."""
    if item.kind == "gone":
        return None
    rows = {"input": manifest.inputs, "output": manifest.outputs}.get(item.kind, [])
    if row := next((row for row in rows if row.name == item.ops[0]), None):
        return slices.of(row.shape, row_sharding(row, slices.mesh))
    return slices.of_value(item.sharding.rpartition(" -> ")[2], item.value)


def _gone_and_ends(outline: Outline, drawn: Mapping[str, int]) -> dict[str, Any]:
    """The first artifact's collectives that are gone, and where the boundary is."""
    gone = [
        {**to_builtins(item.before.record), "item": drawn[item.name]}
        for item in outline.items
        if item.kind == "gone" and item.before and item.before.record
    ]
    ends = (item for item in outline.items if item.kind in ("input", "output"))
    return {"gone": gone, "ends": {f"{item.kind} {item.origin}": drawn[item.name] for item in ends}}


def _layer(module: str) -> str:
    """Return `layers.3` for anything in that layer; elsewhere the module itself."""
    return layer_around(module) or module or "outside of modules"


def _costs(records: Iterable[Collective], by: Literal["layer", "kind"]) -> list[dict[str, Any]]:
    """Count and add up bytes by `layer` or `kind` and by reason; equal consecutive layers are merged."""
    rows: dict[str, dict[tuple[str, str], tuple[int, int, int]]] = {}
    for (title, *kind), row in add_up(
        records, lambda each: (_layer(each.module) if by == "layer" else each.kind, each.kind, each.why)
    ).items():
        rows.setdefault(title, {})[kind[0], kind[1]] = row
    names = (by, "layers", "kind", "why", "count", "payload_bytes", "wire_bytes")
    return [
        dict(zip(names, (title, layers, *key, *row), strict=True))
        for title, layers, kinds in _folded(rows)
        for key, row in kinds.items()
    ]


def _timeline(times: Times) -> list[dict[str, Any]]:
    """Add up seconds by layer in program order, of all steps and of the critical ones; equal layers are merged."""
    rows: dict[str, tuple[float, float, float]] = {}
    for step in times.steps:
        compute, sent, critical = rows.get(_layer(step.module), (0.0, 0.0, 0.0))
        critical += (step.compute + step.sent) * step.critical
        rows[_layer(step.module)] = compute + step.compute, sent + step.sent, critical
    names = ("layer", "layers", "compute", "sent", "critical")
    return [dict(zip(names, (title, layers, *row), strict=True)) for title, layers, row in _folded(rows)]


def _unknown(times: Times, items: Iterable[Item], slices: _Slices, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yield ops with unknown cost or shape, grouped by reason."""
    if times.uncounted:
        yield {"what": "FLOPs", "why": UNCOUNTED, "ops": times.uncounted}
    shapeless = dict[str, Counter[str]]()
    for item in items:
        if isinstance(why := _slices_of(item, slices, manifest), str):
            shapeless.setdefault(why, Counter())[item.ops[-1]] += 1
    for why, ops in shapeless.items():
        yield {"what": "global shape", "why": why, "ops": ops}


def _chain(times: Times, items: Sequence[Item], drawn: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the edges of the critical path between drawn items."""
    stops = [drawn[node] for node in times.chain if node in drawn]
    pairs = dict.fromkeys(itertools.pairwise(stops))
    return [(source, target) for source, target in pairs if items[source].name in items[target].sources]


def _folded(rows: Mapping[str, Row]) -> Iterator[tuple[str, int, Row]]:
    """Yield (title, number, row) for consecutive layers with equal rows."""
    runs: list[tuple[str, int, Row]] = []
    for layer, row in rows.items():
        first, layers, same = runs[-1] if runs else ("", 0, None)
        (name, number), (other, following) = numbered(first), numbered(layer)
        if row == same and name == other and 0 <= number == following - layers:
            runs[-1] = (first, layers + 1, row)
        else:
            runs.append((layer, 1, row))
    for first, layers, row in runs:
        yield (f"{first}-{numbered(first)[1] + layers - 1}" if layers > 1 else first), layers, row


def printable(value: Any) -> Any:
    """Escape invisible characters in all texts: files choose their own names."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, Mapping):
        return {one_line(str(key)): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, (list, tuple)) else value
