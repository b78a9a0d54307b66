"""Write docs/sharding.md: every kind of sharding drawn on one small tensor. `python -m tools.sharding_page`."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch

from tpcompiler.cost.path import WIRE, cheapest_path, path_text
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import cut, read_sharding
from tpcompiler.views.slabs import cell_text

PAGE = Path(__file__).parent.parent / "docs" / "sharding.md"
SHAPE = (4, 8)

TOP = """# Shardings, drawn

Written by `python -m tools.sharding_page`; do not edit.

A tensor of 4 rows and 8 columns. Every cell names the ranks that hold the element; `0+1` is a pending reduction, of
which ranks 0 and 1 each hold a share. Ranks are counted in row-major order over the mesh: on `dp=2,tp=2` ranks 0 and 1
have `dp` 0, ranks 0 and 2 have `tp` 0. `S(0)`, `R` and `P(sum)` are torch's placements, one for each mesh axis; what
torch cannot say stands behind the dim. The manifest and every claim in a saved program use this form, and a
plan may be written in it: `S(1, parts 4 2 2)`, or `{dp: S(0), tp: "S(1, unit 2)"}` where there are several axes.
"""

DRAWN: list[tuple[str, list[tuple[str, str, str]]]] = [
    (
        "One axis",
        [
            ("tp=2", "R", "Replicated: every rank holds all of it."),
            ("tp=2", "S(0)", "The rows are cut."),
            ("tp=2", "S(1)", "The columns are cut."),
            (
                "tp=2",
                "P(sum)",
                "A pending sum: what a row-wise layer leaves, reduced by an all_reduce or a reduce_scatter.",
            ),
        ],
    ),
    (
        "Sizes that do not divide",
        [
            (
                "tp=3",
                "S(0)",
                "As `torch.chunk` deals: the first ranks have more, the last may have nothing (4 rows: 2, 2, 0).",
            ),
            ("tp=3", "S(1)", "8 columns: 3, 3, 2."),
            ("tp=3", "S(1, unit 2)", "Whole heads of 2 columns are dealt, 2, 2 and none."),
        ],
    ),
    (
        "Several pieces in one dim",
        [
            (
                "tp=2",
                "S(1, block 4)",
                "Each block of 4 columns is cut by itself. Gate and up in one matrix, and equal queries, keys and "
                "values, lie so; "
                "so does the inner factor of a merged dim of batch * heads.",
            ),
            (
                "tp=2",
                "S(1, parts 4 2 2)",
                "Packed queries, keys and values of different sizes: each part is cut by itself, and a split gives "
                "its parts "
                "without a gather.",
            ),
            (
                "tp=2",
                "S(1, parts 4 2r 2r)",
                "`r`: the axis leaves the part whole. One kv head for all queries: every rank has its queries and "
                "all of the "
                "keys and values.",
            ),
            ("tp=2", "S(1, parts 6u2 2)", "A part in units: 3 heads of 2 columns, and 2 columns that are cut plainly."),
        ],
    ),
    (
        "Several axes",
        [
            ("dp=2,tp=2", "[S(0), R]", "The batch over `dp`; ranks that differ in `tp` alone hold the same rows."),
            ("dp=2,tp=2", "[S(0), S(1)]", "Rows over `dp`, columns over `tp`."),
            ("dp=2,tp=2", "[S(0), P(sum)]", "The rows over `dp`, each pending over `tp`."),
            (
                "dp=2,tp=2",
                "[P(sum), P(sum)]",
                "Pending over both: one all_reduce over the flattened group of all four.",
            ),
            ("dp=2,tp=2", "[S(1), S(1)]", "One dim by two axes: `dp` cuts it first, `tp` cuts what `dp` has left."),
            ("dp=2,tp=2", "[S(1), S(1, outside dp)]", "The same dim the other way round (torch's `_StridedShard`)."),
            (
                "dp=2,tp=2",
                "[S(1), S(1, block 2)]",
                "`dp` cuts the merged dim's outer factor, `tp` each block of 2 of the inner one.",
            ),
        ],
    ),
    (
        "More ranks than heads",
        [
            (
                "tp_0=2,tp_1=2",
                "[S(1), R]",
                "`tp=4` with 2 kv heads runs as two axes: `tp_0` cuts the heads of keys and values, which the ranks"
                " of `tp_1` "
                "share. No collective is added for it.",
            ),
            (
                "tp_0=2,tp_1=2",
                "[S(1), S(1)]",
                "The queries of the same layer: each rank of `tp_1` takes a part of the group.",
            ),
            (
                "tp_0=2,tp_1=2",
                "[S(1, parts 4 2 2), S(1, parts 4 2r 2r)]",
                "Both in one packed matrix: 4 columns of queries over all ranks, keys and values shared by pairs.",
            ),
        ],
    ),
]

EXAMPLE = """\
import torch
import tpcompiler

