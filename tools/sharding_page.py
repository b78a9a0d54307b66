"""Write docs/sharding.md: every kind of sharding drawn on one small tensor. `python -m tools.sharding_page`."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch

from tpcompiler.cli.options import read_mesh
from tpcompiler.cost.path import WIRE, cheapest_path, path_text
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.shares import cut, read_sharding
from tpcompiler.views.slabs import cell_text

PAGE = Path(__file__).parent.parent / "docs" / "sharding.md"
SHAPE = (4, 8)

TOP = """# Shardings, drawn

Written by `python -m tools.sharding_page`; do not edit.

This page draws every kind of sharding on a tensor of 4 rows and 8 columns. Each cell names the ranks that hold the
element; `0+1` is a pending reduction, where ranks 0 and 1 each hold one term. Ranks are numbered row by row over the
mesh: on `dp=2,tp=2` ranks 0 and 1 have `dp` 0, ranks 0 and 2 have `tp` 0. `S(0)`, `R` and `P(sum)` are torch's
placements, one per mesh axis; details that torch cannot express follow the dim. Plans, the manifest and saved programs
use this text: `S(1, parts 4 2 2)`, or `{dp: S(0), tp: "S(1, unit 2)"}` for several axes. [Five words](concepts.md)
introduces the terms.
"""

DRAWN: list[tuple[str, list[tuple[str, str, str]]]] = [
    (
        "One axis",
        [
            ("tp=2", "R", "Replicated: every rank holds the whole tensor."),
            ("tp=2", "S(0)", "The rows are sharded."),
            ("tp=2", "S(1)", "The columns are sharded."),
            (
                "tp=2",
                "P(sum)",
                "A pending sum, the output of a row-wise layer; an all_reduce or a reduce_scatter adds it up.",
            ),
        ],
    ),
    (
        "Sizes that do not divide",
        [
            (
                "tp=3",
                "S(0)",
                "As in `torch.chunk`: the first ranks have more, the last may have nothing (4 rows: 2, 2, 0).",
            ),
            ("tp=3", "S(1)", "8 columns: 3, 3, 2."),
            ("tp=3", "S(1, unit 2)", "Whole heads of 2 columns: 2, 2 and none."),
        ],
    ),
    (
        "Unequal shares",
        [
            ("tp=2:1:1", "S(1)", "The first rank has half of the columns: 4, 2, 2."),
            (
                "tp=3:2:1",
                "S(1)",
                "8 columns are 4, 3, 1: the integer parts of 4, 2.67, 1.33; the largest remainder has one more.",
            ),
            ("tp=3:2:1", "S(1, unit 2)", "4 heads of 2 columns are 2, 1, 1: of 2, 1.33, 0.67."),
        ],
    ),
    (
        "Several pieces in one dim",
        [
            (
                "tp=2",
                "S(1, block 4)",
                "Each block of 4 columns is sharded by itself: for gate and up in one matrix, for equal queries, keys "
                "and values, and for the inner factor of a merged dim of batch * heads.",
            ),
            (
                "tp=2",
                "S(1, parts 4 2 2)",
                "Packed queries, keys and values of different sizes: each part is sharded by itself, and a split needs "
                "no gather.",
            ),
            (
                "tp=2",
                "S(1, parts 4 2r 2r)",
                "`r`: this part is replicated. One kv head for all queries: each rank has its own queries and all keys "
                "and values.",
            ),
            (
                "tp=2",
                "S(1, parts 6u2 2)",
                "The first part in units, 3 heads of 2 columns; then 2 columns without units.",
            ),
        ],
    ),
    (
        "Several axes",
        [
            ("dp=2,tp=2", "[S(0), R]", "The batch over `dp`; ranks that differ only in `tp` hold the same rows."),
            ("dp=2,tp=2", "[S(0), S(1)]", "Rows over `dp`, columns over `tp`."),
            ("dp=2,tp=2", "[S(0), P(sum)]", "The rows over `dp`, each pending over `tp`."),
            (
                "dp=2,tp=2",
                "[P(sum), P(sum)]",
                "Pending over both: one all_reduce over the flattened group of all four.",
            ),
            ("dp=2,tp=2", "[S(1), S(1)]", "One dim over two axes: first over `dp`, then each shard over `tp`."),
            (
                "dp=2,tp=2",
                "[S(1), S(1, outside dp)]",
                "The same dim, first over `tp`, then over `dp` (torch's `_StridedShard`).",
            ),
            (
                "dp=2,tp=2",
                "[S(1), S(1, block 2)]",
                "A merged dim: its outer factor over `dp`, each block of 2 of its inner factor over `tp`.",
            ),
        ],
    ),
    (
        "More ranks than heads",
        [
            (
                "tp=4",
                "2xS(1) 2xR",
                "With 2 kv heads, the heads of keys and values are in 2 shares, and 2 ranks in a row have the same "
                "one. This adds no collective. A collective over a part of the axis names it as a slice: `tp[:2]` is "
                "over 2 ranks in a row, `tp[::2]` over every second one.",
            ),
            (
                "tp=4",
                "S(1)",
                "The queries of the same layer: each of the two takes a part of the group. (An uneven size is cut into "
                "halves, and these again, so its shares are not those of `torch.chunk`.)",
            ),
            (
                "tp=4",
                "2xS(1, parts 4 2 2) 2xS(1, parts 4 2r 2r)",
                "Both in one packed matrix: 4 columns of queries over all ranks, keys and values shared by pairs.",
            ),
        ],
    ),
    (
        "Under windows",
        [
            (
                "tp=4",
                "S(1, spans 0:3 1:5 3:7 5:8)",
                "The operand of a convolution whose windows are 3 columns wide, for a result that is `S(1)`: each rank "
                "has its own columns and one of each neighbour. Only operands are sharded so; a plan asks for `S(1)`.",
            ),
        ],
    ),
]

EXAMPLE = """\
import torch
import tpcompiler

