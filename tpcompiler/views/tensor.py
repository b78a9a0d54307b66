"""A picture of the slices of a tensor and the ranks that hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from tpcompiler.errors import ArtifactError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.names import leaf_of_module
from tpcompiler.runtime.artifact import Manifest, read_manifest
from tpcompiler.terminal.printed import nearest_names
from tpcompiler.views.slabs import WIDTH, Drawn, Slab, draw_tensors
from tpcompiler.views.tensor_svg import svg_of


class HasManifest(Protocol):
    """A `ParallelProgram`, reduced to its manifest."""

    def manifest(self) -> Manifest: ...


def visualize_sharding(
    thing: HasManifest | str | os.PathLike[str], name: str | None = None, *, format: Literal["text", "svg"] = "text"
) -> str:
    """Draw the slices of a tensor and the ranks that hold them.

    A cell names the ranks that hold its elements; `0+1` is a pending reduction, of which each has a share. For more
    than two dims, the last two are drawn for each slab. Slices of a dynamic size are shares (`0/2:1/2`).

    Args:
        thing: a `ParallelProgram`, or the directory of an artifact, whose manifest alone is read.
        name: a parameter, a buffer, an input, a module with one weight, or `output NAME`; None: all, equal
            ones once.
        format: "text" of at most 80 columns, or "svg".

    Raises:
        ArtifactError: the artifact is missing or damaged, or has no tensor of that name.
    """
    where, manifest = (
        (os.fspath(thing), read_manifest(thing))
        if isinstance(thing, (str, os.PathLike))
        else ("the program", thing.manifest())
    )
    mesh, alike = Mesh.of(manifest.mesh), dict[Any, list[str]]()
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
    if format == "svg":
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
