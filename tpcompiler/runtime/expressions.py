"""Bound the expressions in a program's file: only arithmetic of sizes, with small numbers.

torch evaluates two kinds: sizes, with sympy, and input checks (guards), as Python. Both are parsed here and accepted
only if torch writes every part of them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable

import torch

LONGEST = 20_000  # characters
PARTS = 4_000
BITS = 4_096  # of the largest number that evaluation can produce
SIZE_BITS = 64  # of an unknown size
FLOAT_BITS = 128  # of a float's integer part, unless its exponent is large
TERMS = 10_000  # of a size after expansion; real models have fewer than ten
LARGEST_EXPONENT = 64  # of a power, and the places of a shift

SYMPY = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Abs|Max|Min|floor|ceiling|sqrt|Piecewise|ExprCondPair"
    "|And|Or|Not|Xor|ITE|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|Relational|(Strict)?(LessThan|GreaterThan)"
    "|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|(CeilTo|FloorTo|TruncTo|RoundTo)Int|CeilDiv|LShift|RShift"
    "|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|RoundDecimal|ToFloat"
    "|Identity"
)
SYMPY_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
SYMPY_BOUNDED = ("PowByNatural", "FloatPow")  # torch returns infinity for large results
PLAIN = ("Add", "Sub", "USub", "Symbol", "Integer", "Float", "Rational", "ToFloat")  # no functions
SYMPY_LEAVES = re.compile(r"oo|pi|E|true|false|int_oo|[a-z]+\d+")
SYMPY_TEXTS = {"Symbol": r"[A-Za-z_]\w*", "Float": r"[-+]?[\d.]+(e[-+]?\d{1,3})?|-?inf|nan"}
SYMPY_KEYWORDS = re.compile("precision|integer|real|finite|(non)?(zero|positive|negative)|even|odd")
FUNCTIONS = {  # of guards, by module
    "": re.compile(
        "IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless|max|min|abs|int|float|bool|round|len"
    ),
    "math": re.compile("floor|ceil|trunc|sqrt|isnan|isinf|a?(sin|cos|tan)h?|log2?|exp|fabs"),
    "torch": re.compile("_?sym_(float|int|ite|max|min|not|sqrt|log2|a?(sin|cos|tan)h?)"),
}
SUMS = ast.Add, ast.Sub, ast.FloorDiv, ast.Mod, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor  # one bit more at most
LISTS, NUMBERS = ("size", "stride"), ("storage_offset", "numel", "dim")  # methods for an input's layout


# Bits of a part that is neither a number nor an operator. Raises ValueError for a part that torch never writes.
Leaf = Callable[[ast.expr], int]


@functools.lru_cache(maxsize=4096)
def count_terms(text: str) -> float | None:
    """Bound sympy's work on a size by the number of terms in its expansion.

    Returns:
        None if sympy would read anything but arithmetic of symbols and numbers, or too many terms.
    """
    # sympy reads 1e9999 as an integer, unlike Python; torch never writes 1_000.
    if re.search(r"[^\w ,.='+*/%<>!&|~()-]|[\d.]e[-+]?\d{3}|\d_", text, re.I) or not _is_small(text, _size_leaf):
        return None
    with contextlib.suppress(OverflowError):
        if (terms := _terms(ast.parse(text.strip(), mode="eval").body)) <= TERMS:
            return terms
    return None


def _terms(node: ast.expr) -> float:
    """Count the terms of an expanded expression; a function counts double, because sympy proves its bounds."""
    if isinstance(node, ast.Call):
        kind, parts = node.func.id if isinstance(node.func, ast.Name) else "", node.args
    else:
        kind = type(node.op).__name__ if isinstance(node, (ast.BinOp, ast.UnaryOp)) else ""
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    terms = list(map(_terms, parts))
    if kind in ("Pow", "FloatPow"):
        return float(max(2.0, terms[0]) ** _degree(parts[1]))
    if kind in ("Mul", "Mult"):
        return math.prod(terms)
    if not parts or kind in PLAIN:
        return max(1.0, sum(terms))
    return 2 * sum(terms) if len(parts) < 3 else sum(terms) ** 2  # compared in pairs


def _degree(exponent: ast.expr) -> float:
    """Return the value of a literal; for a fraction the product of both parts, because a root is a power too."""
    parts = exponent.args if isinstance(exponent, ast.Call) and len(exponent.args) > 1 else [exponent]
    return min(math.prod(abs(_number(part)) for part in parts), LARGEST_EXPONENT)


@functools.lru_cache(maxsize=4096)
def is_guard(text: str) -> bool:
    """Return True if the text only compares sizes, strides and numbers of inputs."""
    # torch also writes it between double quotes, in the spelling of `ast.unparse`.
    return not re.search(r'["\\#\n\r]|\'\'', text) and _is_small(text, _guard_leaf)


def computed_inputs(text: str) -> set[str]:
    """Return the inputs (`L['n']`) that a guard computes with: `*` would make a text or a list very long."""
    inputs: set[str] = set()
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(text.strip(), mode="eval"), False)]
    while pending:
        node, computes = pending.pop()
        if _is_bare_input(node):
            inputs |= {_spelled(node)} if computes else set()
        elif not _is_layout(node):
            inside = computes or isinstance(node, ast.BinOp)
            pending += ((child, inside) for child in ast.iter_child_nodes(node))
    return inputs


def _spelled(node: ast.AST) -> str:
    """Return the text of `ast.unparse`, but quickly: a program may have thousands of guards."""
    if isinstance(node, ast.Subscript):
        index = node.slice.value if isinstance(node.slice, ast.Constant) else ast.unparse(node.slice)
        return f"{_spelled(node.value)}[{index!r}]"
    return f"{_spelled(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "L"


def _is_bare_input(node: ast.AST) -> bool:
    """Return True for `L['n']` or a part of it, except an entry of its `.size()`."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return False
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "L"


