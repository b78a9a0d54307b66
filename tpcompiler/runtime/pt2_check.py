"""Check the texts in a .pt2 before torch sees them: it makes Python source, expressions and imports of them.

Names are identifiers, targets are ops, trees are of classes that are registered, and sizes and input checks are
sentences of one small grammar: arithmetic on numbers, symbols and inputs, with caps on its length and its numbers.
`Pt2.check` calls this, and checks the entries and pickles itself. docs/security.md lists every text, and what torch
makes of it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import keyword
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch

from tpcompiler._torch import is_torchscript_op, program_target
from tpcompiler.errors import option

Check = Callable[[str], str | None]

# Texts about a node's origin. torch neither runs nor calls them, but that it looks up LOOKED_UP: they are dropped.
FREE = ("stack_trace", "nn_module_stack", "torch_fn", "custom", "from_node", "source_fn_stack")
LOOKED_UP = "source_fn_stack"
QUOTES = frozenset("\"'\\")
FILE_OPS = frozenset({"aten.save", "aten.from_file", "debugprims.load_tensor"})  # they open a file by its name
PRINTING_OPS = frozenset({"aten._print", "aten.warn", "print"})  # they print the file's text, past every filter
CODE_OPS = frozenset({"aoti_call_delegate", "inline_asm_elementwise"})  # they run machine code given by an argument
OPERATORS = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|xor|not_|lshift|rshift"
    r"|getitem)|math\.(?!factorial|comb|perm)[a-z]\w*|torch\.(_sym|sym)_\w+"
)
LARGEST_EXAMPLES = 100_000  # parts
LONGEST_LIST = 4_096  # of example inputs: an input check may multiply its length
POWERS = ("_operator.pow", "_operator.lshift")
NUMBERS = {"as_int", "as_sym_int", "as_float", "as_sym_float", "as_bool", "as_sym_bool"}
COUNTED = re.compile(r"(u|zuf)(?!\d{1,6}$)")  # torch counts from 0 to the number in the name of such a size
VMAP = re.compile(r"torch\._functorch\.predispatch\.\w+")  # torch.vmap leaves these in a training program
LONGEST = 4_000  # characters of a size or an input check
MOST_TERMS = 10_000  # of one of these, or of a part of it; real models have fewer than ten
WORD = 64  # bits of an unknown size, the largest exponent, and the places of a shift
MOST_BITS = 1 << 16  # of a number that nodes compute
SYMPY = re.compile(
    "Mod|Abs|Max|Min|floor|ceiling|sqrt|Piecewise|ExprCondPair|PowByNatural|FloatPow"
    "|And|Or|Not|Xor|ITE|Eq|Ne|Lt|Le|Gt|Ge|Equality|Unequality|Relational|(Strict)?(LessThan|GreaterThan)"
    "|FloorDiv|Where|PythonMod|CleanDiv|(CeilTo|FloorTo|TruncTo|RoundTo)Int|CeilDiv|RShift"
    "|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|TruncToFloat|RoundDecimal|ToFloat|Identity"
)
LEAVES = re.compile(r"oo|pi|E|true|false|int_oo|[a-z]+\d+")
QUOTED = {"Symbol": r"[A-Za-z_]\w*", "Float": r"[-+]?[\d.]{1,32}(e[-+]?[0-2]?\d)?|-?inf|nan"}
ASSUMPTIONS = re.compile("precision|integer|real|finite|(non)?(zero|positive|negative)|even|odd")
FUNCTIONS = {  # of input checks, by module
    "": re.compile(
        "IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless|max|min|abs|int|float|bool|round|len"
    ),
    "math": re.compile("floor|ceil|trunc|sqrt|isnan|isinf|a?(sin|cos|tan)h?|log2?|exp|fabs"),
    "torch": re.compile("_?sym_(float|int|ite|max|min|not|sqrt|log2|a?(sin|cos|tan)h?)"),
}
LISTS, NUMBERS_OF_LAYOUT = ("size", "stride"), ("storage_offset", "numel", "dim")  # methods of an input's layout


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
    for key, parent, text in _texts(data, "", ""):
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
    inputs = Number()
    for part in _dicts(data):
        if large := [each for each in part.values() if isinstance(each, int) and each.bit_length() > WORD]:
            raise Unsafe(f"has a number that is too large: {_short(str(large[0]))}")
        if isinstance(part.get("nodes"), list):
            inputs = _bound_nodes(part["nodes"], inputs)
    computed = {each for key, text in seen if key == "guards_code" for each in _computed_inputs(text)}
    if others := sorted(computed - _numbers_taken(data)) if computed else ():
        raise Unsafe(f"has an input check that computes with something other than a number: {_short(others[0])}")


class Number(NamedTuple):
    """Bounds of a number that a node takes or computes: its bits, and its value if unknown sizes are small."""

    bits: float = WORD
    value: float = WORD


def _bound_nodes(nodes: Sequence[Mapping[str, Any]], inputs: Number) -> Number:
    """Return the largest numbers that a graph's nodes compute: torch evaluates them when it reads the graph.

    `inputs` bounds names that no node defines: in a nested graph they may be any number of the outer one.

    Raises:
        Unsafe: a number has too many bits, or a node computes with text or lists.
    """
    known: dict[str, Number] = {}
    for node in nodes:
        target = str(node["target"])
        if not OPERATORS.fullmatch(target):
            continue
        given = [list(_dicts(each["arg"])) for each in node["inputs"]]
        parts = [part for each in given for part in each]
        if any(key.startswith("as_string") for part in parts for key in part):
            raise Unsafe(f"computes with text: {_short(target)}")
        if target != "_operator.getitem" and any(isinstance(value, list) for part in parts for value in part.values()):
            raise Unsafe(f"computes with lists: {_short(target)}")
        bits, value = zip(*(_bound(each, known, inputs) for each in given), strict=True) if given else ((0,), (0,))
        made = Number(max(bits) + 1, sum(value))
        if target in POWERS:
            times = max(value[-1], 1)
            length = (bits[0] * times if target == POWERS[0] else bits[0] + times) + 1
            made = Number(length, 2.0**length if length < 1_000 else math.inf)
        elif target == "_operator.mul" or target.startswith("math"):
            made = Number(sum(bits), math.prod(value))
        if made.bits > MOST_BITS:
            raise Unsafe(f"computes a number that is too large, by {_short(target)}")
        known |= {part["as_name"]: made for part in _dicts(node["outputs"]) if isinstance(part.get("as_name"), str)}
    every = [inputs, *known.values()]
    return Number(max(each.bits for each in every), max(each.value for each in every))


def _bound(argument: Sequence[Mapping[str, Any]], known: Mapping[str, Number], inputs: Number) -> Number:
    """Return the largest of all that an argument names or writes, whichever of these torch takes."""
    every = [Number(0, 0)]
    for part in argument:
        if isinstance(name := part.get("as_name"), str):
            every.append(known.get(name, inputs))
        for literal in (part.get("as_int"), part.get("as_float")):
            if isinstance(literal, int | float):
                every.append(Number(WORD, abs(literal) if math.isfinite(literal) else math.inf))
    return Number(max(each.bits for each in every), max(each.value for each in every))


def _numbers_taken(data: Any) -> set[str]:
    """Return the inputs that are numbers, as input checks name them: `L['n']`, `L['sizes'][0]`, `L['x']['y']`."""
    try:
        signature = data["graph_module"]["module_call_graph"][0]["signature"]
        args, named = json.loads(signature["in_spec"])[1]["children_spec"]
        positional = (signature["forward_arg_names"] or ())[: len(args["children_spec"])]  # torch also names keywords
        roots = [*positional, *json.loads(named["context"])]
        leaves = [
            leaf
            for root, spec in zip(roots, (*args["children_spec"], *named["children_spec"]), strict=True)
            for leaf in _leaves(f"L[{root!r}]", spec)
        ]
        specs = data["graph_module"]["signature"]["input_specs"]
        given = [each for each in specs if "user_input" in each or "constant_input" in each]
        return {
            leaf
            for leaf, each in zip(leaves, given, strict=True)
            if NUMBERS & set(each["user_input"]["arg"] if "user_input" in each else each["constant_input"]["value"])
        }
    except (LookupError, TypeError, ValueError):  # torch will not find its inputs either
        return set()


def _leaves(path: str, spec: Mapping[str, Any]) -> Iterator[str]:
    children = spec["children_spec"]
    if spec["type"] is None:
        yield path
    keys = json.loads(spec["context"]) if spec["type"] == "builtins.dict" else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(f"{path}[{key!r}]", child)


def forget_origins(data: object) -> None:
    """Drop the texts of a program's JSON that torch looks up in its modules, where an attribute may open a file."""
    for part in _dicts(data):
        if isinstance(part.get(LOOKED_UP), str):
            del part[LOOKED_UP]


