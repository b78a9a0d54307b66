"""A picture of the slices of a tensor and the ranks that hold them."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from typing import Any

from tpcompiler.errors import ArtifactError, one_line
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import leaf_of_module
from tpcompiler.ir.shares import mesh_of, row_sharding
from tpcompiler.report.slices import DimPiece, Holder, Slices, pieces_of, slices_of
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import PlacedRecord
from tpcompiler.terminal.printed import nearest_names

MOST_PIECES = 32  # of a dim
MOST_SLABS = 12  # of a drawing
MOST_NAMED = 8  # ranks in a cell, and runs in a line
WIDTH = 80  # letters
SIZE, LINE = 12, 16  # font size and line height, in pixels
LETTER = 0.6 * SIZE  # the width of a letter in a monospaced font
MARGIN, LONGEST_LABEL = 12, 12  # pixels; letters
ACROSS = (WIDTH - LONGEST_LABEL) * LETTER  # pixels of a drawing
LEAST, MOST = 40, 320  # height in pixels
COLORS = ("#56b4e9", "#e69f00", "#2fc79c", "#f0e442", "#dd8fbd", "#f08a4b", "#a9c8e0", "#c8ccd0")


@dataclass(frozen=True)
class Slab:
    """The last two dims (a single row for one dim) at one piece of each earlier dim.

    Attributes:
        title: `[0:4, :, :]`, or empty for a single slab.
        rows: the pieces of the last dim but one, with their labels, `0:8`.
        columns: the pieces of the last dim.
        cells: the ranks that hold the elements, row by row: `0,1`, or `0+1` for a pending reduction.
    """

    title: str
    rows: Sequence[tuple[str, DimPiece]]
    columns: Sequence[tuple[str, DimPiece]]
    cells: Sequence[Sequence[str]]


# Tensors of one shape, dtype and sharding: lines of at most `WIDTH` letters, slabs below them, and lines below these
Drawn = tuple[Sequence[str], Sequence[Slab], Sequence[str]]


def draw_sharding(manifest: Manifest, name: str | None, where: str, *, is_svg: bool) -> str:
    """Draw the slices of a tensor and the ranks that hold them (`ParallelProgram.show`); without a name of all.

    `where` names the artifact in errors.

    Raises:
        ArtifactError: there is no tensor of that name.
    """
    mesh, alike = mesh_of(manifest), dict[Any, list[str]]()
    rows = dict(manifest.placed())
    if name is not None and name not in rows:
        name = leaf_of_module(name, [row.name for row in manifest.tensors]) or name
    if name is not None and name not in rows:
        raise ArtifactError(
            f"{where} has no parameter, buffer, input or output {name!r}",
            help=f"did you mean {nearest_names(name, list(rows))}?",
        )
    for each in rows if name is None else [name]:
        row = rows[each]
        alike.setdefault((row.dtype, tuple(row.shape), row.sharding), []).append(each)
    drawn = [draw_tensors(names, rows[names[0]], mesh) for names in alike.values()]
    if is_svg:
        return svg_of(drawn)
    return "\n".join(map(_text, drawn))


def _text(drawn: Drawn) -> str:
    head, slabs, holders = drawn
    blocks = [head, *(_grid(slab, columns) for slab in slabs for columns in _fitting(slab)), holders]
    return "\n\n".join(map("\n".join, blocks)) + "\n"


def _width(slab: Slab, column: int) -> int:
    """Return the width of a column in letters, with the gap before it."""
    return 2 + max(len(slab.columns[column][0]), *(len(row[column]) for row in slab.cells))


def _fitting(slab: Slab) -> Iterator[range]:
    """Yield ranges of columns that fit next to each other."""
    first = 0
    room = left = WIDTH - max(len(label) for label, _ in slab.rows)
    for column in range(len(slab.columns)):
        width = _width(slab, column)
        if width > left and column > first:
            yield range(first, column)
            first, left = column, room
        left -= width
    yield range(first, len(slab.columns))


def _grid(slab: Slab, columns: range) -> list[str]:
    margin = max(len(label) for label, _ in slab.rows)
    lines = [("", [slab.columns[at][0] for at in columns])]
    lines += [(label, [row[at] for at in columns]) for (label, _), row in zip(slab.rows, slab.cells, strict=True)]
    table = [
        label.ljust(margin)
        + "".join(f"  {text:{_width(slab, at) - 2}}" for at, text in zip(columns, texts, strict=True))
        for label, texts in lines
    ]
    return [line.rstrip() for line in ([slab.title] if slab.title else []) + table]


def draw_tensors(names: Sequence[str], row: PlacedRecord, mesh: Mesh) -> Drawn:
    """Draw equal tensors that have this row in the manifest."""
    slices = slices_of(row.shape, row_sharding(row, mesh), mesh, most=None)
    shape = ", ".join(map(str, row.shape))
    head = [f"{', '.join(names)}: {row.dtype}[{shape}], {slices.sharding} on {mesh}"]
    head += [f"over {axis} a pending {op}: the {op} of what the ranks hold" for axis, op in slices.pending]
    pieces = [pieces_of(slices, dim) for dim in range(len(slices.of))]
    head += [
        f"drawn: the first {MOST_PIECES} of {len(found):,} pieces of dim {dim}"
        for dim, found in enumerate(pieces)
        if len(found) > MOST_PIECES
    ]
    slabs = list(_slabs(slices, [found[:MOST_PIECES] for found in pieces], mesh)) if pieces and all(pieces) else []
    if len(slabs) > MOST_SLABS:
        head.append(f"drawn: the first {MOST_SLABS} of {len(slabs):,} slabs")
    return _wrapped(head), slabs[:MOST_SLABS], _wrapped(_holder(each, slices) for each in slices.holders)


def _slabs(slices: Slices, pieces: Sequence[Sequence[DimPiece]], mesh: Mesh) -> Iterator[Slab]:
    labels = [[(_label(slices, dim, each.start, each.stop), each) for each in own] for dim, own in enumerate(pieces)]
    everyone = DimPiece(0, 1, frozenset(range(mesh.world_size)))
    *leads, rows, columns = labels if len(labels) > 1 else [[("", everyone)], *labels]
    pending = [axis for axis, _ in slices.pending]
    for leading in product(*leads):
        ranks = everyone.ranks.intersection(*(each.ranks for _, each in leading))
        title = ", ".join([*(label for label, _ in leading), ":", ":"])
        cells = [
            [cell_text(ranks & row.ranks & column.ranks, pending, mesh) for _, column in columns] for _, row in rows
        ]
        yield Slab(f"[{title}]" if leading else "", rows, columns, cells)


def cell_text(ranks: Collection[int], pending: Sequence[str], mesh: Mesh) -> str:
    """Return `0,1` for replicas, and `0+1` for shares of a pending reduction."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for rank in sorted(ranks):
        here = mesh.coordinate(rank)
        groups.setdefault(tuple(c for axis, c in here.items() if axis not in pending), []).append(str(rank))
    return _listed([_listed(group, "+") for group in groups.values()], ",")


