"""The picture of an artifact: its collectives, and the bytes that they carry."""

from __future__ import annotations

import hashlib
import textwrap
from html import escape

import graphviz

from tpcompiler.artifact.program import ArtifactProgram
from tpcompiler.errors import one_line
from tpcompiler.report.items import Item, color_of, seen_from
from tpcompiler.report.outline import Group, Outline, counted, legend_of, outline_of, wire
from tpcompiler.terminal.printed import format_bytes

LONGEST = 400  # letters of a text
FONT = "Helvetica"
INK, FAINT, FRAME = "#1f2933", "#52606d", "#9aa5b1"
COLLECTIVE = "#b3123f"
COLORS = {  # sharding -> fill, border
    "whole": ("#eceff1", "#546e7a"),
    "cut 0": ("#cfe3fb", "#1565c0"),
    "cut 1": ("#d3efd6", "#2e7d32"),
    "cut 2": ("#e6d9f5", "#6a1b9a"),
    "cut 3": ("#c9eeee", "#00838f"),
    "cut 4": ("#f7d6e6", "#ad1457"),
    "pending": ("#ffe0b2", "#b34700"),
    "unknown": ("#ffffff", "#9aa5b1"),
}


def artifact_dot(program: ArtifactProgram, rank: int = 0) -> graphviz.Digraph:
    """Draw the program of one rank: modules as frames, repeated layers once, ops coloured by sharding.

    Collectives are hexagons with their payload and wire bytes; those that the plan did not ask for (fallbacks) are
    dashed. Layout ops and casts are edges, parameters are lines in the op that uses them. Only the files are read;
    `source` is text, and only `render` needs the program `dot`.

    Raises:
        ArtifactError: the artifact is missing or damaged, or the rank is outside its world.
    """
    outline = outline_of(program, rank)
    dot = graphviz.Digraph(
        "program",
        graph_attr={
            "fontname": FONT, "fontsize": "11", "fontcolor": INK, "label": _title(outline), "labelloc": "t",
            "nodesep": "0.2", "ranksep": "0.18", "margin": "0.2", "newrank": "true", "tooltip": " ",
        },
        node_attr={
            "fontname": FONT, "fontsize": "10", "fontcolor": INK, "height": "0", "width": "0", "margin": "0.12,0.04",
            "shape": "box", "style": "filled,rounded",
        },
        edge_attr={"arrowsize": "0.6", "color": FRAME, "penwidth": "1.2"},
    )  # fmt: skip
    _draw(dot, outline.root)
    colors = {item.name: _border(item) for item in outline.root.items()}
    for item in outline.root.items():
        for source in item.sources:
            dot.edge(_name(source), _name(item.name), color=colors[source])
    return dot


def _draw(dot: graphviz.Digraph, group: Group) -> None:
    for member in group.members:
        if isinstance(member, Group):
            width = "1.8" if member.count > 1 else "0.8"
            name = _name(f"{member.path} {next(member.items()).name}")
            with dot.subgraph(name=f"cluster {name}") as inner:
                tooltip = graphviz.escape(_shortened(member.title))
                inner.attr(label=_frame(member, group.path), labeljust="l", penwidth=width, tooltip=tooltip)
                inner.attr(color=INK if member.count > 1 else FRAME, style="rounded", margin="9")
                _draw(inner, member)
        elif member.kind == "collective":
            _collective(dot, member, group.path)
        else:
            _box(dot, member, group.path)


def _frame(group: Group, outer: str) -> str:
    title = seen_from(outer, group.title)
    if group.count == 1:
        return f"<{_bold(title)}>"
    records = group.records()
    each = _small(f"each: {counted(records)}, {format_bytes(wire(records))} on the wire", FAINT)
    return _lines([_bold(title), each], align="LEFT")


def _box(dot: graphviz.Digraph, item: Item, path: str) -> None:
    fill, border = _colors(item.sharding)
    if item.kind == "op":
        name, style = seen_from(path, item.module), "filled,rounded"
    else:
        name, style, fill = item.kind, "filled", "#ffffff"
    lines = [_bold(name)] if name else []
    lines += [_text(item.label), _small(f"{item.sharding} {item.value}".strip())]
    if item.detail:
        lines.append(_small(textwrap.shorten(", ".join(item.detail), 40, placeholder=" ..."), FAINT))
    lines += (_small(f"{names} {what}", _colors(what)[1]) for names, what in _leaves(item, path))
    lines += _writes(item, path)
    dot.node(_name(item.name), _lines(lines), style=style, fillcolor=fill, color=border, tooltip=_hint(item))