def _is_small(text: str, leaf: Leaf) -> bool:
    if len(text) > LONGEST:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a number that is called, which is rejected below
            tree = ast.parse(text.strip(), mode="eval")
        few = sum(1 for _ in ast.walk(tree)) <= PARTS
        return few and _bits(tree.body, leaf) <= BITS and '"' not in ast.unparse(tree)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False


def _bits(node: ast.expr, leaf: Leaf) -> int:
    """Return the bits of the largest number that evaluation produces on the way."""

    def bits(*parts: ast.expr) -> int:
        return max(map(_bits, parts, itertools.repeat(leaf)))  # few frames: sums of hundreds of terms are nested

    match node:
        case ast.Constant(value=int() as value):  # includes bool
            return _few(value.bit_length())
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return SIZE_BITS
        case ast.BinOp(left, ast.Pow() | ast.LShift() as op, right):
            return _power(left, right, isinstance(op, ast.LShift), bits)
        case ast.BinOp(left, ast.Mult() | ast.Div(), right):
            return _few(bits(left) + bits(right))
        case ast.BinOp(left, op, right) if isinstance(op, SUMS):
            return _few(bits(left, right) + 1)
        case ast.UnaryOp(operand=part):
            return bits(part)
        case ast.BoolOp(values=parts):
            return bits(*parts)
        case ast.Compare(left, ops, parts) if not any(isinstance(op, (ast.In, ast.NotIn)) for op in ops):
            return bits(left, *parts)
        case ast.IfExp(test, body, orelse):
            return bits(test, body, orelse)
    return leaf(node)


def _few(bits: int) -> int:
    if bits > BITS:
        raise ValueError
    return bits


def _power(base: ast.expr, exponent: ast.expr, shifts: bool, bits: Callable[[ast.expr], int]) -> int:
    """Return the bits of a power or shift by a literal; an unknown exponent has no bound."""
    bits(exponent)
    value = _number(exponent)
    if not -LARGEST_EXPONENT <= value <= LARGEST_EXPONENT:
        raise ValueError
    return _few(bits(base) + int(abs(value))) if shifts else _few(bits(base) * (int(abs(value)) + 1))


def _number(node: ast.expr) -> float:
    """Return the value of a literal such as `2`, `-2`, `Integer(2)`, `Float('0.5')` or `Rational(1, 2)`."""
    match node:
        case ast.UnaryOp(ast.USub(), operand):
            return -_number(operand)
        case ast.Call(ast.Name("Rational"), [numerator, ast.Constant(int() as denominator)]) if denominator > 0:
            return _number(numerator)  # an upper bound of the quotient
        case ast.Call(ast.Name("Float"), [ast.Constant(str() as text)]):
            return float(text)
        case ast.Call(ast.Name("Integer" | "ToFloat"), [number], []):
            return _number(number)
        case ast.Constant(int() | float() as value):
            return float(value) if abs(value) <= LARGEST_EXPONENT else math.inf
    raise ValueError


