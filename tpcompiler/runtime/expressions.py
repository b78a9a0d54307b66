"""What an expression in a program's file may be: arithmetic of sizes, whose numbers stay small.

torch evaluates two kinds: sizes, by sympy, and input checks (guards), as Python. Both are parsed here and taken only if
every part of them is one that torch writes.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable

import torch

LONGEST = 20_000  # characters
PARTS = 4_000
DEEPEST = (
    12  # roundings in one another, of which these count as three: what sympy does to prove something grows with each
)
MOST_ROOTS = 2  # of more, sympy looks long whether a sum of them is nothing
SLOW = ("Abs", "sqrt", "floor", "ceiling", "PythonMod", "Piecewise", "ITE", "Where")
BITS = 4_096  # of the largest number that evaluating it can make
POLYNOMIAL = 200_000  # coefficients that one of so many unknowns and of that degree may have: sympy looks for divisors
PLAIN_DEGREE = 2  # up to which it does so quickly
TERMS = 1_000  # of sums that are multiplied out, as sympy does
SIZE_BITS = 64  # of a size that is not known yet
EXTREMES = 16  # arguments of maxima: sympy compares them pair by pair, in a second for twenty
LARGEST_EXPONENT = 64  # of a power, and the places of a shift

SYMPY = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Mod|Abs|Max|Min|floor|ceiling|sqrt|Piecewise|ExprCondPair"
    "|And|Or|Not|Xor|ITE|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|Relational|(Strict)?(LessThan|GreaterThan)"
    "|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|(CeilTo|FloorTo|TruncTo|RoundTo)Int|CeilDiv|LShift|RShift"
    "|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|RoundDecimal|ToFloat"
    "|Identity"
)
SYMPY_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
POLYNOMIALS = ("Add", "Mul", "Integer", "Float", "Rational", "Symbol", "Identity")  # other calls are unknowns of one
SYMPY_LEAVES = re.compile(r"oo|pi|E|true|false|int_oo|[a-z]+\d+")
SYMPY_TEXTS = {"Symbol": r"[A-Za-z_]\w*", "Float": r"[-+]?[\d.]+(e[-+]?\d{1,3})?|-?inf|nan"}
SYMPY_KEYWORDS = re.compile("precision|integer|real|finite|(non)?(zero|positive|negative)|even|odd")
FUNCTIONS = {  # of guards, by where they lie
    "": re.compile(
        "IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless|max|min|abs|int|float|bool|round|len"
    ),
    "math": re.compile("floor|ceil|trunc|sqrt|isnan|isinf|a?(sin|cos|tan)h?|log2?|exp|fabs"),
    "torch": re.compile("_?sym_(float|int|ite|max|min|not|sqrt|log2|a?(sin|cos|tan)h?)"),
}
LISTS, NUMBERS = ("size", "stride"), ("storage_offset", "numel", "dim")  # of an input's layout


class Strange(Exception):
    """A part that is not among those that torch writes."""


Leaf = Callable[[ast.expr], int]  # bits of what is neither a number nor an operator; raises Strange


def is_size(text: str) -> bool:
    """Whether sympy makes nothing but arithmetic of symbols and numbers of it."""
    # sympy takes 1e9999 for a whole number, which Python does not; nobody writes 1_000.
    strange = r"[^\w ,.='+*/%<>!&|~()-]|[\d.]e[-+]?\d{3}|\d_"
    return not re.search(strange, text, re.I) and _is_small(text, _size_leaf)


def is_guard(text: str) -> bool:
    """Whether it compares sizes, strides and numbers of inputs, and does nothing else."""
    # torch writes it between double quotes too, as `ast.unparse` spells it.
    return not re.search(r'["\\#\n\r]|\'\'', text) and _is_small(text, _guard_leaf)


def _is_small(text: str, leaf: Leaf) -> bool:
    if len(text) > LONGEST:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a number that is called, which is Strange here
            tree = ast.parse(text.strip(), mode="eval")
        parts = list(ast.walk(tree))
        extremes = sum(len(part.args) for part in parts if isinstance(part, ast.Call) and _is_extreme(part.func))
        if len(parts) > PARTS or extremes > EXTREMES or _depth(tree) > DEEPEST or _bits(tree.body, leaf) > BITS:
            return False
        if (degree := _degree(tree.body)) > PLAIN_DEGREE and (degree + 1) ** min(_unknowns(parts), 64) > POLYNOMIAL:
            return False
        return (
            sum(map(_is_root, parts)) <= MOST_ROOTS
            and not _repeats(parts)
            and _terms(tree.body) <= TERMS
            and '"' not in ast.unparse(tree)
        )
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError, Strange):
        return False


def _is_extreme(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ("Max", "Min")


def _depth(node: ast.AST) -> int:
    """Of calls in one another that are no sums, products or powers."""
    kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    rounds = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod))
    weight = 3 if kind in SLOW else int(rounds or kind not in ("", *POLYNOMIALS, *SYMPY_POWERS))
    return max(map(_depth, ast.iter_child_nodes(node)), default=0) + weight


def _is_root(node: ast.AST) -> bool:
    kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return not _is_integer(node.right)
    return kind == "sqrt" or (isinstance(node, ast.Call) and kind in SYMPY_POWERS and not _is_integer(node.args[-1]))


def _is_integer(node: ast.expr) -> bool:
    """Whether an exponent is written as a whole number."""
    while isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Integer"):
        node = node.operand if isinstance(node, ast.UnaryOp) else node.args[0]
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _unknowns(parts: list[ast.AST]) -> int:
    """Of a polynomial: symbols, and what is no sum, product or power of them."""
    calls = [part for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)]
    called = {call.func.id for call in calls}  # type: ignore[attr-defined]
    found = {part.id for part in parts if isinstance(part, ast.Name)} - {"L", "math", "torch"} - called
    found |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return len(found | {ast.dump(part) for part in calls if part.func.id not in (*POLYNOMIALS, *SYMPY_POWERS)})  # type: ignore[attr-defined]


def _bits(node: ast.expr, leaf: Leaf) -> int:
    """Of the largest number that evaluating it makes on the way."""

    def bits(part: ast.expr) -> int:
        return _bits(part, leaf)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):  # bool is one too
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise Strange
        return _few(node.value.bit_length() if isinstance(node.value, int) else SIZE_BITS)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Pow, ast.LShift)):
            return _power(node.left, node.right, isinstance(node.op, ast.LShift), bits)
        left, right = bits(node.left), bits(node.right)
        if isinstance(node.op, (ast.Mult, ast.Div)):
            return _few(left + right)
        if isinstance(
            node.op, (ast.Add, ast.Sub, ast.FloorDiv, ast.Mod, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor)
        ):
            return _few(max(left, right) + 1)
        raise Strange
    if isinstance(node, ast.UnaryOp):
        return bits(node.operand)
    if isinstance(node, ast.BoolOp):
        return max(map(bits, node.values))
    if isinstance(node, ast.Compare) and not any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
        return max(map(bits, (node.left, *node.comparators)))
    if isinstance(node, ast.IfExp):
        return max(map(bits, (node.test, node.body, node.orelse)))
    return leaf(node)


def _degree(node: ast.expr) -> int:
    """Of the polynomial that an expression is."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return _degree(node.left) * max(1, int(abs(_number(node.right))))
        both = [_degree(node.left), _degree(node.right)]
        return sum(both) if isinstance(node.op, ast.Mult) else max(both)
    if isinstance(node, ast.Name):
        return 1
    if isinstance(node, ast.Call):
        kind = node.func.id if isinstance(node.func, ast.Name) else ""
        if kind in SYMPY_TEXTS:
            return int(kind != "Float")
        if kind in SYMPY_POWERS:
            return _degree(node.args[0]) * max(1, int(abs(_number(node.args[1]))))
        every = [_degree(each) for each in node.args]
        return sum(every) if kind == "Mul" else max(every, default=0)
    return max((_degree(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)), default=0)


