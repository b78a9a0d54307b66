"""Check that the Python that torch writes for a program computes its graph.

`ExportedProgram.module()` turns the state into attributes of a module, writes the graph as Python, and runs that; the
judges read the graph. The two can differ by names (an argument hides a global of its name, Python treats two spellings
of an identifier as one, a value called `self` hides the module) and by literals (`-1 ** n`, `infj`). So the Python is
read back here with Python's own parser and scope rules, statement by statement: each must match the node that it was
written for. None of it is run.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import operator
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from tpcompiler._torch import (
    LEAF_KINDS,
    NAMED_BY_TORCH,
    WRAPPERS,
    WRITTEN_KINDS,
    OpOverload,
    aten,
    graph_modules,
    tree_unflatten,
)
from tpcompiler.errors import reason

WRITE = "rename it in the model, or write the constant in another way, and export again"
GUARDS = "_guards_fn"  # the attribute for torch's own module of input checks
VALUES = {torch.device, complex, slice, torch.Size}  # calls of these with literals are literals
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.MatMult: operator.matmul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TAKEN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *NAMED_BY_TORCH, "self", GUARDS}
ATTRIBUTES = set(dir(fx.GraphModule))


class _Difference(Exception):
    """A difference between the module and the graph; the text locates it."""


@dataclass(frozen=True)
class Attribute:
    """`self` and a path of attributes."""

    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """An argument of `forward`, before torch flattens it."""

    name: str


@dataclass(frozen=True)
class _TracedCall:
    function: object
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def find_difference(program: ExportedProgram) -> str:
    """Return the first difference between a program's module and its graph; empty if they agree."""
    if both := sorted(program.state_dict.keys() & program.constants.keys()):
        return f"{both[0]!r} is in the state and in the constants"
    if is_plain(program):
        return ""
    try:
        module = program.module()
    except Exception as error:  # Python's compiler or torch raise anything for such names
        return f"torch cannot make a module of it: {reason(error)}"
    try:
        _read_state(program, module)
        for part in graph_modules(module):
            _Reader(part).read()
    except _Difference as difference:
        return str(difference)
    return ""


def is_plain(program: ExportedProgram) -> bool:
    """Return True if names and literals are so plain that Python can only read them as intended.

    Names are ASCII and differ from the words of Python, builtins, the module and torch's Python; ops come from a
    library and take numbers, infinities too, whose names no node has; nothing is written back.
    """
    specs = program.graph_signature
    if any(spec.kind in WRITTEN_KINDS for spec in specs.output_specs):
        return False
    parts = {str(spec.target) for spec in specs.input_specs if spec.kind in LEAF_KINDS}
    owners = {fqn.rpartition(".")[0] for fqn in parts}
    if parts & owners or not all(map(_is_attribute, {word for fqn in parts for word in fqn.split(".")})):
        return False
    call = program.module_call_graph[0].signature
    if call is None:
        return False
    given, named = tree_unflatten(list(range(call.in_spec.num_leaves)), call.in_spec)
    names = [*(call.forward_arg_names or ()), *named]
    if call.forward_arg_names and call.forward_arg_names[len(given) :] != list(named):
        return False
    graphs = [part.graph for part in graph_modules(program.graph_module)]
    return all(map(_is_free, names)) and all(_is_plain_node(node) for graph in graphs for node in graph.nodes)


def _is_plain_node(node: fx.Node) -> bool:
    if not _is_free(node.name) or node.op not in ("placeholder", "get_attr", "call_function", "output"):
        return False
    if node.op == "get_attr" and (not _is_free(str(node.target)) or node.target == GUARDS):
        return False
    is_op = isinstance(node.target, OpOverload) or node.target in WRAPPERS
    if node.op == "call_function" and not is_op and node.target is not operator.getitem:
        nodes = all(isinstance(arg, fx.Node) for arg in node.args) and not node.kwargs
        return nodes and node.target in OPERATORS.values()
    return not any(map(keyword.iskeyword, node.kwargs)) and _is_plain_value((node.args, dict(node.kwargs)))


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain_value, value))
    if isinstance(value, dict):
        return all(map(_is_plain_value, value.values()))
    return (
        value is None
        or isinstance(value, fx.Node | torch.dtype | torch.layout | torch.memory_format)
        or type(value) in (bool, int)
        or (type(value) is float and not math.isnan(value))
        or (type(value) is str and value.isascii() and value.isprintable())
        or (type(value) is torch.device and value.type.isalpha())
    )


