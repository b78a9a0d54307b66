"""Compare and divide dynamic sizes without adding guards."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch

from tpcompiler._torch import FloorDiv, Max, Min, statically_known_true

MOST_REMAINDERS = 64


def statically_equal(a: Any, b: Any) -> bool:
    """Return True if two sizes are equal in every run; adds no guard."""
    if statically_known_true(a == b):
        return True
    one, other = (_expression(v) for v in (a, b))
    if one == other:
        return True
    return any(isinstance(e, sympy.Expr) and e.has(FloorDiv) for e in (one, other)) and _equal_divided(one, other)


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True if two shapes have as many dims and equal sizes in every run; adds no guard."""
    return len(one) == len(other) and all(map(statically_equal, one, other))


def _expression(size: Any) -> sympy.Expr:
    return torch_form(size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size))


@functools.lru_cache(maxsize=4096)
def torch_form(expression: sympy.Expr) -> sympy.Expr:
    """Return a size's expression with torch's maxima and minima in place of sympy's, which files contain."""
    return (
        expression.replace(sympy.Max, Max).replace(sympy.Min, Min)
        if expression.has(sympy.Max, sympy.Min)
        else expression
    )


@functools.lru_cache(maxsize=4096)
def _equal_divided(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return True if sizes with divisions are equal for every remainder of the symbols, tried one by one.

    torch simplifies neither s**2 // s to s, nor (2*s + 1) // 4 to s // 2.
    """
    divisors = [int(d.args[1]) for d in one.atoms(FloorDiv) | other.atoms(FloorDiv) if d.args[1].is_Integer]
    period, symbols = math.lcm(*divisors), sorted(one.free_symbols | other.free_symbols, key=str)
    if period ** len(symbols) > MOST_REMAINDERS:
        return False
    for remainders in itertools.product(range(period), repeat=len(symbols)):
        at = {s: period * sympy.Dummy(str(s), integer=True) + r for s, r in zip(symbols, remainders, strict=True)}
        if len({_divide(size.xreplace(at)) for size in (one, other)}) > 1:
            return False
    return True


def _divide(size: sympy.Expr) -> sympy.Expr:
    """Carry out exact divisions and reduce the others to lowest terms: (2*s + 1) // (2*t) becomes s // t."""

    def divided(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        if (exact := _quotient(a, b)) is not None:
            return exact
        common = sympy.gcd_terms(sympy.expand(b)).as_coeff_Mul()[0]
        remainder, rest = sympy.expand(a).as_coeff_Add()
        terms = _quotient(rest, common)
        return FloorDiv(sympy.expand(a), b) if terms is None else FloorDiv(terms + remainder // common, b / common)

    return sympy.expand(size.replace(FloorDiv, divided))


def sym_quotient(a: Any, b: Any) -> Any | None:
    """Return `a / b` if `b` divides `a` in every run, else None; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    quotient = _quotient(*(v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (a, b)))
    if quotient is None or quotient.is_Integer:
        return None if quotient is None else int(quotient)
    env = (a if isinstance(a, torch.SymInt) else b).node.shape_env
    return env.create_symintnode(quotient, hint=None)


def is_fixed_part(part: Any, whole: Any) -> bool:
    """Return True if `part` is the same fraction of `whole` in every run: all of it, a half, two thirds."""
    one, other = (v.node.expr if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (part, whole))
    return bool(sympy.cancel(one / other).is_Rational)


@functools.lru_cache(maxsize=4096)
def _quotient(whole: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    quotient = sympy.cancel(whole / part)
    if quotient.is_Integer:
        return quotient
    if not quotient.is_polynomial() or not quotient.free_symbols:
        return None
    return quotient if all(c.is_integer for c in sympy.Poly(quotient).coeffs()) else None