def computes_with_inputs(text: str) -> bool:
    """Whether a guard computes with an input itself: of a text, `%` and `*` make as long a text as they say."""
    parts = ast.walk(ast.parse(text.strip(), mode="eval"))
    return any(isinstance(p, ast.BinOp) and any(map(_is_bare_input, _outside_calls(p))) for p in parts)


def _repeats(parts: list[ast.AST]) -> bool:
    """Whether an input that may be a text or a list is multiplied: by more than a small number, or more than once."""
    times = 0
    for part in parts:
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult):
            both = [side for side in (part.left, part.right) if any(map(_is_bare_input, _outside_calls(side)))]
            times += len(both)
            other = next((side for side in (part.left, part.right) if side not in both), None)
            small = isinstance(other, ast.Constant) and isinstance(other.value, int) and other.value <= PARTS
            if both and not small:
                return True
    return times > 1


def _is_bare_input(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and not isinstance(node.value, ast.Call) and _is_input(node)


def _outside_calls(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call) or (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call)):
        return []
    return [node, *(each for child in ast.iter_child_nodes(node) for each in _outside_calls(child))]


def _terms(node: ast.expr) -> int:
    """Of the sum that an expression is when all is multiplied out; of what is known to be one that `_bits` takes."""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return _power_of_terms(node.left, node.right)
        both = [_terms(node.left), _terms(node.right)]
        return _limited(math.prod(both) if isinstance(node.op, ast.Mult) else sum(both))
    children = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    if not isinstance(node, ast.Call):
        return max(map(_terms, children), default=1)
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    if kind in SYMPY_POWERS:
        return _power_of_terms(node.args[0], node.args[1])
    every = [_terms(each) for each in node.args]
    return _limited(math.prod(every) if kind == "Mul" else sum(every) if kind == "Add" else max(every, default=1))


