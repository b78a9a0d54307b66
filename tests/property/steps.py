"""The steps that a random program is made of: ops from the rule table, what they take, and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

Shape = tuple[int, ...]
Draw = st.DrawFn
Args = tuple[Any, ...] | None  # None: the step cannot be on this shape
WIDTHS = st.sampled_from([4, 8, 6, 12, 5, 3, 7, 1])
ROWS = 11  # of an embedding: over 2 to 4 ranks never even
EDGE = 0.137  # what values are compared with: they may be 0 by an exact sum, and never this


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention over [..., s, width]; every `groups` query heads share a key and value head."""

    def __init__(self, width: int, heads: int, groups: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.causal = heads, groups, causal
        self.q = nn.Linear(width, heads * 3)
        self.k = nn.Linear(width, heads // groups * 3, bias=False)
        self.v = nn.Linear(width, heads // groups * 3)
        self.o = nn.Linear(heads * 3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.groups > 1)
        return x + self.o(made.transpose(-3, -2).flatten(-2))


class Shaped(nn.Module):
    """A layer without weights, whose boundary a plan may pin."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Running(nn.Module):
    """A buffer that every call writes, and that the next one reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x + self.state
        self.state.mul_(0.5).add_(torch.tanh(x).mean(0) if x.ndim > self.state.ndim else torch.tanh(x))
        return made


class Rows(nn.Module):
    """Rows of a buffer that every call replaces, as a cache of keys does."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(shape[0] + 2, *shape[1:]))
        self.register_buffer("at", torch.arange(shape[0]) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, self.at, torch.tanh(x))
        return self.kept * 2


class Int8(nn.Module):
    """A layer over whole numbers, with a scale for each row of them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-9, 9, (inner, width), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(inner, 1) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.scale)


@dataclass(frozen=True)
class Kind:
    """How a step runs, `run(*operands, its weights if any, *args)`.

    takes: "one", the row "ids", or with a second operand of the "same" shape, one that it is "broadcast" with, or one
    whose rows fit its "columns".
    """

    run: Callable[..., torch.Tensor]
    args: Callable[[Draw, Shape], Args] = lambda draw, shape: ()
    own: Callable[..., nn.Module | torch.Tensor] | None = None  # (shape, *args) -> a layer or a parameter
    takes: str = "one"
    ndim: int = 0  # at least


def _layer(value: torch.Tensor, layer: nn.Module, *_: Any) -> torch.Tensor:
    made: torch.Tensor = layer(value)
    return made


def _dim(draw: Draw, shape: Shape) -> int:
    return draw(st.integers(-len(shape), len(shape) - 1))


def _one_dim(draw: Draw, shape: Shape) -> Args:
    return (_dim(draw, shape),)


def _two_dims(draw: Draw, shape: Shape) -> Args:
    return _dim(draw, shape), _dim(draw, shape)


def _reduced(draw: Draw, shape: Shape) -> Args:
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    return dims, draw(st.booleans())


def _reduced_one(draw: Draw, shape: Shape) -> Args:
    return _dim(draw, shape), draw(st.booleans())


def _at(draw: Draw, shape: Shape) -> Args:
    dim = _dim(draw, shape)
    return dim, draw(st.integers(-shape[dim], shape[dim] - 1))


def _some(draw: Draw, shape: Shape) -> Args:
    dim = _dim(draw, shape)
    return dim, draw(st.integers(1, shape[dim]))


def _sliced(draw: Draw, shape: Shape) -> Args:
    dim = draw(st.integers(0, len(shape) - 1))
    return dim, draw(st.integers(0, shape[dim] - 1)), draw(st.sampled_from([1, 1, 2, 3]))


def _even_dim(draw: Draw, shape: Shape) -> Args:
    even = [d for d, size in enumerate(shape) if size > 1 and size % 2 == 0]
    return (draw(st.sampled_from(even)),) if even else None


def _split_dim(draw: Draw, shape: Shape) -> Args:
    dim = draw(st.integers(0, len(shape) - 1))
    factor = draw(st.sampled_from([f for f in range(1, shape[dim] + 1) if shape[dim] % f == 0]))
    return (dim, (-1, factor) if draw(st.booleans()) else (factor, -1)) if shape[dim] else None


def _merged_dims(draw: Draw, shape: Shape) -> Args:
    first = draw(st.integers(0, len(shape) - 2))
    return first, draw(st.integers(first + 1, len(shape) - 1))


def _padded(draw: Draw, shape: Shape) -> Args:
    pads = [draw(st.integers(0, 2)) for _ in range(2 * draw(st.integers(1, min(2, len(shape)))))]
    return pads, draw(st.sampled_from([0.0, 1.5]))


def _positions(draw: Draw, shape: Shape) -> Args:
    dim = draw(st.integers(0, len(shape) - 1))
    return dim, tuple(draw(st.lists(st.integers(0, shape[dim] - 1), min_size=1, max_size=5)))


def _heads(draw: Draw, shape: Shape) -> Args:
    return (*draw(st.sampled_from([(4, 1), (2, 1), (4, 2), (8, 4), (4, 4), (3, 1)])), draw(st.booleans()))


def _window(draw: Draw, shape: Shape) -> Args:
    groups = 2 if shape[1] % 2 == 0 and draw(st.booleans()) else 1
    kernel = draw(st.sampled_from([k for k in (1, 2, 3) if k <= shape[2]]))
    return draw(st.sampled_from([4, 6, 8])), kernel, draw(st.sampled_from([1, 1, 2])), draw(st.integers(0, 1)), groups


def _groups(draw: Draw, shape: Shape) -> Args:
    return (draw(st.sampled_from([g for g in range(1, shape[1] + 1) if shape[1] % g == 0])),)


def _width(draw: Draw, shape: Shape) -> Args:
    return (draw(WIDTHS),)


def _trailing(shape: Shape, count: int, ones: int) -> torch.Tensor:
    """A parameter that is broadcast: of the last `count` dims, every one of whose bit in `ones` is set of size 1."""
    return torch.randn([1 if ones >> at & 1 else size for at, size in enumerate(shape[len(shape) - count :])])


def _broadcast(draw: Draw, shape: Shape) -> Args:
    return draw(st.integers(0, len(shape))), draw(st.sampled_from([0, 0, 1, 2]))


def _slice(value: torch.Tensor, dim: int, start: int, step: int) -> torch.Tensor:
    return value[(*[slice(None)] * dim, slice(start, None, step))]


def _halves(value: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    return value.chunk(2, dim)


def _gated(value: torch.Tensor, dim: int) -> torch.Tensor:
    gate, up = _halves(value, dim)
    return F.silu(gate) * up


def _turned(value: torch.Tensor, dim: int) -> torch.Tensor:
    first, second = _halves(value, dim)
    return value * 0.5 + torch.cat([-second, first], dim)


def _looked_up(value: torch.Tensor, dim: int, at: tuple[int, ...]) -> torch.Tensor:
    return value[(*[slice(None)] * dim, torch.tensor(at))]


def _added_at(value: torch.Tensor, dim: int, at: tuple[int, ...]) -> torch.Tensor:
    index = torch.tensor(at)
    return value.index_add(dim, index, torch.tanh(value.index_select(dim, index)))


def _in_place(value: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    made = value.clone()
    made.select(dim, index).mul_(2).add_(1)
    made.relu_()
    return made


def _flags(value: torch.Tensor) -> torch.Tensor:
    return (value > EDGE).long()


KINDS = {
    "linear": Kind(_layer, lambda d, s: (d(WIDTHS), d(st.booleans())), lambda s, w, b: nn.Linear(s[-1], w, b), ndim=2),
    "mlp": Kind(_layer, _width, lambda s, w: Mlp(s[-1], w), ndim=2),
    "int8": Kind(_layer, _width, lambda s, w: Int8(s[-1], w), ndim=2),
    "attention": Kind(_layer, _heads, lambda s, *how: Attention(s[-1], *how), ndim=3),
    "embedding": Kind(_layer, _width, lambda s, w: nn.Embedding(ROWS, w), takes="ids"),
    "layer_norm": Kind(_layer, own=lambda s: nn.LayerNorm(s[-1]), ndim=2),
    "rms_norm": Kind(_layer, own=lambda s: nn.RMSNorm(s[-1]), ndim=2),
    "group_norm": Kind(_layer, _groups, lambda s, g: nn.GroupNorm(g, s[1]), ndim=3),
    "conv1d": Kind(
        _layer, _window, lambda s, o, k, stride, pad, g: nn.Conv1d(s[1], o, k, stride, pad, groups=g), ndim=3
    ),
    "shaped": Kind(_layer, own=lambda s: Shaped(), ndim=1),
    "running": Kind(_layer, own=lambda s: Running(s[1:]), ndim=2),
    "running_whole": Kind(_layer, own=lambda s: Running(s), ndim=1),
    "rows": Kind(_layer, own=lambda s: Rows(s), ndim=1),
    "weight": Kind(lambda a, b, _: a @ b, _width, lambda s, w: torch.randn(s[-1], w) / s[-1] ** 0.5, ndim=2),
    "bias": Kind(lambda a, b, *_: a + b, _broadcast, _trailing),
    "scale": Kind(lambda a, b, *_: a * b, _broadcast, _trailing),
    "table": Kind(lambda ids, t, _: t[ids * 1], _width, lambda s, w: torch.randn(ROWS, w), takes="ids"),
    "relu": Kind(torch.relu),
    "gelu": Kind(F.gelu),
    "sigmoid": Kind(torch.sigmoid),
    "negative": Kind(lambda a: 1 - a),
    "double": Kind(lambda a: a + a),
    "square": Kind(lambda a: torch.tanh(a) * a),
    "clamp": Kind(lambda a: a.clamp(-1.5, 1.25)),
    "float64": Kind(lambda a: a.double().tanh().float()),
    "add": Kind(torch.add, takes="broadcast"),
    "subtract": Kind(lambda a, b: a - 0.5 * b, takes="broadcast"),
    "multiply": Kind(lambda a, b: torch.tanh(a) * b, takes="broadcast"),
    "divide": Kind(lambda a, b: a / (1.5 + torch.tanh(b)), takes="broadcast"),
    "maximum": Kind(torch.maximum, takes="broadcast"),
    "where": Kind(lambda a, b: torch.where(a > EDGE, a, b), takes="broadcast"),
    "masked_fill": Kind(lambda a, b: a.masked_fill(b > EDGE, -2.0), takes="same"),
    "residual": Kind(torch.add, takes="same"),
    "matmul": Kind(lambda a, b: torch.tanh(a) @ b, takes="columns", ndim=2),
    "gram": Kind(lambda a: torch.tanh(a) @ a.transpose(-1, -2), ndim=2),
    "bmm": Kind(lambda a, b: torch.tanh(a) @ b.transpose(-1, -2), takes="same", ndim=2),
    "einsum": Kind(lambda a, b: torch.einsum("...i,...j->...ij", torch.tanh(a), b), takes="same", ndim=1),
    "attend": Kind(lambda a, b: F.scaled_dot_product_attention(a, b, a), takes="same", ndim=3),
    "softmax": Kind(torch.softmax, _one_dim, ndim=1),
    "log_softmax": Kind(torch.log_softmax, _one_dim, ndim=1),
    "normalize": Kind(lambda a, dim: F.normalize(a, dim=dim), _one_dim, ndim=1),
    "sum": Kind(torch.sum, _reduced, ndim=1),
    "sum_all": Kind(lambda a: a.sum() + a.mean(), ndim=1),
    "mean": Kind(torch.mean, _reduced, ndim=1),
    "var": Kind(lambda a, dim, keep: a.var(dim, unbiased=False, keepdim=keep), _reduced, ndim=1),
    "amax": Kind(torch.amax, _reduced, ndim=1),
    "amin": Kind(torch.amin, _reduced, ndim=1),
    "max_of": Kind(lambda a, dim, keep: a.max(dim, keepdim=keep).values, _reduced_one, ndim=1),
    "vector_norm": Kind(lambda a, dim, keep: torch.linalg.vector_norm(a, 2, dim, keep), _reduced, ndim=1),
    "logsumexp": Kind(torch.logsumexp, _reduced, ndim=1),
    "cumsum": Kind(torch.cumsum, _one_dim, ndim=1),
    "sort": Kind(lambda a, dim: a.sort(dim).values, _one_dim, ndim=1),
    "topk": Kind(lambda a, dim, k: a.topk(k, dim).values, _some, ndim=1),
    "cat": Kind(lambda a, b, dim: torch.cat([a, b], dim), _one_dim, takes="same", ndim=1),
    "cat_itself": Kind(lambda a, dim: torch.cat([a, torch.tanh(a), a], dim), _one_dim, ndim=1),
    "stack": Kind(lambda a, b, dim: torch.stack([a, b], dim), _one_dim, takes="same", ndim=1),
    "gated": Kind(_gated, _even_dim, ndim=1),
    "turned": Kind(_turned, _even_dim, ndim=1),
    "half": Kind(lambda a, dim: _halves(a, dim)[1] * 2, _even_dim, ndim=1),
    "split": Kind(lambda a, dim, size: a.split(size, dim)[0] * 2, _some, ndim=1),
    "unbind": Kind(lambda a, dim: torch.stack([torch.tanh(b) for b in a.unbind(dim)], -1), _one_dim, ndim=1),
    "slice": Kind(_slice, _sliced, ndim=1),
    "narrow": Kind(lambda a, dim, size: a.narrow(dim, 0, size), _some, ndim=1),
    "select": Kind(lambda a, dim, index: a.select(dim, index), _at, ndim=1),
    "in_place": Kind(_in_place, _at, ndim=1),
    "flip": Kind(lambda a, dim: a.flip(dim), _one_dim, ndim=1),
    "roll": Kind(lambda a, dim: a.roll(1, dim), _one_dim, ndim=1),
    "pad": Kind(lambda a, pads, value: F.pad(a, pads, value=value), _padded, ndim=1),
    "tril": Kind(torch.tril, lambda d, s: (d(st.integers(-1, 1)),), ndim=2),
    "triu": Kind(torch.triu, lambda d, s: (d(st.integers(-1, 1)),), ndim=2),
    "transpose": Kind(torch.transpose, _two_dims, ndim=1),
    "permute": Kind(torch.permute, lambda d, s: (tuple(d(st.permutations(range(len(s))))),), ndim=1),
    "flatten": Kind(torch.flatten, _merged_dims, ndim=2),
    "unflatten": Kind(lambda a, dim, sizes: a.unflatten(dim, sizes), _split_dim, ndim=1),
    "view": Kind(lambda a, width: a.reshape(-1, width), lambda d, s: (s[-1],), ndim=1),
    "unsqueeze": Kind(lambda a, dim: a.unsqueeze(dim), lambda d, s: (d(st.integers(0, len(s))),)),
    "squeeze": Kind(lambda a, dim: a.squeeze(dim), _one_dim, ndim=1),
    "expand": Kind(lambda a, n: a.unsqueeze(0).expand(n, *a.shape) + 1, lambda d, s: (d(st.integers(2, 4)),)),
    "repeat": Kind(lambda a, n: a.repeat(n, *[1] * (a.ndim - 1)), lambda d, s: (d(st.integers(2, 3)),), ndim=1),
    "index": Kind(_looked_up, _positions, ndim=1),
    "index_select": Kind(lambda a, dim, at: a.index_select(dim, torch.tensor(at)), _positions, ndim=1),
    "index_add": Kind(_added_at, _positions, ndim=1),
    "gather": Kind(lambda a, b, dim: a.gather(dim, _flags(b)), _even_dim, takes="same", ndim=1),
    "scatter_add": Kind(lambda a, b, dim: a.scatter_add(dim, _flags(b), b), _even_dim, takes="same", ndim=1),
    "one_hot": Kind(lambda ids: F.one_hot(ids, ROWS).float(), takes="ids"),
}