def check_keys(value: object) -> None:
    """Check the keys of dicts in example inputs: torch writes them into the source of a module's input checks.

    Raises:
        Unsafe: a key is neither a number, None nor plain text.
    """
    level = [value]
    for count in itertools.count():
        if not level:
            return
        if count > LARGEST_EXAMPLES:  # torch visits a part that lists share once per occurrence
            raise Unsafe("has too many example inputs")
        value = level.pop()
        if isinstance(value, (list, tuple)) and len(value) > LONGEST_LIST:
            raise Unsafe(f"has {len(value)} example inputs in a row")
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, (int, float, NoneType)) and not (isinstance(key, str) and _plain(key) is None):
                    raise Unsafe(f"has a key that is not plain text: {_short(str(key))}")
        level += value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()


def _texts(value: object, key: str, parent: str) -> Iterator[tuple[str, str, str]]:
    """Yield (key, key of the enclosing dict, text) for every text; the texts of a list have the list's key."""
    left: list[tuple[object, str, str]] = [(value, key, parent)]
    while left:
        value, key, parent = left.pop()
        if isinstance(value, str):
            yield key, parent, value
        elif isinstance(value, list):
            left += ((each, key, parent) for each in value)
        elif isinstance(value, dict):
            left += ((each, name, key) for name, each in value.items())