model = torch.export.export(torch.nn.Linear(8, 10), (torch.randn(2, 8),))
program = tpcompiler.parallelize(model, 4, {"weight": "S(0)"})
print(tpcompiler.visualize_sharding(program, "weight"))
"""

OWN = """## Of your own program

`tpcompiler.visualize_sharding` draws the tensors of a program, or of an artifact's files; `format="svg"` makes a
picture, and so does `tpcompiler show OUT --tensor weight -o weight.svg`. Pieces that the same ranks hold are one cell.
"""

BOTTOM = """## From one to another

A change of sharding takes the fastest collectives: a shortest path over shardings, each step one collective over one
axis or over several as one group, weighed by a machine's seconds ([auto.md](auto.md)). Where bytes on the wire alone
count, these are, as torch prints its own, for the tensor above in float32:

| from | to | path | wire bytes |
|---|---|---|---|
"""

PATHS = [
    ("dp=2,tp=2", "[S(0), P(sum)]", "[R, R]"),
    ("dp=2,tp=2", "[P(sum), P(sum)]", "[R, R]"),
    ("dp=2,tp=2", "[S(0), S(0)]", "[R, R]"),
    ("dp=2,tp=2", "[S(0), S(1)]", "[S(1), S(0)]"),
    ("dp=2,tp=2", "[P(sum), S(0)]", "[S(0), S(1)]"),
    ("dp=2,tp=2", "[S(1), S(0)]", "[R, S(1)]"),
]


def drawing(mesh: Mesh, text: str) -> str:
    """Which ranks hold every element."""
    sharding = read_sharding(text, mesh, 2)
    assert sharding.text(mesh) == text
    numbers = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) + 1
    holders: dict[int, list[int]] = {}
    whole = type(sharding)(sharding.dims)  # a pending share is of every element
    for rank in range(mesh.world_size):
        for number in cut(numbers, whole, mesh, rank).flatten().tolist():
            holders.setdefault(number, []).append(rank)
    pending = [axis for axis, _ in sharding.partial]
    cells = [[cell_text(holders[int(number)], pending, mesh) for number in row] for row in numbers]
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join("  ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in cells)


def page() -> str:
    parts = [TOP]
    for title, drawn in DRAWN:
        parts.append(f"## {title}\n")
        for mesh, text, said in drawn:
            parts.append(f"`{text}` on `{mesh}`. {said}\n\n```\n{drawing(_mesh(mesh), text)}\n```\n")
    rows = []
    for name, before, after in PATHS:
        mesh = _mesh(name)
        steps = cheapest_path(*(read_sharding(text, mesh, 2) for text in (before, after)), SHAPE, 4, mesh, WIRE)
        total = sum(step.wire_bytes for step in steps)
        kinds = ", ".join(f"{step.kind} over {'.'.join(step.axes)}" for step in steps)
        rows.append(f"| `{before}` | `{after}` | `{path_text(steps, mesh)}`: {kinds} | {total} |\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(EXAMPLE, {})
    parts.append(f"{OWN}\n```python\n{EXAMPLE}```\n\n```\n{printed.getvalue().strip()}\n```\n")
    return "\n".join(parts) + "\n" + BOTTOM + "".join(rows)


def _mesh(text: str) -> Mesh:
    pairs = (part.split("=") for part in text.split(","))
    return Mesh(tuple((axis, int(degree)) for axis, degree in pairs))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