def _power_of_terms(base: ast.expr, exponent: ast.expr) -> int:
    return _limited(_terms(base) ** max(1, int(abs(_number(exponent)))))


def _limited(terms: int) -> int:
    if terms > TERMS:
        raise Strange
    return terms


def _few(bits: int) -> int:
    if bits > BITS:
        raise Strange
    return bits


def _power(base: ast.expr, exponent: ast.expr, shifts: bool, bits: Callable[[ast.expr], int]) -> int:
    """Of a power (a shift) by a number that is written out: nobody knows how large another is."""
    bits(exponent)
    value = _number(exponent)
    if not -LARGEST_EXPONENT <= value <= LARGEST_EXPONENT:
        raise Strange
    return _few(bits(base) + int(abs(value))) if shifts else _few(bits(base) * (int(abs(value)) + 1))


def _number(node: ast.expr) -> float:
    """What is written out as `2`, `-2`, `Integer(2)`, `Float('0.5')` or `Rational(1, 2)`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kind, args = node.func.id, node.args
        values = [arg.value for arg in args if isinstance(arg, ast.Constant)]
        if kind == "Rational" and len(args) == len(values) == 2 and isinstance(values[1], int) and values[1] > 0:
            return _number(args[0])  # no less than the quotient
        if kind == "Float" and len(args) == 1 and values and isinstance(values[0], str):
            return float(values[0])
        if kind in ("Integer", "ToFloat") and len(args) == 1 and not node.keywords:
            return _number(args[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value) if abs(node.value) <= LARGEST_EXPONENT else math.inf
    raise Strange


def _size_leaf(node: ast.expr) -> int:
    if isinstance(node, ast.Name) and SYMPY_LEAVES.fullmatch(node.id):
        return SIZE_BITS
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and SYMPY.fullmatch(node.func.id)):
        raise Strange
    kind, args = node.func.id, node.args
    for keyword in node.keywords:  # what is assumed of a symbol, and a float's precision
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if kind not in SYMPY_TEXTS or not SYMPY_KEYWORDS.fullmatch(keyword.arg or "") or not isinstance(value, int):
            raise Strange
        if not 0 <= value <= 1_000:
            raise Strange
    if kind == "Float" and len(args) > 1:  # its precision is given by name
        raise Strange
    first = args[0] if args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        if not re.fullmatch(SYMPY_TEXTS.get(kind, "(?!)"), first.value) or len(first.value) > BITS // 4:
            raise Strange
        _few(max((_bits(each, _size_leaf) for each in args[1:]), default=1))
        return SIZE_BITS if kind != "Float" else BITS // 4
    if kind in SYMPY_POWERS:
        base, exponent = args  # and no third, that says not to evaluate it
        return _power(base, exponent, kind == "LShift", lambda part: _bits(part, _size_leaf))
    if kind == "ModularIndexing" and not all(map(_is_whole, args)):
        raise Strange
    every = [_bits(part, _size_leaf) for arg in args for part in (arg.elts if isinstance(arg, ast.Tuple) else [arg])]
    return _few(sum(every) if kind in ("Mul", "Rational") else max(every, default=1) + len(every))


def _is_whole(node: ast.expr) -> bool:
    """Whether nothing in it is a fraction, and nothing is without end."""
    parts = list(ast.walk(node))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    if any(isinstance(part, (ast.Div, ast.Pow)) or isinstance(getattr(part, "value", 0), float) for part in parts):
        return False
    return names.isdisjoint(("Float", "Rational", "Pow", "FloatPow", "sqrt", "oo", "int_oo", "pi", "E"))


def _guard_leaf(node: ast.expr) -> int:
    if _is_input(node):
        return SIZE_BITS
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return SIZE_BITS
    if isinstance(node, ast.Attribute) and _is_named(node.value, "math") and node.attr in ("inf", "nan", "pi", "e"):
        return SIZE_BITS
    if not isinstance(node, ast.Call) or node.keywords:
        raise Strange
    if _is_layout(node) and bool(node.args) == (_method(node) in LISTS):
        return SIZE_BITS
    module, name = "", node.func
    if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name) and name.value.id in ("math", "torch"):
        module, name = name.value.id, ast.Name(name.attr)
    if not isinstance(name, ast.Name) or not FUNCTIONS[module].fullmatch(name.id):
        raise Strange
    if name.id == "round" and len(node.args) == 2 and abs(_number(node.args[1])) > LARGEST_EXPONENT:
        raise Strange
    return max((_bits(each, _guard_leaf) for each in node.args), default=1)


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_input(node: ast.expr) -> bool:
    """`L['x']`, a part of it such as `L['x'][0]['key'].field`, or an entry of its `.size()` or `.stride()`."""
    if isinstance(node, ast.Attribute):
        # A field of a named tuple, and nothing that a tensor has.
        field = not node.attr.startswith("_") and not hasattr(torch.Tensor, node.attr)
        return field and _is_input(node.value) and not _is_named(node.value, "L")
    if not isinstance(node, ast.Subscript):
        return False
    index = node.slice
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        index = index.operand
    if not isinstance(index, ast.Constant):
        return False
    if isinstance(index.value, str) and re.search(r"['\"\\]", index.value + "'" * (not index.value.isprintable())):
        return False
    if not isinstance(index.value, (int, str)):
        return False
    if isinstance(node.value, ast.Call):
        return _is_layout(node.value) and not node.value.args and _method(node.value) in LISTS
    return _is_named(node.value, "L") or _is_input(node.value)


def _is_layout(node: ast.expr) -> bool:
    """`L['x'].size()`, whose receiver is an input and nothing else."""
    if not (isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Attribute)):
        return False
    plain = all(isinstance(each, ast.Constant) and isinstance(each.value, int) for each in node.args)
    return plain and _method(node) in (*LISTS, *NUMBERS) and _is_input(node.func.value)


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""
