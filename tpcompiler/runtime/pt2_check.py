"""Check the texts in a .pt2 before torch sees them: it makes Python source, expressions and imports of them.

Names are identifiers, targets are ops, trees are of classes that are registered, and sizes and input checks are
sentences of one grammar: arithmetic on numbers, symbols and inputs, with caps on its length and its numbers.
`Pt2.check` calls this, and checks the entries and pickles itself. docs/security.md lists every text, and what torch
makes of it.
"""

from __future__ import annotations

import ast
import functools
import json
import keyword
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from tpcompiler._torch import is_torchscript_op, program_target
from tpcompiler.errors import option

# Texts about a node's origin. torch neither runs nor calls them, but that it looks up LOOKED_UP: they are dropped.
FREE = ("stack_trace", "nn_module_stack", "torch_fn", "custom", "from_node", "source_fn_stack")
LOOKED_UP = "source_fn_stack"
FILE_OPS = frozenset({"aten.save", "aten.from_file", "debugprims.load_tensor"})  # they open a file by its name
PRINTING_OPS = frozenset({"aten._print", "aten.warn", "print"})  # they print the file's text, past every filter
CODE_OPS = frozenset({"aoti_call_delegate", "inline_asm_elementwise"})  # they run machine code given by an argument
OPERATORS = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|lshift|rshift"
    r"|getitem)|math\.(?!factorial|comb|perm)[a-z]\w*|torch\.(_sym|sym)_\w+"
)
VMAP = re.compile(r"torch\._functorch\.predispatch\.\w+")  # torch.vmap leaves these in a training program
COUNTED = re.compile(r"(u|zuf)(?!\d{1,6}$)")  # torch counts from 0 to the number in the name of such a size
WORD = 64  # bits of a number
UNKNOWN = 6.0  # bits of a number that nodes compute with: as an exponent, it is a small size
MOST_BITS = 6_000  # of a number that nodes compute; of one of WORD bits for each UNKNOWN, eleven times as many
LONGEST = 4_000  # characters of a size or an input check
MOST_TERMS = 10_000  # of one of these, or of a part of it; most have fewer than ten
SYMPY = re.compile(
    "Add|Mul|Pow|Integer|Rational|Mod|Abs|Max|Min|floor|ceiling|sqrt|Piecewise|ExprCondPair|PowByNatural|FloatPow"
    "|And|Or|Not|Xor|ITE|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|Relational|(Strict)?(LessThan|GreaterThan)"
    "|FloorDiv|Where|PythonMod|CleanDiv|(CeilTo|FloorTo|TruncTo|RoundTo)Int|CeilDiv|LShift|RShift"
    "|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|RoundDecimal|ToFloat|Identity"
)
PYTHON = re.compile(  # functions of input checks
    "IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless|max|min|abs|int|float|bool|round|len"
    r"|math\.(floor|ceil|trunc|sqrt|isnan|isinf|a?(sin|cos|tan)h?|log2?|exp|fabs)"
    r"|torch\._?sym_(float|int|ite|max|min|not|sqrt|log2|a?(sin|cos|tan)h?)"
)
QUOTED = {"Symbol": r"[A-Za-z_]\w*", "Float": r"[-+]?[\d.]{1,32}(e[-+]?[0-2]?\d)?|-?inf|nan"}
ASSUMPTIONS = re.compile("precision|integer|real|finite|(non)?(zero|positive|negative)|even|odd")
MARK = "_INPUT"  # takes the place of an input in an input check
NAMES = {
    SYMPY: re.compile(r"oo|pi|E|true|false|int_oo|[a-z]+\d+"),
    PYTHON: re.compile(rf"{MARK}|(math\.)?(inf|nan)|math\.(pi|e)"),
}
POWERS, PRODUCTS, SUMS = {"Pow", "LShift"}, {"Mult", "Mul"}, {"Add", "Sub", "USub", "Integer", "Rational", "ToFloat"}
INPUT = re.compile(  # of an input check: `L['x']`, or a part such as `L['x'][0]['key'].field`; and its layout
    r"(?<![\w.'])(L\['[^'\"\\]*'\](?:\['[^'\"\\]*'\]|\[-?\d+\]|\.[A-Za-z]\w*)*?)"
    r"(\.(?:size|stride)\(\)\[-?\d+\]|\.(?:size|stride)\(\d+\)|\.(?:storage_offset|numel|dim)\(\))?(?![\w.(\[])"
)


class Unsafe(Exception):
    """A part of a file that could run code; the text names it, and `cure` is a remedy other than trust."""

    def __init__(self, what: str, cure: str = "") -> None:
        super().__init__(what)
        self.cure = cure