def _plain(text: str) -> str | None:
    return None if text.isprintable() and not QUOTES & set(text) else "has quotes or unprintable characters in a text"


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
    is_odd = re.search(r"[^\w ,.='+*/%<>!&|~()-]|[\d.]e[-+]?\d{3}|\d_", text, re.I)
    return None if not is_odd and _is_small(text, _terms_of_size) else "has a size that is not a plain expression"


@functools.lru_cache(maxsize=4096)
def _guard(text: str) -> str | None:
    # torch also writes it between double quotes, in the spelling of `ast.unparse`.
    fits = not re.search(r'["\\#\n\r]|\'\'', text) and _is_small(text, _terms_of_guard)
    return None if fits else "has an input check that is not a plain comparison"


# The terms of a part of a text. Raises ValueError for what torch never writes.
Terms = Callable[[ast.expr], float]


def _is_small(text: str, leaf: Terms) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a number that is called, which is rejected below
            tree = ast.parse(text.strip(), mode="eval") if len(text) <= LONGEST else None
        return tree is not None and _terms(tree.body, leaf) > 0 and '"' not in ast.unparse(tree)
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False


def _terms(node: ast.expr, leaf: Terms) -> float:
    """Count the terms of an expression if it is multiplied out, as sympy does; numbers grow no faster than these.

    Raises:
        ValueError: it, or a part of it, has too many, or is nothing that torch writes.
    """
    terms = max(1.0, _count(node, leaf))  # 1 also for a power of 0, whose base is computed all the same
    if not terms <= MOST_TERMS:
        raise ValueError
    return terms


def _count(node: ast.expr, leaf: Terms) -> float:
    match node:
        case ast.Constant(value=int() as value) if value.bit_length() <= WORD:  # includes bool
            return 1.0
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return 1.0
        case ast.BinOp(left, ast.Pow() | ast.LShift() as op, right):
            return _power(left, right, isinstance(op, ast.LShift), leaf)
        case ast.BinOp(left, ast.Mult(), right):
            return _product([_terms(left, leaf), _terms(right, leaf)], leaf)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return _terms(left, leaf) + _terms(right, leaf)
        case ast.UnaryOp(ast.USub(), operand):
            return _terms(operand, leaf)
        case ast.Compare(ops=ops) if any(isinstance(op, ast.In | ast.NotIn) for op in ops):
            raise ValueError
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp():
            return _of_function([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)], leaf)
    return leaf(node)


