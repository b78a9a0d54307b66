"""Data-dependent sizes: torch renames them in every run, while a file has the names of the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tpcompiler._torch import aten, symbols_of
from tpcompiler.ir import edit
from tpcompiler.ir.sizes import statically_equal
from tpcompiler.judge.sound.folded import Folded
from tpcompiler.judge.sound.unsound import Unsound


def read_names(made: Folded, node: fx.Node, values: Sequence[torch.Tensor]) -> tuple[list[list[Any]], bool]:
    """Return a call's result shapes with the file's names for data-dependent sizes, and True if these are proved.

    The first op that counts something names the count, and others that count the same (`nonzero(m)` after `h[m]`) must
    use that name. Any other name must be believed.

    Raises:
        Unsound: a name that another count has, or another name for the same count.
    """
    given = symbols_of(fx.node.map_arg([node.args, dict(node.kwargs)], lambda used: used.meta.get("val")))
    shapes: list[list[Any]] = []
    symbols: dict[str, Any] = {}
    for value, recorded in zip(values, edit.outputs(node), strict=False):
        shape = list(value.shape)
        for dim, size in enumerate(shape):
            if dim < recorded.ndim and isinstance(size, torch.SymInt) and symbols_of([size]) - given:
                shape[dim] = recorded.shape[dim]
                symbols.setdefault(str(size), recorded.shape[dim])
        shapes.append(shape)
    if not symbols:
        return shapes, True
    names = list(symbols.values())
    what = _counted(made, node)
    if node.meta.get("unbacked_bindings"):
        for other, theirs in made.counts.items():
            if other != what and symbols_of(names) & symbols_of(theirs):
                raise Unsound(node, f"counts {_text(names)}, which is what another op counts")
        made.counts[what] = names
        return shapes, True
    if what not in made.counts:
        return shapes, False
    known = made.counts[what]
    if len(known) != len(names) or not all(map(statically_equal, known, names)):
        raise Unsound(node, f"counts {_text(names)}, and what it counts is {_text(known)}")
    return shapes, True


def _counted(made: Folded, node: fx.Node) -> Any:
    """Return a key for the count of an op: the true elements of masks, the distinct elements, or the op's own count."""
    whole = made.whole[node]
    if node.target in (aten.index.Tensor, aten.nonzero.default):
        masks = edit.operands(whole)
        if node.target is aten.index.Tensor:
            masks = [m for m in masks[1:] if edit.outputs(m)[0].dtype in (torch.bool, torch.uint8, torch.int8)]
        return ("true", *masks)
    if node.target in (aten._unique.default, aten._unique2.default):
        return "different", edit.operands(whole)[0]
    return whole.target, *edit.operands(whole)


def _text(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names))
