"""Windows over a dim that is sharded: each rank gets the elements of other ranks that its windows reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tpcompiler._torch import OpOverload, aten
from tpcompiler.rules.notation import Frame, Window


def sliding(dim: str, at: int, size: int, kernel: int, stride: int, before: int, dilation: int = 1) -> Window:
    """Return the windows of a kernel over a dim of `size` elements with `before` elements of padding."""
    return Window(dim, at, size, partial(_slide, stride, before, dilation * (kernel - 1) + 1))


def _slide(stride: int, before: int, extent: int, start: int, stop: int) -> tuple[int, int, int]:
    return start * stride - before, (stop - 1) * stride - before + extent, 0


def spreading(dim: str, at: int, size: int, kernel: int, stride: int, before: int, dilation: int) -> Window:
    """Return the elements that a kernel spreads over a result, the first `before` of which are left out."""
    return Window(dim, at, size, partial(_spread, stride, before, dilation * (kernel - 1) + 1))


def _spread(stride: int, before: int, extent: int, start: int, stop: int) -> tuple[int, int, int]:
    first = -(-(start + before - extent + 1) // stride)
    return first, (stop - 1 + before) // stride + 1, start + before - stride * first


def repeating(dim: str, at: int, size: int, times: int) -> Window:
    """Return the elements that become `times` elements each."""
    return Window(dim, at, size, partial(_repeat, times))


def _repeat(times: int, start: int, stop: int) -> tuple[int, int, int]:
    first = start // times
    return first, (stop - 1) // times + 1, start - times * first


def between(dim: str, at: int, size: int, times: int) -> Window:
    """Return the elements between which `times` as many lie, at the centres of equal parts."""
    return Window(dim, at, size, partial(_between, times))


def _between(times: int, start: int, stop: int) -> tuple[int, int, int]:
    first, last = ((2 * place + 1 - times) // (2 * times) for place in (start, stop - 1))
    return first, last + 2, start - times * first


def in_rule(windows: Mapping[str, Window], body: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a rule for these windows, by the factor of the result."""
    return {"windows": windows, "local": dict.fromkeys(windows, body)}


def arguments_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of others."""
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    return given | dict(zip(given, args, strict=False)) | dict(kwargs)


def padded(x: Tensor, frames: Sequence[Frame], space: int, value: float = 0.0) -> Tensor:
    """Return the last `space` dims with the elements outside of the whole that the windows reach."""
    pads = [0] * (2 * space)
    for frame in frames:
        last = 2 * (space - 1 - frame.at)  # the last dim goes first
        pads[last : last + 2] = frame.before, frame.behind
    return aten.constant_pad_nd.default(x, pads, value) if any(pads) else x


def outside(frames: Sequence[Frame], given: Sequence[Any]) -> list[Any]:
    """Return an argument of a call by dim of space, 0 for those in frames."""
    in_frames = {frame.at for frame in frames}
    return [0 if at in in_frames else each for at, each in enumerate(given)]


def trimmed(result: Tensor, frames: Sequence[Frame], space: int, starts: Sequence[int]) -> Tensor:
    """Return the share of a result that begins at these places of its dims of space."""
    for frame, start in zip(frames, starts, strict=True):
        dim = result.ndim - space + frame.at
        if (start, frame.size) != (0, result.shape[dim]):
            result = result.narrow(dim, start, frame.size)
    return result