def _listed(names: Sequence[str], sign: str) -> str:
    return sign.join(names if len(names) <= MOST_NAMED else [*names[:2], "..", names[-1]])


def _label(slices: Slices, dim: int, start: int, stop: int) -> str:
    """Return `0:8`, or `0/2:1/2` for a dynamic size."""
    parts = "" if slices.of[dim] == slices.shape[dim] else f"/{slices.of[dim]}"
    return f"{start}{parts}:{stop}{parts}"


def _holder(holder: Holder, slices: Slices) -> str:
    """Return a line such as `ranks 0, 1: [8, 8], the slice [0:8, :]`."""
    dims = [
        ":"
        if runs == ((0, slices.of[dim]),)
        else _listed([_label(slices, dim, *run) for run in runs], " + ") or "nothing"
        for dim, runs in enumerate(holder.runs)
    ]
    ranks = ", ".join(map(str, holder.ranks))
    local = ", ".join(map(str, holder.local))
    return f"rank{'s' * (len(holder.ranks) > 1)} {ranks}: [{local}], the slice [{', '.join(dims)}]"


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(one_line(line), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def svg_of(drawn: Sequence[Drawn]) -> str:
    """Return one picture with the tensors below each other."""
    parts: list[str] = []
    top = MARGIN
    for head, slabs, holders in drawn:
        top = _add_lines(parts, head, top)
        colors: dict[str, str] = {}
        for slab in slabs:
            top = _add_slab(parts, slab, top + LINE // 2, colors)
        top = _add_lines(parts, holders, top + LINE // 2) + LINE
    width = round(2 * MARGIN + WIDTH * LETTER)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}" '
        f'font-family="monospace" font-size="{SIZE}" fill="#1f2933">\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _add_lines(parts: list[str], lines: Sequence[str], top: int) -> int:
    """Add lines; return the pixel below them."""
    for line in lines:
        parts.append(f'<text x="{MARGIN}" y="{top + SIZE}" xml:space="preserve">{escape(line)}</text>')
        top += LINE
    return top


def _add_slab(parts: list[str], slab: Slab, top: int, colors: dict[str, str]) -> int:
    """Add a slab; return the pixel below it. Labels appear where they fit; every piece has a tooltip."""
    if slab.title:
        top = _add_lines(parts, [slab.title], top)
    across, down = (pieces[-1][1].stop for pieces in (slab.columns, slab.rows))
    height = min(max(ACROSS * down / across, LEAST), MOST) if slab.rows[0][0] else LEAST
    left, top = MARGIN + LONGEST_LABEL * LETTER, top + LINE
    x = [left + ACROSS * end / across for end in _ends(slab.columns)]
    y = [top + height * end / down for end in _ends(slab.rows)]
    for (row, (above, below)), cells in zip(zip(slab.rows, pairwise(y), strict=True), slab.cells, strict=True):
        for (column, (start, stop)), cell in zip(zip(slab.columns, pairwise(x), strict=True), cells, strict=True):
            fill = colors.setdefault(cell, COLORS[len(colors) % len(COLORS)])
            title = f"{', '.join(filter(None, (row[0], column[0])))}: {cell}"
            parts.append(
                f'<rect x="{start:.1f}" y="{above:.1f}" width="{stop - start:.1f}" height="{below - above:.1f}" '
                f'fill="{fill}" stroke="#ffffff"><title>{escape(title)}</title></rect>'
            )
            if len(cell) * LETTER < stop - start and below - above > LINE:
                parts.append(_svg_label(cell, (start + stop) / 2, (above + below) / 2 + SIZE / 3, "middle"))
    for (label, _), (start, stop) in zip(slab.columns, pairwise(x), strict=True):
        if (len(label) + 1) * LETTER < stop - start:
            parts.append(_svg_label(label, (start + stop) / 2, top - SIZE / 3, "middle"))
    for (label, _), (above, below) in zip(slab.rows, pairwise(y), strict=True):
        if below - above >= LINE and len(label) < LONGEST_LABEL:
            parts.append(_svg_label(label, left - LETTER, (above + below) / 2 + SIZE / 3, "end"))
    return round(top + height)


def _ends(pieces: Sequence[tuple[str, DimPiece]]) -> Iterator[int]:
    yield 0
    yield from (piece.stop for _, piece in pieces)


def _svg_label(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