def _size_leaf(node: ast.expr) -> int:
    if isinstance(node, ast.Name) and SYMPY_LEAVES.fullmatch(node.id):
        return SIZE_BITS
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and SYMPY.fullmatch(node.func.id)):
        raise ValueError
    kind, args = node.func.id, node.args
    for keyword in node.keywords:  # assumptions about a symbol, or a float's precision
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if kind not in SYMPY_TEXTS or not SYMPY_KEYWORDS.fullmatch(keyword.arg or "") or not isinstance(value, int):
            raise ValueError
        if not 0 <= value <= 1_000:
            raise ValueError
    if kind == "Float" and len(args) > 1:  # torch gives the precision by name
        raise ValueError
    first = args[0] if args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        if not re.fullmatch(SYMPY_TEXTS.get(kind, "(?!)"), first.value) or len(first.value) > BITS // 4:
            raise ValueError
        _few(max((_bits(each, _size_leaf) for each in args[1:]), default=1))
        if kind == "Float":
            return FLOAT_BITS if re.fullmatch(r"[-+]?[\d.]{1,32}(e[-+]?[0-2]?\d)?", first.value) else BITS // 4
        return SIZE_BITS
    if kind in SYMPY_POWERS:
        base, exponent = args  # a third argument would turn evaluation off
        if kind in SYMPY_BOUNDED:
            return _few(max(_bits(part, _size_leaf) for part in args))
        return _power(base, exponent, kind == "LShift", lambda part: _bits(part, _size_leaf))
    if kind == "ModularIndexing" and not all(map(_is_whole, args)):
        raise ValueError
    every = [_bits(part, _size_leaf) for arg in args for part in (arg.elts if isinstance(arg, ast.Tuple) else [arg])]
    return _few(sum(every) if kind in ("Mul", "Rational") else max(every, default=1) + len(every))


def _is_whole(node: ast.expr) -> bool:
    """Return True if no part is a fraction or infinite."""
    parts = list(ast.walk(node))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    if any(isinstance(part, (ast.Div, ast.Pow)) or isinstance(getattr(part, "value", 0), float) for part in parts):
        return False
    return names.isdisjoint(("Float", "Rational", "Pow", "FloatPow", "sqrt", "oo", "int_oo", "pi", "E"))


def _guard_leaf(node: ast.expr) -> int:
    if _is_input(node):
        return SIZE_BITS
    match node:
        case ast.Name("inf" | "nan") | ast.Attribute(ast.Name("math"), "inf" | "nan" | "pi" | "e"):
            return SIZE_BITS
        case ast.Call(args=args) if _is_layout(node) and bool(args) == (_method(node) in LISTS):
            return SIZE_BITS
        case ast.Call(ast.Attribute(ast.Name("math" | "torch" as module), name), args, []):
            is_known = FUNCTIONS[module].fullmatch(name)
        case ast.Call(ast.Name(name), args, []):
            is_known = FUNCTIONS[""].fullmatch(name)
        case _:
            raise ValueError
    if not is_known or (name == "round" and len(args) == 2 and abs(_number(args[1])) > LARGEST_EXPONENT):
        raise ValueError
    return max((_bits(each, _guard_leaf) for each in args), default=1)


def _is_input(node: ast.expr) -> bool:
    """Return True for `L['x']`, a part such as `L['x'][0]['key'].field`, or an entry of `.size()` or `.stride()`."""
    match node:
        case ast.Attribute(owner, name):  # a field of a named tuple, not an attribute of a tensor
            return not name.startswith("_") and not hasattr(torch.Tensor, name) and _is_input(owner)
        case ast.Subscript(owner, ast.Constant(int() | str() as index) | ast.UnaryOp(ast.USub(), ast.Constant(index))):
            if not isinstance(index, (int, str)) or (isinstance(index, str) and not _is_plain(index)):
                return False
            if isinstance(owner, ast.Call):
                return _is_layout(owner) and not owner.args and _method(owner) in LISTS
            return (isinstance(owner, ast.Name) and owner.id == "L") or _is_input(owner)
    return False


def _is_plain(text: str) -> bool:
    """Return True if Python writes the text between single quotes as it is."""
    return text.isprintable() and not re.search(r"['\"\\]", text)


def _is_layout(node: ast.AST) -> bool:
    """Return True for a call such as `L['x'].size()` whose receiver is an input."""
    if not (isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Attribute)):
        return False
    plain = all(isinstance(each, ast.Constant) and isinstance(each.value, int) for each in node.args)
    return plain and _method(node) in (*LISTS, *NUMBERS) and _is_input(node.func.value)


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""
