"""Symbolic sizes: symbols, ranges, examples, and substitution."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._pytree import tree_flatten
from torch.utils._sympy.value_ranges import ValueRanges


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    sizes = [s for v in tree_flatten(list(values))[0] for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return set().union(*(s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)))


def divided_sizes(
    mode: FakeTensorMode, parts: Mapping[sympy.Symbol, int], ranges: Mapping[sympy.Symbol, Any]
) -> tuple[FakeTensorMode, dict[sympy.Symbol, sympy.Expr]]:
    """Return a copy of a fake mode, and symbol s of `parts` -> the expression `parts[s] * t` that replaces it.

    t is a new symbol with s's range in `ranges`, divided. Guards on s are dropped, because they constrain sizes that a
    sharded input does not have.
    """
    from torch._dynamo.source import ConstantSource  # importing dynamo takes a second

    env = mode.shape_env
    assert env is not None
    divided_env = copy.copy(env)
    for name, value in vars(env).items():
        if isinstance(value, (dict, list, set)):
            setattr(divided_env, name, copy.copy(value))
    gone = parts.keys() | {s for s, by in env.replacements.items() if by.free_symbols & parts.keys()}
    divided_env.guards = [guard for guard in env.guards if not guard.expr.free_symbols & gone]
    standing: dict[sympy.Symbol, sympy.Expr] = {}
    examples = _examples(env, parts, ranges)
    _hints(divided_env).update({s: sympy.Integer(size) for s, size in examples.items() if s not in parts})
    for symbol, count in parts.items():
        new = divided_env.create_symbol(
            examples[symbol] // count, ConstantSource(f"a part of {symbol}"), DimDynamic.DYNAMIC
        )
        divided_env.var_to_range[new] = ValueRanges(*divided_range(ranges[symbol], count))
        standing[symbol] = count * new
    return FakeTensorMode(shape_env=divided_env, allow_non_fake_inputs=mode.allow_non_fake_inputs), standing


def _examples(
    env: Any, parts: Mapping[sympy.Symbol, int], ranges: Mapping[sympy.Symbol, Any]
) -> dict[sympy.Symbol, int]:
    """Return the example's size for every symbol; those of `parts` are rounded up to a multiple, at least twice it.

    torch makes a size of 1 static. If rounding violates a guard of the export, such as one size not exceeding another,
    all sizes are scaled by a common factor instead.
    """
    sizes_of = example_sizes(env)
    sizes_of |= {symbol: sym_hint(env.create_symintnode(symbol, hint=None)) for symbol in parts}
    rounded = sizes_of | {s: max(-(-sizes_of[s] // count), 2) * count for s, count in parts.items()}
    rounded |= {
        s: int(by.xreplace(rounded)) for s, by in env.replacements.items() if by.free_symbols <= sizes_of.keys()
    }
    if all(guard.expr.xreplace(rounded) != sympy.false for guard in env.guards):
        return rounded
    times = math.lcm(*(count // math.gcd(count, sizes_of[s]) for s, count in parts.items()))
    times *= 2 if any(sizes_of[s] * times == count for s, count in parts.items()) else 1
    scaled = {s: size * times for s, size in sizes_of.items()}
    return rounded if any(s in scaled and scaled[s] > sizes.upper for s, sizes in ranges.items()) else scaled


def example_sizes(env: Any) -> dict[sympy.Symbol, int]:
    """Return the size in the export's example for every symbol that has one; torch notes those of differences too."""
    return {symbol: int(size) for symbol, size in _hints(env).items() if symbol.is_Symbol}


def _hints(env: Any) -> dict[sympy.Symbol, sympy.Integer]:
    hints: dict[sympy.Symbol, sympy.Integer] = vars(env).get("backed_var_to_val", vars(env).get("var_to_val"))
    return hints  # torch 2.13 renamed it


def divided_range(bounds: Any, count: int) -> tuple[Any, Any]:
    """Return the least and the greatest t with `count * t` in a range; the first is greater if there is no such t."""
    lower, upper = bounds.lower, bounds.upper
    return sympy.ceiling(lower / count), upper // count if upper.is_Integer else upper


def substituted(value: Any, mode: FakeTensorMode, standing: Mapping[sympy.Symbol, sympy.Expr]) -> Any:
    """Return a size or fake tensor in another mode, with symbols replaced as in `standing`."""
    env = mode.shape_env
    assert env is not None
    if isinstance(value, torch.SymInt):
        return env.create_symintnode(value.node.expr.xreplace(standing), hint=None)
    if isinstance(value, torch.SymFloat):
        return env.create_symfloatnode(value.node.expr.xreplace(standing), hint=None)
    if isinstance(value, torch.SymBool):
        return env.create_symboolnode(value.node.expr.xreplace(standing))
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = ([substituted(s, mode, standing) for s in sizes] for sizes in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def sym_multiple(size: torch.SymInt) -> tuple[sympy.Symbol, int] | None:
    """Return (s, n) for a size that is n * s for one symbol s, else None."""
    expr = size.node.expr
    if not expr.free_symbols:
        return None  # a size that export took for dynamic and then proved constant
    symbol = next(iter(expr.free_symbols))
    count = expr / symbol
    return (symbol, int(count)) if count.is_Integer else None


def size_range(mode: FakeTensorMode, symbol: sympy.Symbol) -> Any:
    """Return the range of a symbol in the mode's shape environment."""
    assert mode.shape_env is not None
    return mode.shape_env.var_to_range[symbol]


def shape_facts(mode: FakeTensorMode) -> tuple[int, ...]:
    """Count the shape environment's guards, replacements and deferred assertions: growth is specialisation."""
    env = mode.shape_env
    if env is None:
        return ()
    return len(env.guards), len(env.replacements), sum(map(len, env.deferred_runtime_asserts.values()))


UNKNOWN_SIZE = 8192  # torch's own fallback


def sym_hint(size: Any) -> int:
    """Return the size in the export's example, or a large one if the size depends on data."""
    if isinstance(size, int):
        return size
    env, expr = size.node.shape_env, size.node.expr
    if hasattr(env, "optimization_hint"):  # from torch 2.13 on
        return int(env.optimization_hint(expr))
    hint = env.size_hint(expr, allow_none=True)
    return int(expr.subs(dict.fromkeys(expr.free_symbols, UNKNOWN_SIZE)) if hint is None else hint)


def sym_expr(size: Any) -> Any:
    """Return a size as a sympy expression of the program's symbols."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr
