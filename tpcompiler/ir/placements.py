"""Placements as text: torch's `R`, `S(dim)`, `P(op)`, and `S(dim, parts 8 4)`; and in plain words.

A spec is one placement, or one per mesh axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpcompiler.errors import PlanError
from tpcompiler.ir.mesh import Mesh

_N = r"[1-9]\d{0,17}"  # a size
WHOLE = "whole on every rank"
REDUCE_OPS = ("sum", "avg", "product", "max", "min")

# One placement (a mesh of one axis), or {axis: placement} with absent axes replicated.
PlacementSpec = Placement | Mapping[str, Placement]


class Piece(NamedTuple):
    """One piece of a dim, or the whole dim (size 0), and how an axis shards it: by units, in blocks, or not at all."""

    size: int = 0
    cut: bool = True
    unit: int = 1
    block: int = 0
    outside: str = ""  # the axis nested in this one although the mesh names it first
    spans: tuple[tuple[int, int], ...] = ()  # the elements of each rank, where they overlap


@dataclass(frozen=True, repr=False)
class Cut(Placement):
    """A shard of a dim whose position torch's `Shard` cannot express: `S(0, parts 16 8 8r)`."""

    dim: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        super().__init__()  # torch 2.11 requires it

    def __repr__(self) -> str:
        return format_placement(self)

    __str__ = __repr__


def parse_placement(text: str) -> Placement:
    """Read `R`, `S(1)`, `S(-1)`, `P(sum)` (also torch's long names `Replicate()`, `Shard(1)`), and the text of a `Cut`.

    Raises:
        PlanError: any other text.
    """
    compact = re.sub(r"\s+", "", text)
    if re.fullmatch(r"R|Replicate(\(\))?", compact):
        return Replicate()
    if match := re.fullmatch(r"(?:S|Shard)\((?:dim=)?(-?[0-9]{1,4})\)", compact):
        return Shard(int(match[1]))
    if (match := re.fullmatch(r"(?:P|Partial)\(['\"]?(\w*)['\"]?\)", compact)) and (match[1] or "sum") in REDUCE_OPS:
        return Partial(match[1] or "sum")
    if match := re.fullmatch(r"S\(\s*(-?[0-9]{1,4})\s*,(.+)\)", text.strip(), re.DOTALL):
        return Cut(int(match[1]), _pieces(match[2], text))
    raise PlanError(
        f"{text!r} is not a placement",
        help=f"write R, S(dim) such as S(0) or S(-1), or P(op) with op one of {', '.join(REDUCE_OPS)}",
    )


def read_placement(value: object, asked_by: str) -> Placement:
    """Read a placement of torch, or its text; torch prints its placements as this project does.

    Raises:
        PlanError: anything else.
    """
    try:
        return parse_placement(str(value))
    except PlanError as error:
        raise PlanError(error.message, help=error.help, asked_by=asked_by) from None


def read_spec(value: Any, asked_by: str) -> PlacementSpec:
    """Read the placements of one tensor, by axis or for the only axis.

    Raises:
        PlanError: no placement, or an axis that is no name.
    """
    if not isinstance(value, Mapping):
        return read_placement(value, asked_by)
    for axis in value:
        if not isinstance(axis, str):
            raise PlanError(
                f"mesh axis {axis!r} is not a name", help='write a name such as {"tp": "S(0)"}', asked_by=asked_by
            )
    return {axis: read_placement(placement, asked_by) for axis, placement in value.items()}


def _pieces(words: str, text: str) -> tuple[Piece, ...]:
    """Read the text after the dim of a cut; only text that `_words` prints is accepted."""
    phrases = [" ".join(word.split()) for word in words.split(",")]
    if phrases[0].startswith("parts "):
        each = [
            re.fullmatch(rf"({_N})(r?)(?:u({_N}))?(?:b({_N}))?(?:<(\S+))?", word) for word in phrases[0].split()[1:]
        ]
        pieces = [Piece(int(p[1]), not p[2], int(p[3] or 1), int(p[4] or 0), p[5] or "") for p in each if p]
    else:
        matches = (re.search(rf"\b{name} ([^\s,]+)", ", ".join(phrases)) for name in ("unit", "block", "outside"))
        unit, block, outside = (match[1] if match else "" for match in matches)
        numbers = [int(value) if re.fullmatch(_N, value) else 0 for value in (unit, block)]
        spans = [re.findall(r"(\d{1,18}):(\d{1,18})(?= |$)", phrase) for phrase in phrases if phrase[:6] == "spans "]
        own = tuple((int(start), int(stop)) for start, stop in spans[0]) if spans else ()
        pieces = [Piece(0, True, numbers[0] or 1, numbers[1], outside, own)]
    if pieces and sorted(_words(pieces)) == sorted(phrases):
        return tuple(pieces)
    raise PlanError(
        f"{text!r} is not a placement",
        help="write the sizes of parts, such as S(0, parts 16 8 8r), or a unit or a block, such as S(0, unit 4)",
    )