def check_program(data: object) -> None:
    """Check every text in a program's JSON, or in the JSON that lists its weights.

    Raises:
        Unsafe: torch would make more of a text than a name, a number or an op.
    """
    seen: set[tuple[str, str]] = set()
    for key, parent, text in find_texts(data):
        # torch writes an op's text argument into its source with `repr`, but a constant input unquoted.
        if (key, text) in seen or (key in ("as_string", "as_strings") and parent == "arg"):
            continue
        if key not in CHECKS:
            raise Unsafe(f"has text where none belongs: {_short(text)} as {key!r}")
        if what := CHECKS[key](text):
            raise Unsafe(f"{what}: {_short(text)}")
        seen.add((key, text))
    for name in (data.get("range_constraints") or {}) if isinstance(data, dict) else {}:
        if COUNTED.match(name):
            raise Unsafe(f"makes torch count up to a size's name: {_short(name)}")
    unknown = UNKNOWN
    for part in find_dicts(data):
        if large := [each for each in part.values() if isinstance(each, int) and each.bit_length() > WORD]:
            raise Unsafe(f"has a number that is too large: {_short(str(large[0]))}")
        if isinstance(part.get("nodes"), list):
            unknown = _bound_nodes(part["nodes"], unknown)


def _bound_nodes(nodes: Sequence[Mapping[str, Any]], unknown: float) -> float:
    """Return the bits of the largest number that a graph's nodes compute when the program is traced.

    `unknown` bounds names that no node defines: in a nested graph they may be any number of the outer one.

    Raises:
        Unsafe: a number has too many bits, or a node computes with text or lists.
    """
    known: dict[str, float] = {}
    for node in nodes:
        target = str(node["target"])
        if not OPERATORS.fullmatch(target):
            continue
        bits = [1.0]
        for parts in (list(find_dicts(each["arg"])) for each in node["inputs"]):
            pairs = [pair for part in parts for pair in part.items()]
            if any(key.startswith("as_string") for key, _ in pairs):
                raise Unsafe(f"computes with text: {_short(target)}")
            if target != "_operator.getitem" and any(isinstance(value, list) for _, value in pairs):
                raise Unsafe(f"computes with lists: {_short(target)}")
            names = [known.get(value, unknown) for key, value in pairs if key == "as_name" and isinstance(value, str)]
            bits.append(max([1.0, *names, *(_bits(value) for _, value in pairs if isinstance(value, int | float))]))
        made = max(bits) + 1
        if target == "_operator.mul" or target.startswith("math"):
            made = sum(bits)
        elif target in ("_operator.pow", "_operator.lshift"):
            made = max(bits[:-1]) * 2.0 ** min(bits[-1], WORD) + 1
        if made > MOST_BITS:
            raise Unsafe(f"computes a number that is too large, by {_short(target)}")
        known |= {part["as_name"]: made for part in find_dicts(node["outputs"]) if isinstance(part.get("as_name"), str)}
    return max(unknown, *known.values()) if known else unknown


def _bits(number: float) -> float:
    return math.log2(abs(number) + 1) + 1 if math.isfinite(number) else math.inf


def forget_origins(data: object) -> None:
    """Drop the texts of a program's JSON that torch looks up in its modules, where an attribute may open a file."""
    for part in find_dicts(data):
        if isinstance(part.get(LOOKED_UP), str):
            del part[LOOKED_UP]


def find_texts(data: object) -> Iterator[tuple[str, str, str]]:
    """Yield (key, key of the enclosing dict, text) for every text; the texts of a list have the list's key."""
    left: list[tuple[object, str, str]] = [(data, "", "")]
    while left:
        value, key, parent = left.pop()
        if isinstance(value, str):
            yield key, parent, value
        elif isinstance(value, list):
            left += ((each, key, parent) for each in value)
        elif isinstance(value, dict):
            left += ((each, name, key) for name, each in value.items())


def find_dicts(data: object) -> Iterator[dict[str, Any]]:
    """Yield every dict in plain data."""
    left = [data]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _plain(text: str) -> str | None:
    is_plain = text.isprintable() and not re.search(r"[\"'\\]", text)
    return None if is_plain else "has quotes or unprintable characters in a text"


def _name(text: str) -> str | None:
    fits = not text or (text.isidentifier() and not keyword.iskeyword(text))
    return None if fits else "has a name that is not an identifier"


def _path(text: str) -> str | None:
    hidden = any(part.startswith("__") and part.endswith("__") for part in text.split("."))
    return "names one of Python's own attributes" if hidden else _plain(text)