def _is_attribute(word: str) -> bool:
    """Return True if a word can be an attribute of a module: the name of a weight or submodule, or a layer's number."""
    return word.isdecimal() or (_is_free(word) and word not in ATTRIBUTES and not word.startswith("_"))


def _is_free(name: str) -> bool:
    return bool(PLAIN.fullmatch(name)) and name not in TAKEN and not name.startswith("__")


def _read_state(program: ExportedProgram, module: fx.GraphModule) -> None:
    """Check that each attribute is the tensor of its name, and that each write has the target in the signature."""
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind in LEAF_KINDS:
            tensor = program.state_dict.get(str(spec.target), program.constants.get(str(spec.target)))
            if not _same_tensor(operator.attrgetter(str(spec.target))(module), tensor):
                raise _Difference(f"torch puts another tensor in the place of {spec.target!r}")
    if any(node.op == "get_attr" and node.target == GUARDS for node in program.graph.nodes):
        raise _Difference(f"torch replaces {GUARDS!r} by another module")
    copies = [node for node in module.graph.nodes if node.target is aten.copy_.default]
    written = [spec for spec in signature.output_specs if spec.kind in WRITTEN_KINDS]
    for spec, copy in zip(written, copies[len(copies) - len(written) :], strict=True):
        into = copy.args[0]
        kind = "placeholder" if spec.kind is OutputKind.USER_INPUT_MUTATION else "get_attr"
        if (into.op, into.target) != (kind, spec.target):
            raise _Difference(f"torch writes to another tensor named {spec.target!r}")


def _same_tensor(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one is other or (one.untyped_storage()._cdata == other.untyped_storage()._cdata))
    )