def _words(pieces: Sequence[Piece]) -> list[str]:
    """Return the details that torch's `S(dim)` cannot express."""
    if any(piece.size for piece in pieces):
        return [f"parts {' '.join(map(_part, pieces))}"]
    _, _, unit, block, outside, spans = pieces[0]
    words = [f"outside {outside}"] * bool(outside) + [f"unit {unit}"] * (unit > 1) + [f"block {block}"] * (block > 0)
    return words + [f"spans {' '.join(f'{start}:{stop}' for start, stop in spans)}"] * bool(spans)


def _part(piece: Piece) -> str:
    size, cut, unit, block, outside, _ = piece
    return (
        f"{size}{f'u{unit}' * (unit > 1)}{f'b{block}' * (block > 0)}{f'<{outside}' * bool(outside)}"
        if cut
        else f"{size}r"
    )


def format_placement(placement: Placement) -> str:
    """Return the short text of a placement: `R`, `S(1)`, `P(sum)`, `S(2, unit 4, block 24)`."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Cut):
        return f"S({', '.join([str(placement.dim), *_words(placement.pieces)])})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"


def format_spec(spec: PlacementSpec) -> str | dict[str, str]:
    """Return the text of a spec as plain data, for a plan file or the manifest."""
    if isinstance(spec, Mapping):
        return {axis: format_placement(placement) for axis, placement in spec.items()}
    return format_placement(spec)


def describe_sharding(text: str, mesh: Mesh) -> str:
    """Describe a sharding, or a change of one, in words: `S(0)` is "dim 0 cut over tp".

    Return "" for any other text.
    """
    sides = [_describe_side(side, mesh) for side in text.split(" -> ")]
    return " -> ".join(sides) if all(sides) else ""


def _describe_side(text: str, mesh: Mesh) -> str:
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    texts = re.split(r", (?![^(]*\))", inside)
    if len(texts) != len(mesh.axes) or not all(texts):
        return ""
    try:
        parts = [
            part
            for each, (axis, _) in zip(texts, mesh.axes, strict=True)
            for part in _placements_over(each, axis, mesh)
        ]
        phrases = [phrase for each, axis in parts for phrase in _describe_placement(each, axis)]
    except (PlanError, ValueError):
        return ""
    return ", ".join(phrases) or WHOLE


def _placements_over(text: str, axis: str, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Yield the placement over an axis, or over each of its factors: `2xS(0) 2xR`."""
    factors = re.findall(r"\d+x([RSP](?:\([^)]*\))?)", text) if text[0].isdigit() else ()
    yield from zip(factors, mesh.parts_of(axis), strict=True) if factors else ((text, axis),)


def _describe_placement(text: str, axis: str) -> Iterator[str]:
    """Yield the words for one axis; nothing if the value is whole over it."""
    placement = parse_placement(text)
    if isinstance(placement, Partial):
        yield f"a partial {placement.reduce_op} on each rank of {axis}"
    elif isinstance(placement, Cut) and placement.pieces[0].size:
        parts = "; ".join(map(_describe_piece, placement.pieces))
        yield f"dim {placement.dim} cut over {axis} in {len(placement.pieces)} parts, each by itself ({parts})"
    elif isinstance(placement, (Shard, Cut)):
        how = _describe_cut(placement.pieces[0]) if isinstance(placement, Cut) else ""
        yield f"dim {placement.dim} cut over {axis}{how}"


def _describe_piece(piece: Piece) -> str:
    return f"{piece.size}{_describe_cut(piece)}" if piece.cut else f"{piece.size} whole"


def _describe_cut(piece: Piece) -> str:
    unit = f" in whole units of {piece.unit}" if piece.unit > 1 else ""
    block = f", each block of {piece.block} by itself" if piece.block else ""
    reached = " ".join(f"{start}:{stop}" for start, stop in piece.spans)
    spans = f", each rank with the elements that its windows reach: {reached}" if reached else ""
    again = f", before {piece.outside} cuts it again" if piece.outside else ""
    return f"{unit}{block}{again}{spans}"