def _target(text: str) -> str | None:
    if OPERATORS.fullmatch(text):
        return None
    if not text.startswith("torch.ops.") and not VMAP.fullmatch(text):
        # torch itself rejects names that it cannot find: only names that exist may be dangerous.
        return "calls something other than an op" if text.startswith(("torch", "math", "_operator", "#")) else None
    op = program_target(text)
    if op is None:
        return "calls something other than an op"
    if op in PRINTING_OPS or op.rpartition(".")[0] in PRINTING_OPS:
        return "calls an op that prints"
    if op in CODE_OPS or op.rpartition(".")[0] in FILE_OPS:
        return "calls an op that opens a file or runs code by name"
    return "calls one of TorchScript's own ops, without a tensor" if is_torchscript_op(op) else None


@functools.lru_cache(maxsize=4096)
def _expression(text: str) -> str | None:
    # sympy reads 1e9999 as an integer, unlike Python; torch never writes 1_000.
    is_odd = len(text) > LONGEST or re.search(r"[\d.]e[-+]?\d{3}|\d_", text, re.I)
    return None if not is_odd and _is_small(text, SYMPY) else "has a size that is not a plain expression"


@functools.lru_cache(maxsize=4096)
def _guard(text: str) -> str | None:
    paths = " ".join(path for path, _ in INPUT.findall(text[:LONGEST]))
    fields = re.findall(r"\.(\w+)", re.sub("'[^']*'", "", paths))  # of named tuples, not attributes of a tensor
    is_odd = not text.isprintable() or MARK in text or any(hasattr(torch.Tensor, field) for field in fields)
    is_small = not is_odd and len(text) <= LONGEST and _is_small(INPUT.sub(f" {MARK} ", text), PYTHON)
    return None if is_small else "has an input check that is not a plain comparison"


def bare_inputs(guard: str) -> set[str]:
    """Return the inputs (`L['n']`) of which an input check takes the value, not the layout."""
    return {path for path, layout in INPUT.findall(guard) if not layout}


def _is_small(text: str, functions: re.Pattern[str]) -> bool:
    """Return True for a sentence of the grammar that has few terms."""
    if re.search(r"[^\w ,.='+*/%<>!&|~()-]", text):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a number that is called, which is rejected below
            tree = ast.parse(text.strip(), mode="eval")
        return _terms(tree.body, functions) > 0
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False


def _terms(node: ast.expr, functions: re.Pattern[str]) -> float:
    """Count the terms of a size if it is multiplied out, as sympy does, or the words of a number in an input check.

    Raises:
        ValueError, OverflowError: it has too many, or is nothing that torch writes.
    """
    kind, parts = _parts(node, functions)
    each = [_terms(part, functions) for part in parts]  # of all of them: each is evaluated
    exponent = _literal(parts[1]) if kind in {*POWERS, "PowByNatural", "FloatPow"} and len(parts) == 2 else None
    if kind in POWERS and exponent is None:
        raise ValueError
    if exponent is not None:
        base = float(max(2, each[0]))
        terms = base**exponent if functions is SYMPY else base * exponent
    elif functions is SYMPY and kind in PRODUCTS:
        terms = math.prod(each)
    elif functions is PYTHON or kind in SUMS:
        terms = sum(each)
    else:  # sympy proves bounds of a function, and compares more than two parts in pairs
        terms = 2 * sum(each) if len(each) < 3 else sum(each) ** 2
    if not terms <= MOST_TERMS:
        raise ValueError
    return max(1, terms)  # 1 also for a power of 0, whose base is computed all the same


def _parts(node: ast.expr, functions: re.Pattern[str]) -> tuple[str, Sequence[ast.expr]]:
    """Return the kind and the operands of an expression.

    Raises:
        ValueError: it is nothing that torch writes.
    """
    match node:
        case ast.Constant(value=int() as value) if value.bit_length() <= WORD:  # includes bool
            return "", ()
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return "", ()
        case ast.Name() | ast.Attribute(ast.Name()) if NAMES[functions].fullmatch(ast.unparse(node)):
            return "", ()
        case ast.BinOp(left, op, right):
            return type(op).__name__, (left, right)
        case ast.UnaryOp(op, operand):
            return type(op).__name__, (operand,)
        case ast.Compare(left, ops, rights) if not any(isinstance(op, ast.In | ast.NotIn) for op in ops):
            return "", (left, *rights)
        case ast.BoolOp(_, operands):
            return "", operands
        case ast.IfExp(test, yes, no):
            return "", (test, yes, no)
        case ast.Call(ast.Name(kind), [ast.Constant(str() as text)], options) if functions is SYMPY and kind in QUOTED:
            if re.fullmatch(QUOTED[kind], text) and all(map(_is_assumption, options)):
                return "", ()
        case ast.Call(ast.Name() | ast.Attribute(ast.Name()) as function, args, []):
            kind = ast.unparse(function)
            if functions.fullmatch(kind) and not (kind == "round" and len(args) == 2 and not _is_short(args[1])):
                return kind, [part for arg in args for part in (arg.elts if isinstance(arg, ast.Tuple) else [arg])]
    raise ValueError