def _collective(dot: graphviz.Digraph, item: Item, path: str) -> None:
    record = item.record
    assert record is not None
    payload, wired = map(format_bytes, (record.payload_bytes, record.wire_bytes))
    sent = f"{payload} over {record.axis}, {wired} on the wire"
    lines = [_bold(record.kind), _text(item.sharding).replace("-&gt;", "&rarr;"), _small(sent)]
    lines += (_small(f"{names} {what}") for names, what in _leaves(item, path))
    lines += _writes(item, path)
    if record.why != "inherent":
        lines += map(_small, textwrap.wrap(f"{record.why}: {record.reason}", 44))
    look = {"fillcolor": COLLECTIVE, "fontcolor": "#ffffff", "style": "filled"}
    if record.why == "fallback":
        look = {"fillcolor": "#ffffff", "fontcolor": COLLECTIVE, "style": "filled,dashed"}
    dot.node(
        _name(item.name), _lines(lines), shape="hexagon", margin="0,0.02", color=COLLECTIVE, penwidth="2.5",
        tooltip=_hint(item), **look,
    )  # fmt: skip


def _writes(item: Item, path: str) -> list[str]:
    names = textwrap.shorten(
        ", ".join(leaf.named_in(path, item.module) for leaf in item.writes), 40, placeholder=" ..."
    )
    return [_small(f"writes {names}")] if names else []


def _leaves(item: Item, path: str) -> list[tuple[str, str]]:
    """Return (names, common sharding and shape) for the leaves of an item."""
    alike: dict[str, list[str]] = {}
    for leaf in item.leaves:
        alike.setdefault(f"{leaf.sharding} {leaf.shape}", []).append(leaf.named_in(path, item.module))
    return [(", ".join(names), what) for what, names in alike.items()]


def _bold(text: str) -> str:
    return f"<B>{_text(text)}</B>"


def _lines(lines: list[str], align: str = "CENTER") -> str:
    """Return a table with one line per row: Graphviz sets lines of different sizes better in tables.

    Each line has one font: if the reader's letters were wider than Graphviz's, adjacent texts would touch.
    """
    rows = "".join(f'<TR><TD ALIGN="{align}">{line}</TD></TR>' for line in lines)
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0">{rows}</TABLE>>'


def _hint(item: Item) -> str:
    return str(graphviz.escape("\n".join(map(_shortened, (item.note or item.kind).split("\n")))))


def _title(outline: Outline) -> str:
    manifest = outline.manifest
    records = manifest.collectives
    lines = [
        _bold(f"mesh {outline.mesh}, rank {outline.rank} of {manifest.world_size}"),
        f"{format_bytes(outline.bytes_here)} of {format_bytes(outline.bytes_whole)} parameters",
        f"per call: {counted(records)}, {format_bytes(wire(records))} on the wire",
    ]
    legend_texts = legend_of(outline.root)
    cells = [_cell(f"{' '.join(legend_texts[c])} {c.split()[0]}", *COLORS[c]) for c in COLORS if c in legend_texts]
    reasons = {record.why for record in records}
    if reasons - {"fallback"}:
        cells.append(_cell("collective", COLLECTIVE, COLLECTIVE, "#ffffff"))
    if "fallback" in reasons:
        cells.append(_cell("fallback", "#ffffff", COLLECTIVE, COLLECTIVE, "dashed"))
    rows = "".join(
        f'<TR><TD COLSPAN="{max(len(cells), 1)}" BORDER="0" CELLPADDING="0">{line}</TD></TR>' for line in lines
    )
    legend = f"<TR>{''.join(cells)}</TR>" if cells else ""
    return f'<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="10" CELLPADDING="5">{rows}{legend}</TABLE>>'


def _cell(text: str, fill: str, border: str, ink: str = INK, style: str = "solid") -> str:
    inside = f'<FONT COLOR="{ink}">{_text(text)}</FONT>'
    return f'<TD BGCOLOR="{fill}" COLOR="{border}" STYLE="{style}">{inside}</TD>'


def _colors(sharding: str) -> tuple[str, str]:
    return COLORS[color_of(sharding)]


def _border(item: Item) -> str:
    return COLLECTIVE if item.kind == "collective" else _colors(item.sharding)[1]


def _small(text: str, color: str = "") -> str:
    ink = f' COLOR="{color}"' if color else ""
    return f'<FONT POINT-SIZE="8"{ink}>{_text(text)}</FONT>'


def _text(text: str) -> str:
    return escape(_shortened(text), quote=False)


def _shortened(text: str) -> str:
    """Make a text safe: XML has no control characters, and Graphviz fails on very long texts."""
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _name(text: str) -> str:
    """Return an invisible name, hashed if it is too long for Graphviz."""
    return one_line(text) if len(text) <= LONGEST else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