def _product(terms: Sequence[float], leaf: Terms) -> float:
    """Python computes a guard's numbers, whose bits add up; sympy multiplies a size out."""
    return sum(terms) if leaf is _terms_of_guard else math.prod(terms)


def _of_function(parts: Sequence[ast.expr], leaf: Terms) -> float:
    """Count double in a size, because sympy proves bounds of a function; more than two parts are compared in pairs."""
    terms = sum(_terms(part, leaf) for part in parts)
    return terms if leaf is _terms_of_guard else 2 * terms if len(parts) < 3 else terms**2


def _power(base: ast.expr, exponent: ast.expr, is_shift: bool, leaf: Terms) -> float:
    """Count the terms of a power or shift by a literal; an unknown exponent has no bound."""
    value, terms = abs(_number(exponent)), max(2.0, _terms(base, leaf))
    if value > WORD:
        raise ValueError
    return 2 * terms if is_shift else terms * value if leaf is _terms_of_guard else terms**value


def _number(node: ast.expr) -> float:
    """Return the value of a literal such as `2`, `-2`, `Integer(2)`, `Float('0.5')` or `Rational(1, 2)`."""
    match node:
        case ast.UnaryOp(ast.USub(), operand):
            return -_number(operand)
        case ast.Call(ast.Name("Rational"), [ast.Constant(int() as numerator), ast.Constant(2)], []):
            return float(numerator)  # a root counts as a power; sympy takes long over other roots
        case ast.Call(ast.Name("Float"), [ast.Constant(str() as text)]) if re.fullmatch(QUOTED["Float"], text):
            return float(text)
        case ast.Call(ast.Name("Integer" | "ToFloat"), [number], []):
            return _number(number)
        case ast.Constant(int() | float() as value):
            return float(value) if abs(value) <= WORD else math.inf
    raise ValueError


def _terms_of_size(node: ast.expr) -> float:
    match node:
        case ast.Name(name) if LEAVES.fullmatch(name):
            return 1.0
        case ast.Call(ast.Name(kind), [ast.Constant(str() as text)], options) if kind in QUOTED:
            for each in options:  # assumptions about a symbol, or a float's precision
                value = each.value.value if isinstance(each.value, ast.Constant) else None
                if not ASSUMPTIONS.fullmatch(each.arg or "") or not isinstance(value, int) or not 0 <= value <= 1_000:
                    raise ValueError
            if re.fullmatch(QUOTED[kind], text):
                return 1.0
        case ast.Call(ast.Name("Pow" | "LShift" as kind), [base, exponent], []):
            return _power(base, exponent, kind == "LShift", _terms_of_size)
        case ast.Call(
            ast.Name("FloatPow"), [base, ast.Call(ast.Name("Float" | "Integer" | "Rational")) as exponent], []
        ):
            return _power(base, exponent, False, _terms_of_size)
        case ast.Call(ast.Name("Mul"), factors, []):
            return _product([_terms(factor, _terms_of_size) for factor in factors], _terms_of_size)
        case ast.Call(ast.Name("Add" | "Integer" | "Rational" | "ToFloat"), parts, []):
            return max(1.0, sum(_terms(part, _terms_of_size) for part in parts))
        case ast.Call(ast.Name(kind), args, []) if SYMPY.fullmatch(kind):
            parts = [part for arg in args for part in (arg.elts if isinstance(arg, ast.Tuple) else [arg])]
            return _of_function(parts, _terms_of_size)
    raise ValueError


def _terms_of_guard(node: ast.expr) -> float:
    if _is_input(node):
        return 1.0
    match node:
        case ast.Name("inf" | "nan") | ast.Attribute(ast.Name("math"), "inf" | "nan" | "pi" | "e"):
            return 1.0
        case ast.Call(args=args) if _is_layout(node) and bool(args) == (_method(node) in LISTS):
            return 1.0
        case ast.Call(ast.Attribute(ast.Name("math" | "torch" as module), name), args, []):
            is_known = FUNCTIONS[module].fullmatch(name)
        case ast.Call(ast.Name(name), args, []):
            is_known = FUNCTIONS[""].fullmatch(name)
        case _:
            raise ValueError
    if not is_known or (name == "round" and len(args) == 2 and abs(_number(args[1])) > WORD):
        raise ValueError
    return _of_function(args, _terms_of_guard)