model = torch.export.export(torch.nn.Linear(8, 10), (torch.randn(2, 8),))
program = tpcompiler.parallelize(model, 4, {"weight": "S(0)"})
print(program.show("weight"))
"""

OWN = """## Your own program

`show(NAME)` draws a tensor of a program in memory or in files. `format="svg"` makes a
picture, and so does `tpcompiler inspect OUT --tensor weight -o weight.svg`. Pieces that the same ranks hold are one
cell.
"""

BOTTOM = """## Reshards

A reshard takes the fastest collectives: a shortest path over shardings. Each step is one collective over one axis, or
over several axes as one group, and costs a machine's predicted seconds ([search.md](search.md)). So a value that is cut
over two axes, in one dim or in two, evenly or not, is gathered at once: the same bytes and half the latency. Two steps
remain where they are faster: between nodes, and where they copy less of a large value. If only bytes on the wire count,
these are the paths for the tensor above in float32, in torch's notation:

| from | to | path | wire bytes |
|---|---|---|---|
"""

PATHS = [
    ("dp=2,tp=2", "[S(0), P(sum)]", "[R, R]"),
    ("dp=2,tp=2", "[P(sum), P(sum)]", "[R, R]"),
    ("dp=2,tp=2", "[S(0), S(0)]", "[R, R]"),
    ("dp=2,tp=2", "[S(0), S(1)]", "[R, R]"),
    ("dp=2,tp=2", "[S(0), S(1)]", "[S(1), S(0)]"),
    ("dp=2,tp=2", "[P(sum), S(0)]", "[S(0), S(1)]"),
    ("dp=2,tp=2", "[S(1), S(0)]", "[R, S(1)]"),
    ("tp=4", "S(1)", "S(1, spans 0:3 1:5 3:7 5:8)"),
]

WINDOWS = """
## Windows over a sharded dim

If the rows of images or the steps of a sequence are sharded, a rank's windows reach elements of other ranks:
convolutions, also transposed ones, pools, padding, and resizing by a whole number of times. The ranks then exchange the
elements at the edges of their shares in one all_to_all, in which a rank sends nothing to ranks that need nothing of it,
and each pads only what is outside of the whole. For windows of 2h + 1 elements, a rank between two others sends 2h
rows, however many rows it holds and however many ranks there are. A gather sends all rows of the others, but only once
for a whole chain of layers. The search compares the two by their seconds, as it does all choices: with few rows for
each rank and little to compute, it gathers.

- Equal windows over one value share an exchange. Over two dims there are two; the second brings the corners.
- A share smaller than the reach of its windows gets elements from more ranks than its neighbours.
- The dim is gathered, with the reason in the report, if it is dynamic, if some rank has no part of the result, and for
  ops without such a rule: pools that return positions, sampling, resizing to other sizes, gradients.
- Norms over the image reduce two numbers for each channel or group, and attention gathers its keys and values, so
  decoders and U-Nets run with their rows sharded from end to end.
- Every rank along the axis has its own graph, because an all_to_all lists its bytes for every rank.
"""


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
        for name, text, said in drawn:
            parts.append(f"`{text}` on `{name}`. {said}\n\n```\n{drawing(_mesh(name, text), text)}\n```\n")
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
    return "\n".join(parts) + "\n" + BOTTOM + "".join(rows) + WINDOWS


def _mesh(name: str, text: str = "") -> Mesh:
    factors = [int(degree) for degree in re.findall(r"(\d+)x", text)]
    return Mesh.of(read_mesh(None, name).written, {"tp": factors} if factors else {})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
