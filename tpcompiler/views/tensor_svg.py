"""The picture of tensors as SVG: pieces in proportion, in the colour of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from tpcompiler.views.slabs import WIDTH, Drawn, Slab
from tpcompiler.views.slices import DimPiece

SIZE, LINE = 12, 16  # font size and line height, in pixels
LETTER = 0.6 * SIZE  # the width of a letter in a monospaced font
MARGIN, LONGEST_LABEL = 12, 12  # pixels; letters
ACROSS = (WIDTH - LONGEST_LABEL) * LETTER  # pixels of a drawing
LEAST, MOST = 40, 320  # height in pixels
COLORS = ("#56b4e9", "#e69f00", "#2fc79c", "#f0e442", "#dd8fbd", "#f08a4b", "#a9c8e0", "#c8ccd0")


def svg_of(drawn: Sequence[Drawn]) -> str:
    """Return one picture with the tensors below each other."""
    parts: list[str] = []
    top = MARGIN
    for each in drawn:
        top = _add_lines(parts, each.head, top)
        colors: dict[str, str] = {}
        for slab in each.slabs:
            top = _add_slab(parts, slab, top + LINE // 2, colors)
        top = _add_lines(parts, each.holders, top + LINE // 2) + LINE
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
                parts.append(_label(cell, (start + stop) / 2, (above + below) / 2 + SIZE / 3, "middle"))
    for (label, _), (start, stop) in zip(slab.columns, pairwise(x), strict=True):
        if (len(label) + 1) * LETTER < stop - start:
            parts.append(_label(label, (start + stop) / 2, top - SIZE / 3, "middle"))
    for (label, _), (above, below) in zip(slab.rows, pairwise(y), strict=True):
        if below - above >= LINE and len(label) < LONGEST_LABEL:
            parts.append(_label(label, left - LETTER, (above + below) / 2 + SIZE / 3, "end"))
    return round(top + height)


def _ends(pieces: Sequence[tuple[str, DimPiece]]) -> Iterator[int]:
    yield 0
    yield from (piece.stop for _, piece in pieces)


def _label(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