class _Reader:
    """A reader of the Python of one graph, in which every name stands for a node or for an input of the function."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.globals = {**vars(builtins), **type(module).forward.__globals__}
        function = next(each for each in ast.parse(module.code).body if isinstance(each, ast.FunctionDef))
        self.body = function.body
        nodes = list(module.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.left = [node for node in reversed(nodes) if node.op != "placeholder"]
        first, *names = (each.arg for each in function.args.args)
        flat = not isinstance(module.graph._codegen, fx.graph._PyTreeCodeGen)
        self.values: dict[str, Any] = {first: Attribute()}
        self.values |= zip(names, self.inputs if flat else map(Argument, names), strict=flat)
        # Python: a name that is bound anywhere in a function is local everywhere in it.
        bound = (each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        self.own = {each.id for each in bound} | self.values.keys()

    def read(self) -> None:
        for statement in self.body:
            try:
                self._statement(statement)
            except (_Difference, LookupError, TypeError, AttributeError, ValueError):
                source = ast.unparse(statement)[:200]
                raise _Difference(f"torch's Python for it has `{source}`, which differs from its graph") from None
        if self.left:
            raise _Difference(f"torch's Python has no {self.left[-1].name!r}")

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):  # torch flattens the arguments
                self._flattened(self._value(value))
                bound = [name.id for name in names if isinstance(name, ast.Name)]
                self.values |= zip(bound, self.inputs, strict=True)
            case ast.Assign(targets=names, value=ast.Constant(value=None)):  # torch drops values after their last use
                for name in names:
                    assert isinstance(name, ast.Name)
                    del self.values[name.id]
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                parsed_value = self._value(value)
                if isinstance(parsed_value, _TracedCall | Attribute):
                    parsed_value = self._next(parsed_value, name)
                self.values[name] = parsed_value
            case ast.AnnAssign(value=None) | ast.Pass():
                pass
            case ast.Return(value=ast.expr() as value):
                self._next(self._value(value))
            case _:
                raise _Difference

    def _next(self, actual: Any, name: str = "") -> fx.Node:
        """Return the node that matches the statement."""
        node: fx.Node = self.left.pop()
        match node.op:
            case "get_attr":
                expected: Any = Attribute(tuple(str(node.target).split(".")))
            case "call_function":
                expected = _TracedCall(node.target, node.args, node.kwargs)
            case "call_module":
                expected = _TracedCall(Attribute(tuple(str(node.target).split("."))), node.args, node.kwargs)
            case "output":
                if isinstance(actual, _TracedCall) and actual.args[1:] == (Attribute(("_out_spec",)),):
                    actual = actual.args[0]
                (expected,), name = node.args, node.name
            case _:
                raise _Difference
        if node.name != name or _form(actual) != _form(expected):
            raise _Difference
        return node

    def _flattened(self, call: Any) -> None:
        """Check that each argument is flattened under its own name."""
        given, spec = call.args
        args, kwargs = given if isinstance(given, tuple) else (given, {})
        names = [value.name for value in (*args, *kwargs.values())]
        if spec != Attribute(("_in_spec",)) or names != list(self.values)[1:] or names[len(args) :] != list(kwargs):
            raise _Difference

    def _value(self, read: ast.expr) -> Any:
        match read:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.values[name] if name in self.own else self.globals[name]
            case ast.Tuple(elts=parts):
                return tuple(map(self._value, parts))
            case ast.List(elts=parts):
                return [*map(self._value, parts)]
            case ast.Dict(keys=keys, values=values):
                return {self._value(k): self._value(v) for k, v in zip(keys, values, strict=True) if k is not None}
            case ast.Attribute(value=of, attr=name):
                return _attribute(self._value(of), name)
            case ast.Subscript(value=of, slice=at):
                return _TracedCall(operator.getitem, (self._value(of), self._value(at)))
            case ast.UnaryOp(op=sign, operand=operand):
                value = self._value(operand)
                if isinstance(sign, ast.USub) and type(value) in (int, float, complex):
                    return -value
                return _TracedCall(OPERATORS[type(sign)], (value,))
            case ast.BinOp(left=left, op=sign, right=right):
                return _result(OPERATORS[type(sign)], self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                return _TracedCall(OPERATORS[type(sign)], (self._value(left), self._value(right)))
            case ast.Call(func=function, args=args, keywords=keywords):
                call = _TracedCall(
                    self._value(function),
                    tuple(map(self._value, args)),
                    {str(each.arg): self._value(each.value) for each in keywords},
                )
                if call.function is getattr and isinstance(call.args[0], Attribute):
                    return _attribute(*call.args)
                return call.function(*call.args, **call.kwargs) if call.function in VALUES else call
        raise _Difference


def _attribute(of: Any, name: str) -> Any:
    if isinstance(of, Attribute):
        return Attribute((*of.path, name))
    if isinstance(of, fx.Node | Argument | _TracedCall):
        raise _Difference
    return getattr(of, name)


def _result(function: Any, left: Any, right: Any) -> Any:
    """Return a number for `(1+2j)`, and a call for anything else."""
    if function in (operator.add, operator.sub) and type(right) is complex and type(left) in (int, float):
        return complex(function(left, right))
    return _TracedCall(function, (left, right))


def _form(value: Any) -> object:
    """Return a value in a form whose `==` tells apart what Python's `==` does not: 1, 1.0 and True, 0.0 and -0.0."""
    match value:
        case _TracedCall():
            return _TracedCall, value.function, _form(value.args), _form(value.kwargs)
        case slice():
            return slice, _form((value.start, value.stop, value.step))
        case dict():
            return dict, [*value], [*map(_form, value.values())]
        case list() | tuple():
            return tuple if isinstance(value, tuple) else list, [*map(_form, value)]
        case complex() if value.imag:  # torch writes -0.0-2j as -0 - 2j, which Python reads as 0.0-2j: equal in use
            return complex, repr(value.real + 0.0), repr(value.imag)
        case float() | complex():  # as text, in which NaN equals itself
            return type(value), repr(value)
    return type(value), value
