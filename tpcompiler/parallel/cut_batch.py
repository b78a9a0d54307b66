"""Cut the batch of inputs and outputs over the axes where that pays, if the caller leaves it to the search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import fx
from torch.distributed.tensor import Shard

from tpcompiler.cost.timeline import duration
from tpcompiler.errors import ShardingError, UnsupportedError
from tpcompiler.ir import edit
from tpcompiler.ir.placements import PlacementSpec
from tpcompiler.ir.program import Note, results_of
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.parallel.conversion import Conversion
from tpcompiler.parallel.pipeline import find_placements


def cut_batch(conversions: Mapping[str, Conversion]) -> dict[str, Conversion]:
    """Return conversions with placements of inputs and outputs where these were left to the search.

    Over one axis of the mesh after the other the batch is cut, if all calls are predicted to be faster so. It is dim 0
    of the first input with dims, and of all inputs and outputs with a dim 0 of that size.
    """
    if not any(own.cuts_batch for own in conversions.values()):
        return dict(conversions)
    axes, whole = list[str](), _seconds(conversions, ())
    least = whole
    for axis, degree in next(iter(conversions.values())).mesh.axes:
        if degree > 1 and (seconds := _seconds(conversions, [*axes, axis])) < least:
            least = seconds
            axes.append(axis)
    other = "; whole, nothing fits" if math.isinf(whole) else f" instead of {duration(whole)}"
    text = f"the batch is cut over {' and '.join(axes)}: {duration(least)} a call{other}"
    note = Note("search", text if axes else "the batch is whole: a call takes no less where an axis cuts it")
    cut = _cut(conversions, axes)
    return {
        n: replace(own, dropped=(*own.dropped, note)) if conversions[n].cuts_batch else own for n, own in cut.items()
    }


def _seconds(conversions: Mapping[str, Conversion], axes: Sequence[str]) -> float:
    """Return the predicted seconds of the calls, infinite where no placement suits."""
    with suppress(ShardingError, UnsupportedError):
        return find_placements([*_cut(conversions, axes).values()]).seconds
    return math.inf


def _cut(conversions: Mapping[str, Conversion], axes: Sequence[str]) -> dict[str, Conversion]:
    """Return conversions with the batch cut over axes, in those that leave it to the search."""
    placed = dict[str, Conversion]()
    for name, own in conversions.items():
        inputs = {node.name: node for node in own.program.user_inputs()}
        first = next((node for node in inputs.values() if edit.ndim(node)), None)
        if own.cuts_batch and first is not None:
            outputs = own.boundary[1]
            ours = {name: node for name, node in results_of(own.program).items() if edit.is_tensor(node)}
            named = _placements(inputs, first, axes), _placements(ours, first, axes) if outputs is None else outputs
            own = own.with_boundary(*named)
        placed[name] = replace(own, cuts_batch=False)
    return placed


def _placements(values: Mapping[str, fx.Node], first: fx.Node, axes: Sequence[str]) -> dict[str, PlacementSpec]:
    batch, spec = edit.shape(first)[0], {axis: Shard(0) for axis in axes}
    dims = {name: edit.shape(node)[:1] for name, node in values.items()} if axes else {}
    return {name: spec for name, sizes in dims.items() if sizes and statically_equal(sizes[0], batch)}