def _is_input(node: ast.expr) -> bool:
    """Return True for `L['x']`, a part such as `L['x'][0]['key'].field`, or an entry of `.size()` or `.stride()`."""
    match node:
        case ast.Attribute(owner, name):  # a field of a named tuple, not an attribute of a tensor
            return not name.startswith("_") and not hasattr(torch.Tensor, name) and _is_input(owner)
        case ast.Subscript(owner, ast.Constant(int() | str() as index) | ast.UnaryOp(ast.USub(), ast.Constant(index))):
            if not isinstance(index, (int, str)) or (isinstance(index, str) and not _is_plain_key(index)):
                return False
            if isinstance(owner, ast.Call):
                return _is_layout(owner) and not owner.args and _method(owner) in LISTS
            return (isinstance(owner, ast.Name) and owner.id == "L") or _is_input(owner)
    return False


def _is_plain_key(text: str) -> bool:
    """Return True if Python writes the text between single quotes as it is."""
    return text.isprintable() and not re.search(r"['\"\\]", text)


def _is_layout(node: ast.AST) -> bool:
    """Return True for a call such as `L['x'].size()` whose receiver is an input."""
    if not (isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Attribute)):
        return False
    plain = all(isinstance(each, ast.Constant) and isinstance(each.value, int) for each in node.args)
    return plain and _method(node) in (*LISTS, *NUMBERS_OF_LAYOUT) and _is_input(node.func.value)


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _computed_inputs(text: str) -> set[str]:
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


def _outputs_tree(text: str) -> str | None:
    try:
        _, schema = json.loads(text)
        return _tree(schema)
    except (ValueError, LookupError, TypeError, AttributeError):
        return "has a description of inputs or outputs that cannot be read"


def _inputs_tree(text: str) -> str | None:
    if what := _outputs_tree(text):
        return what
    children = json.loads(text)[1]["children_spec"]
    if len(children) == 2 and children[1]["type"] == "builtins.dict":  # argument names of a `def`
        return next(filter(None, (_name(str(name)) for name in json.loads(children[1]["context"]))), None)
    return None


def _tree(spec: dict[str, Any]) -> str | None:
    """Return the fault in a pytree's description, which may make torch look up a class by module and name."""
    context = spec["context"]
    if isinstance(context, str):
        with contextlib.suppress(ValueError):  # a string that is not JSON is the name of a named tuple
            context = json.loads(context)
    for part in _dicts(context):
        if "default_factory_module" in part:
            _look_up(part["default_factory_module"], part["default_factory_name"], type)
        if "__enum__" in part:
            module, _, name = str(part["fqn"]).partition(":")
            _look_up(module, name, type(Enum))
        if what := next(filter(None, map(_plain, part)), None):
            return what
    for _, _, text in _texts(context, "", ""):
        if what := _plain(text):
            return what
    return next(filter(None, (_tree(child) for child in spec["children_spec"])), None)


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _numeric(text: str) -> str | None:
    return None if text in ("Infinity", "-Infinity", "NaN") else "has text for a number"


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


CHECKS: dict[str, Check] = {
    "name": _name,
    "as_name": _name,
    "forward_arg_names": _name,
    "target": _target,
    "as_operator": _target,
    "expr_str": _expression,
    "guards_code": _guard,
    "in_spec": _inputs_tree,
    "out_spec": _outputs_tree,
    **dict.fromkeys(("as_float", "as_floats", "real", "imag"), _numeric),
    "path_name": lambda text: None if re.fullmatch(r"(weight|tensor)_\d+", text) else "names an entry of another kind",
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn"), _path),
    "field_names": _name,
    **dict.fromkeys(("custom_obj_name", "class_fqn", "as_string", "as_strings"), _plain),
    **dict.fromkeys(FREE, lambda text: None),
    **dict.fromkeys(("type", "verifiers", "dialect", "torch_version"), _plain),
}
