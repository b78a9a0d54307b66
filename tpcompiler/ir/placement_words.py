"""Shardings in plain words, printed next to their notation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.distributed.tensor import Partial, Shard

from tpcompiler.errors import PlanError
from tpcompiler.ir.mesh import Mesh
from tpcompiler.ir.placements import Cut, Piece, parse_placement

WHOLE = "whole on every rank"


def describe_sharding(text: str, mesh: Mesh) -> str:
    """Describe a sharding, or a change of one, in words: `S(0)` is "dim 0 cut over tp".

    Return "" for any other text.
    """
    sides = [_describe(side, mesh) for side in text.split(" -> ")]
    return " -> ".join(sides) if all(sides) else ""


def _describe(text: str, mesh: Mesh) -> str:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    texts = re.split(r", (?![^(]*\))", inside)
    if len(texts) != len(mesh.axes) or not all(texts):
        return ""
    try:
        parts = [part for each, (axis, _) in zip(texts, mesh.axes, strict=True) for part in _parts(each, axis, mesh)]
        phrases = [phrase for each, axis in parts for phrase in _over(each, axis)]
    except (PlanError, ValueError):
        return ""
    return ", ".join(phrases) or WHOLE


def _parts(text: str, axis: str, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yield the placement over an axis, or over each of its factors: `2xS(0) 2xR`."""
    factors = re.findall(r"\d+x([RSP](?:\([^)]*\))?)", text) if text[0].isdigit() else ()
    yield from zip(factors, mesh.parts_of(axis), strict=True) if factors else ((text, axis),)


def _over(text: str, axis: str) -> Iterator[str]:
    """Yield the words for one axis; nothing if the value is whole over it."""
    placement = parse_placement(text)
    if isinstance(placement, Partial):
        yield f"a partial {placement.reduce_op} on each rank of {axis}"
    elif isinstance(placement, Cut) and placement.pieces[0].size:
        parts = "; ".join(map(_part, placement.pieces))
        yield f"dim {placement.dim} cut over {axis} in {len(placement.pieces)} parts, each by itself ({parts})"
    elif isinstance(placement, (Shard, Cut)):
        how = _how(placement.pieces[0]) if isinstance(placement, Cut) else ""
        yield f"dim {placement.dim} cut over {axis}{how}"


def _part(piece: Piece) -> str:
    return f"{piece.size}{_how(piece)}" if piece.cut else f"{piece.size} whole"


def _how(piece: Piece) -> str:
    unit = f" in whole units of {piece.unit}" if piece.unit > 1 else ""
    block = f", each block of {piece.block} by itself" if piece.block else ""
    reached = " ".join(f"{start}:{stop}" for start, stop in piece.spans)
    spans = f", each rank with the elements that its windows reach: {reached}" if reached else ""
    again = f", before {piece.outside} cuts it again" if piece.outside else ""
    return f"{unit}{block}{again}{spans}"
