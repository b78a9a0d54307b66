"""A picture of the slices of a tensor and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpcompiler.errors import ArtifactError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import leaf_of_module
from tpcompiler.runtime.artifact import Manifest
from tpcompiler.terminal.printed import nearest_names
from tpcompiler.views.slabs import WIDTH, Drawn, Slab, draw_tensors
from tpcompiler.views.tensor_svg import svg_of


def draw_sharding(manifest: Manifest, name: str | None, where: str, *, is_svg: bool) -> str:
    """Draw the slices of a tensor and the ranks that hold them (`ParallelProgram.show`); without a name of all.

    `where` names the artifact in errors.

    Raises:
        ArtifactError: there is no tensor of that name.
    """
    mesh, alike = Mesh.of(manifest.mesh, manifest.factors), dict[Any, list[str]]()
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
    blocks = [drawn.head, *(_grid(slab, columns) for slab in drawn.slabs for columns in _fitting(slab))]
    return "\n\n".join("\n".join(block) for block in (*blocks, drawn.holders)) + "\n"


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
