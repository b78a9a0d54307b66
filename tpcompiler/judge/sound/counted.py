"""Sizes that the data decide: torch names them anew each time an op is run, and a file has the names of the export."""

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
    """The shapes of what a call was found to make, with the file's names for sizes that the data decide.

    And whether these names are known to be right: the first op that counts something names the count, and others that
    count the same (`nonzero(m)` after `h[m]`) must use that name. A name of neither is to be believed.

    Raises:
        Unsound: a name that another count has, or another name for the same count.
    """
    given = symbols_of(fx.node.map_arg([node.args, dict(node.kwargs)], lambda used: used.meta.get("val")))
    shapes: list[list[Any]] = []
    found: dict[str, Any] = {}
    for value, said in zip(values, edit.outputs(node), strict=False):
        shape = list(value.shape)
        for dim, size in enumerate(shape):
            if dim < said.ndim and isinstance(size, torch.SymInt) and symbols_of([size]) - given:
                shape[dim] = said.shape[dim]
                found.setdefault(str(size), said.shape[dim])
        shapes.append(shape)
    if not found:
        return shapes, True
    names = list(found.values())
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
    """What an op counts, alike for ops that count the same: true elements of masks, different elements, or its own."""
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