def _is_assumption(option: ast.keyword) -> bool:
    """Return True for an assumption about a symbol, or a float's precision."""
    value = option.value.value if isinstance(option.value, ast.Constant) else None
    return bool(ASSUMPTIONS.fullmatch(option.arg or "")) and isinstance(value, int) and 0 <= value <= 1_000


def _is_short(node: ast.expr) -> bool:
    places = _literal(node)
    return places is not None and places <= WORD


def _literal(node: ast.expr) -> float | None:
    """Return the size of a number that is written out: `2`, `-2`, `Integer(2)`, `Float('0.5')` or `Rational(1, 2)`."""
    match node:
        case ast.UnaryOp(ast.USub(), number) | ast.Call(ast.Name("Integer" | "ToFloat"), [number]):
            return _literal(number)
        case ast.Constant(int() | float() as value):
            return abs(value)
        case ast.Call(ast.Name("Rational"), [ast.Constant(int() as value), ast.Constant(2)]):
            return abs(value)  # a root counts as a power; sympy takes long over other roots
        case ast.Call(ast.Name("Float"), [ast.Constant(str() as text)]):
            return abs(float(text))
    return None


def _outputs_tree(text: str) -> str | None:
    """Return the fault in a pytree's description, which may make torch look up a class by module and name."""
    try:
        _, spec = json.loads(text)
        contexts = [_context(part["context"]) for part in find_dicts([spec]) if "children_spec" in part]
        for part in find_dicts(contexts):
            if "default_factory_module" in part:
                _look_up(part["default_factory_module"], part["default_factory_name"], type)
            if "__enum__" in part:
                module, _, name = str(part["fqn"]).partition(":")
                _look_up(module, name, type(Enum))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "has a description of inputs or outputs that cannot be read"
    texts = [*(key for part in find_dicts(contexts) for key in part), *(text for _, _, text in find_texts(contexts))]
    return next(filter(None, map(_plain, texts)), None)


def _context(context: Any) -> Any:
    try:
        return json.loads(context) if isinstance(context, str) else context
    except ValueError:  # the name of a named tuple
        return context


def _inputs_tree(text: str) -> str | None:
    if what := _outputs_tree(text):
        return what
    children = json.loads(text)[1]["children_spec"]
    if len(children) == 2 and children[1]["type"] == "builtins.dict":  # argument names of a `def`
        return next(filter(None, (_name(str(name)) for name in json.loads(children[1]["context"]))), None)
    return None


def _look_up(module: str, name: str, kind: type) -> None:
    """Reject modules that torch would have to import; `vars` finds the class without running lazy attributes."""
    if sys.modules.get(module) is None:
        raise Unsafe(
            f"makes torch import the module {_short(module)}",
            option(f"pass --import {module}", f"import {module} first"),
        )
    owner: Any = sys.modules[module]
    for part in name.split("."):
        owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
    if not isinstance(owner, kind):
        raise Unsafe(f"makes torch look up {_short(f'{module}.{name}')}, which is not a class of that kind")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


CHECKS: dict[str, Callable[[str], str | None]] = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names", "field_names"), _name),
    **dict.fromkeys(("target", "as_operator"), _target),
    "expr_str": _expression,
    "guards_code": _guard,
    "in_spec": _inputs_tree,
    "out_spec": _outputs_tree,
    **dict.fromkeys(
        ("as_float", "as_floats", "real", "imag"),
        lambda text: None if text in ("Infinity", "-Infinity", "NaN") else "has text for a number",
    ),
    "path_name": lambda text: None if re.fullmatch(r"(weight|tensor)_\d+", text) else "names an entry of another kind",
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn"), _path),
    **dict.fromkeys(("custom_obj_name", "class_fqn", "as_string", "as_strings"), _plain),
    **dict.fromkeys(("type", "verifiers", "dialect", "torch_version"), _plain),
    **dict.fromkeys(FREE, lambda text: None),
}
