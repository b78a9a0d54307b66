"""Check the JSON of an exported program: torch turns parts of it into Python source, expressions and imports."""

from __future__ import annotations

import contextlib
import itertools
import json
import keyword
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any

import torch

from tpcompiler._torch import OpOverloadPacket, is_torchscript_op, program_target
from tpcompiler.errors import option
from tpcompiler.runtime.expressions import (
    BITS,
    LARGEST_EXPONENT,
    SIZE_BITS,
    computed_inputs,
    count_terms,
    is_guard,
)

Check = Callable[[str], str | None]

# Texts about a node's origin, which torch neither runs nor calls.
FREE = ("stack_trace", "nn_module_stack", "torch_fn", "custom", "from_node")
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
TERMS_OF_ALL = 3_000_000  # of all sizes, repeated ones included
POWERS = ("_operator.pow", "_operator.lshift")
NUMBERS = {"as_int", "as_sym_int", "as_float", "as_sym_float", "as_bool", "as_sym_bool"}
COUNTED = re.compile("(u|zuf)")  # for data-dependent sizes, torch counts from 0 to the number in the name
VMAP = re.compile(r"torch\._functorch\.predispatch\.\w+")  # torch.vmap leaves these in a training program


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
    terms = 0.0
    for key, parent, text in _texts(data, "", ""):
        if key == "expr_str" and (terms := terms + (count_terms(text) or 0)) > TERMS_OF_ALL:
            raise Unsafe(f"has more sizes than torch reads in some minutes: {_short(text)}")
        # torch writes an op's text argument into its source with `repr`, but a constant input unquoted.
        if (key, text) in seen or (key in ("as_string", "as_strings") and parent == "arg"):
            continue
        if key not in CHECKS:
            raise Unsafe(f"has text where none belongs: {_short(text)} as {key!r}")
        if what := CHECKS[key](text):
            raise Unsafe(f"{what}: {_short(text)}")
        seen.add((key, text))
    ranges = (data.get("range_constraints") or {}) if isinstance(data, dict) else {}
    hints = [each["hint"] for each in _dicts(data) if "expr_str" in each and isinstance(each.get("hint"), dict)]
    for number in (value for each in (*ranges.values(), *hints) for value in each.values()):
        if isinstance(number, int) and number.bit_length() > SIZE_BITS:
            raise Unsafe(f"has a size that is too large: {_short(str(number))}")
    for name in ranges:
        if COUNTED.match(name) and not re.fullmatch(rf"{COUNTED.pattern}\d{{1,6}}", name):
            raise Unsafe(f"makes torch count up to a size's name: {_short(name)}")
    _check_numbers(data)
    computed = {each for key, text in seen if key == "guards_code" for each in computed_inputs(text)}
    if others := sorted(computed - _numbers_taken(data)) if computed else ():
        raise Unsafe(f"has an input check that computes with something other than a number: {_short(others[0])}")


@dataclass(frozen=True)
class _Bound:
    """A bound on a number: its bits, and its value if unknown sizes are small."""

    bits: int = SIZE_BITS
    value: int = LARGEST_EXPONENT

    @staticmethod
    def over(bounds: Iterable[_Bound], least: _Bound) -> _Bound:
        every = [least, *bounds]
        return _Bound(max(each.bits for each in every), max(each.value for each in every))


def _check_numbers(data: object) -> None:
    """Check that the numbers that nodes compute stay small, and that no node computes a text: torch evaluates them.

    A name that no node defines is an input: in a nested graph it may be any number of the outer graph.
    """
    inputs = _Bound()
    for graph in (each for each in _dicts(data) if isinstance(each.get("nodes"), list)):
        literals = {name: each.get("as_int") for name, each in (graph.get("sym_int_values") or {}).items()}
        known = {name: _Bound(n.bit_length(), abs(n)) for name, n in literals.items() if isinstance(n, int)}
        for node in graph["nodes"]:
            target = str(node["target"])
            if not OPERATORS.fullmatch(target):
                continue
            bound = _bound(target, [list(_dicts(each["arg"])) for each in node["inputs"]], known, inputs)
            if bound.bits > BITS:
                raise Unsafe(f"computes a number that is too large, by {_short(target)}")
            names = (part.get("as_name") for part in _dicts(node["outputs"]))
            known |= {name: bound for name in names if isinstance(name, str)}
        inputs = _Bound.over(known.values(), inputs)


def _bound(
    target: str, given: Sequence[Sequence[Mapping[str, Any]]], known: Mapping[str, _Bound], inputs: _Bound
) -> _Bound:
    parts = [part for each in given for part in each]
    if any(key.startswith("as_string") for part in parts for key in part):
        raise Unsafe(f"computes with text: {_short(target)}")
    if target != "_operator.getitem" and any(isinstance(value, list) for part in parts for value in part.values()):
        raise Unsafe(f"computes with lists: {_short(target)}")
    args = [_Bound.over((_written(part, known, inputs) for part in each), _Bound(0, 0)) for each in given]
    bits, value = sum(each.bits for each in args), sum(each.value for each in args)
    if target in POWERS:
        base, times = args[0], max(args[1].value, 1)
        if any(isinstance(part.get("as_float"), float) for part in parts):
            return _Bound()
        bits = base.bits * times if target == "_operator.pow" else base.bits + times
        return _Bound(bits, 1 << bits if bits <= BITS else 0)
    if target == "_operator.mul":
        return _Bound(bits, math.prod(each.value for each in args))
    return _Bound(bits if target.startswith("math") else max((each.bits for each in args), default=0) + 1, value)


def _written(argument: Mapping[str, Any], known: Mapping[str, _Bound], inputs: _Bound) -> _Bound:
    """Return the bound of an argument: a literal, the result of an earlier node, or an unknown input."""
    if isinstance(name := argument.get("as_name"), str):
        return known.get(name, inputs)
    if isinstance(number := argument.get("as_float"), float):
        return _Bound(SIZE_BITS, min(int(abs(number)), 1 << SIZE_BITS) if math.isfinite(number) else 1 << SIZE_BITS)
    number = argument.get("as_int", argument.get("as_float"))
    return _Bound(number.bit_length(), abs(number)) if isinstance(number, int) else _Bound(0, 0)


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


def _origins(text: str) -> str | None:
    """Check the functions that nodes came from: torch looks them up by `getattr`, and a loader would open a library."""
    for origin in text.split(";"):
        target = origin.rpartition(",")[2]
        if not target.startswith(("torch", "math", "_operator")):
            continue
        owner: Any = {"torch": torch, "math": math}.get(target.partition(".")[0], operator)
        for part in target.split(".")[1:]:
            if not isinstance(owner, (types.ModuleType, type, OpOverloadPacket)):
                return "looks into something other than a module, class or op"
            owner = getattr(owner, part, None)
    return None


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


def _expression(text: str) -> str | None:
    return None if count_terms(text) else "has a size that is not a plain expression"


def _guard(text: str) -> str | None:
    return None if is_guard(text) else "has an input check that is not a plain comparison"


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


def _number(text: str) -> str | None:
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
    **dict.fromkeys(("as_float", "as_floats", "real", "imag"), _number),
    "path_name": lambda text: None if re.fullmatch(r"(weight|tensor)_\d+", text) else "names an entry of another kind",
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "user_input_name", "fqn"), _path),
    "field_names": _name,
    **dict.fromkeys(("custom_obj_name", "class_fqn", "as_string", "as_strings"), _plain),
    "source_fn_stack": _origins,
    **dict.fromkeys(FREE, lambda text: None),
    **dict.fromkeys(("type", "verifiers", "dialect", "torch_version"), _plain),
}
