"""EVERY private torch import of the project, and every difference between the versions of torch that it runs on.

Nothing else in the two packages may import a private torch name, or name `torch.ops`. When torch moves, look here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import math
import re
import typing
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
import torch.distributed as dist
from torch import fx
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import (
    _get_decomp_for_cia,
    _is_preservable_cia_op,
    _special_op_to_preserve_cia,
)
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (defines PT2E's ops)
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.export import ExportedProgram
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.export.exported_program import (
    _convert_guards_to_code,
    _decompose_exported_program,
    _override_composite_implicit_decomp,
)
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, safe_expand, statically_known_true
from torch.fx.graph import CodeGen, _custom_builtins
from torch.testing._internal.distributed import fake_pg
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.functions import FloorDiv, Max, Min
from torch.utils._sympy.value_ranges import ValueRanges

from tpcompiler.errors import ArtifactError, TpCompilerWarning

FAKE_GROUP: Any = vars(fake_pg)["FakeProcessGroup"]
SYMPY_FUNCTIONS = {  # those that torch names when it reads a size; of maxima it takes sympy's own
    name: getattr(sympy_functions, name) for name in sympy_functions.__all__ if name not in ("Max", "Min")
}
OLDEST, NEWEST = (2, 11), (2, 15)  # that this was run with: docs/compat.md
LEAF_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
WRITTEN_KINDS = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION, OutputKind.PARAMETER_MUTATION)
GONE = {"aten::cholesky": (2, 14)}  # ops that a rule names, and the version since when torch lacks them
OWN = "tpcompiler"  # the namespace of this project's own ops
_LIBRARIES: list[Any] = []
MISSING: set[str] = set()  # ops that were looked up and that this torch does not have


class _Ops:
    """`torch.ops.NAMESPACE`. An op that this torch lacks is one that no program calls."""

    def __init__(self, namespace: str) -> None:
        self._name, self._ops = namespace, getattr(torch.ops, namespace)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name, None)
        if found is None:
            MISSING.add(f"{self._name}::{name}")
            found = _MissingOp(f"{self._name}.{name}")
        setattr(self, name, found)  # so that it is looked up once
        return found


class _MissingOp(str):
    def __getattr__(self, overload: str) -> _MissingOp:
        return _MissingOp(f"{self}.{overload}")


aten, c10d_functional = _Ops("aten"), _Ops("_c10d_functional")
# Calls of a graph under a switch of autograd's, and at which argument its operands begin.
NAMED_BY_TORCH = frozenset(_custom_builtins)  # in the Python of a graph: `inf`, `device`, ...
WRAPPERS = {_Ops("higher_order").wrap_with_set_grad_enabled: 2}
quantized_decomposed = _Ops("quantized_decomposed")  # PT2E's
symm_mem = _Ops("symm_mem")


def define_op(schema: str, run: Any, fake: Any) -> OpOverload:
    """Register an op of this project's own; `schema` is without the namespace."""
    library: Any = vars(torch.library)["Library"](OWN, "FRAGMENT")  # it has no types
    name = library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{OWN}::{name}", fake, lib=library)
    _LIBRARIES.append(library)  # the op goes with it
    return cast(OpOverload, getattr(getattr(torch.ops, OWN), name).default)


def find_op(name: str) -> OpOverload:
    """The op of this name, such as `aten.mm.default`."""
    namespace, packet, overload = name.split(".")
    return cast(OpOverload, getattr(getattr(getattr(torch.ops, namespace), packet), overload))


def warn_of_newer(version: str) -> None:
    """Say it where a torch is newer than all that this was run with: private names may have moved."""
    if found := re.match(r"(\d+)\.(\d+)", version):
        if (int(found[1]), int(found[2])) > NEWEST:
            newest = ".".join(map(str, NEWEST))
            warnings.warn(
                f"torch {version} is newer than {newest}, the newest that tpcompiler was run with: "
                f"where something fails, install torch {newest}",
                TpCompilerWarning,
                stacklevel=2,
            )


warn_of_newer(torch.__version__)

__all__ = [
    "MISSING",
    "NAMED_BY_TORCH",
    "NEWEST",
    "OLDEST",
    "WRAPPERS",
    "DeviceMesh",
    "FakeTensor",
    "FakeTensorMode",
    "FloorDiv",
    "HigherOrderOperator",
    "Max",
    "Min",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "TreeSpec",
    "aten",
    "c10d_functional",
    "calls_others",
    "decomposed",
    "decomposing",
    "define_op",
    "divided_range",
    "divided_sizes",
    "enable_python_dispatcher",
    "fake_group",
    "find_op",
    "forget_index",
    "functional_copy",
    "functional_op",
    "group_is_registered",
    "guards_of",
    "is_wrapper_subclass",
    "make_fx",
    "map_symmetric",
    "op_overload",
    "program_target",
    "quantized_decomposed",
    "quiet_torch",
    "read_size",
    "record_reader",
    "redistribute",
    "register_group",
    "resolve_group",
    "shape_facts",
    "size_range",
    "statically_known_true",
    "stays_whole",
    "substituted",
    "sym_hint",
    "sym_multiple",
    "symbols_of",
    "symm_mem",
    "traced_mesh",
    "tree_flatten",
    "tree_map",
    "tree_names",
    "tree_unflatten",
    "with_graph",
]


def functional_copy(program: ExportedProgram, opened: Collection[OpOverload]) -> ExportedProgram:
    """The program with every op as it was exported, but for those `opened`, and nothing changed in place.

    Those are decomposed as their kernels do.
    """
    return _retraced(program, dict.fromkeys(_ops_called(program), _special_op_to_preserve_cia), {}, opened)


def decomposed(
    program: ExportedProgram,
    kept: Collection[OpOverload],
    own: Mapping[OpOverload, Callable[..., Any]],
    opened: Collection[OpOverload],
) -> ExportedProgram:
    """A functional copy in core ATen ops, but for those that are `kept`, and those that `own` decomposes.

    Those `opened` are decomposed as their kernels do.
    """
    return _retraced(program, *_tables(program, kept, own), opened)


@contextlib.contextmanager
def decomposing(
    program: ExportedProgram, kept: Collection[OpOverload], own: Mapping[OpOverload, Callable[..., Any]]
) -> Iterator[tuple[Mapping[Any, Any], Mapping[Any, Any]]]:
    """In this block a call that is traced with the second table becomes what `decomposed` makes of it.

    The first says the same of composite ops, those that stay among them.
    """
    how, others = _tables(program, kept, own)
    how = {op: each for op, each in how.items() if _is_composite(op)}
    with quiet_torch(), unset_fake_temporarily(), _override_composite_implicit_decomp(how):
        yield how, others


@contextlib.contextmanager
def keeping_whole(*ops: OpOverload) -> Iterator[None]:
    """In this block a trace leaves these composite ops as they are."""
    with (
        enable_python_dispatcher(),
        _override_composite_implicit_decomp(dict.fromkeys(ops, _special_op_to_preserve_cia)),
    ):
        yield


def stays_whole(op: OpOverload, how: Mapping[Any, Any], table: Mapping[Any, Any]) -> bool:
    """Whether a trace in `decomposing` leaves an op as it is: it need not be traced."""
    if op in how:
        return how[op] is _special_op_to_preserve_cia
    return op not in table and not calls_others(op)


def _tables(
    program: ExportedProgram, kept: Collection[OpOverload], own: Mapping[OpOverload, Callable[..., Any]]
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    # `default_decompositions` says the same of all ops of ATen, for which it loads each of them.
    table: dict[Any, Any] = {**_core_aten_decompositions_post_autograd(), **own}
    how = {op: table.get(op, _special_op_to_preserve_cia) for op in (*_ops_called(program), *own)}
    composite = (op for op in _ops_called(program) if op not in table and _is_composite(op))
    how |= {op: _get_decomp_for_cia(op) for op in composite if op not in PRESERVED_ATEN_CIA_OPS}
    how |= dict.fromkeys(kept, _special_op_to_preserve_cia)  # within others' decompositions too
    return how, {op: f for op, f in table.items() if not _is_composite(op) and op not in kept}


@functools.cache
def functional_op(op: OpOverload) -> OpOverload | None:
    """The op that returns what this one writes to its first argument, if there is one with the same arguments."""
    namespace, _, name = op._schema.name.partition("::")
    arguments = op._schema.arguments
    if namespace != "aten" or not name.endswith("_") or name.startswith("_") or not arguments:
        return None
    if torch.Tag.inplace_view in op.tags or name == "set_":  # it is another tensor from then on
        return None
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    found = getattr(packet, op._overloadname, None)
    if written != [True] + [False] * (len(arguments) - 1) or not isinstance(found, OpOverload):
        return None
    same = [each.name for each in found._schema.arguments] == [each.name for each in arguments]
    return found if same and not found._schema.is_mutable and len(found._schema.returns) == 1 else None


@functools.cache
def calls_others(op: OpOverload) -> bool:
    """Whether the op's kernel calls other ops, on tensors of any device (CompositeImplicitAutograd)."""
    name = op.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _kernel_of(op: OpOverload) -> Callable[..., Any]:
    """What runs in C++. For dropout torch has another in Python, which clones what this one gives back."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("kernel", None)  # torch passes the op itself to functions of its own
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return decompose


def _ops_called(program: ExportedProgram) -> set[OpOverload]:
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    return {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}


@contextlib.contextmanager
def quiet_torch() -> Iterator[list[BaseException]]:
    """Keep what torch logs and warns about off the terminal; yields the errors that it logged."""
    heard: list[BaseException] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(record.exc_info[1])

    known = logging.root.manager.loggerDict.items()
    loud = [
        logger
        for name, logger in known
        if isinstance(logger, logging.Logger) and logger.handlers and name.partition(".")[0] == "torch"
    ]
    before = [(logger, logger.handlers) for logger in loud]
    try:
        for logger in loud:
            logger.handlers = [Listener()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield heard
    finally:
        for logger, handlers in before:
            logger.handlers = handlers


@functools.cache
def _is_composite(op: object) -> bool:
    """Whether torch lets it be kept, or decomposed otherwise than its kernel does. A `_MissingOp` is nothing."""
    return isinstance(op, OpOverload) and _is_preservable_cia_op(op)


def _retraced(
    program: ExportedProgram, composite: Mapping[Any, Any], others: dict[Any, Any], opened: Collection[OpOverload]
) -> ExportedProgram:
    """What `run_decompositions` does with two tables, here of the ops that matter.

    It changes 900 composite ops for the time, and asks every namespace for its own: for a small program that takes
    longer than all else. One that is not in the table is decomposed as its kernel does.
    """
    how = {op: each for op, each in composite.items() if _is_composite(op)} | {op: _kernel_of(op) for op in opened}
    with quiet_torch(), unset_fake_temporarily():  # torch 2.13 warns about its own LeafSpec, and logs what it raises
        made: ExportedProgram = _decompose_exported_program(
            program,
            cia_to_decomp=how,
            python_decomp_table=others,
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
        return made


def read_size(text: str) -> Any:
    """What torch makes of a size in a file, and multiplies out to compare it. It evaluates it as Python."""
    made = sympy.sympify(text, locals=SYMPY_FUNCTIONS)
    left = [made]
    while left:  # it keeps each part by its text
        part = left.pop()
        str(part)
        left += part.args
    return safe_expand(made)


def symbols_of(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols in the sizes of these values."""
    sizes = [s for v in tree_flatten(list(values))[0] for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return set().union(*(s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)))


def divided_sizes(
    mode: FakeTensorMode, parts: Mapping[sympy.Symbol, int], ranges: Mapping[sympy.Symbol, Any]
) -> tuple[FakeTensorMode, dict[sympy.Symbol, sympy.Expr]]:
    """A copy of a fake mode, and for each symbol s of `parts` the expression `parts[s] * t` that stands for s in it.

    t is a new symbol, of s's range in `ranges` divided. Guards on s are left out: they speak of sizes that an input
    which is cut does not have.
    """
    from torch._dynamo.source import ConstantSource  # importing dynamo takes a second

    env = mode.shape_env
    assert env is not None
    made = copy.copy(env)
    for name, value in vars(env).items():
        if isinstance(value, (dict, list, set)):
            setattr(made, name, copy.copy(value))
    gone = parts.keys() | {s for s, by in env.replacements.items() if by.free_symbols & parts.keys()}
    made.guards = [guard for guard in env.guards if not guard.expr.free_symbols & gone]
    standing: dict[sympy.Symbol, sympy.Expr] = {}
    examples = _examples(env, parts, ranges)
    _hints(made).update({s: sympy.Integer(size) for s, size in examples.items() if s not in parts})
    for symbol, count in parts.items():
        new = made.create_symbol(examples[symbol] // count, ConstantSource(f"a part of {symbol}"), DimDynamic.DYNAMIC)
        made.var_to_range[new] = ValueRanges(*divided_range(ranges[symbol], count))
        standing[symbol] = count * new
    return FakeTensorMode(shape_env=made, allow_non_fake_inputs=mode.allow_non_fake_inputs), standing


def _examples(
    env: Any, parts: Mapping[sympy.Symbol, int], ranges: Mapping[sympy.Symbol, Any]
) -> dict[sympy.Symbol, int]:
    """The example's size for every symbol, those of `parts` rounded up to a multiple, at least twice it.

    (Torch makes a size of 1 static.) Where that breaks what the export found of them, that one is no greater than
    another or is a multiple of 4, all sizes are as many times as large.
    """
    known = {symbol: int(size) for symbol, size in _hints(env).items()}
    known |= {symbol: sym_hint(env.create_symintnode(symbol, hint=None)) for symbol in parts}
    rounded = known | {s: max(-(-known[s] // count), 2) * count for s, count in parts.items()}
    rounded |= {s: int(by.xreplace(rounded)) for s, by in env.replacements.items() if by.free_symbols <= known.keys()}
    if all(guard.expr.xreplace(rounded) != sympy.false for guard in env.guards):
        return rounded
    times = math.lcm(*(count // math.gcd(count, known[s]) for s, count in parts.items()))
    times *= 2 if any(known[s] * times == count for s, count in parts.items()) else 1
    scaled = {s: size * times for s, size in known.items()}
    return rounded if any(s in scaled and scaled[s] > sizes.upper for s, sizes in ranges.items()) else scaled


def _hints(env: Any) -> dict[sympy.Symbol, sympy.Integer]:
    found: dict[sympy.Symbol, sympy.Integer] = vars(env).get("backed_var_to_val", vars(env).get("var_to_val"))
    return found  # torch 2.13 renamed it


def divided_range(known: Any, count: int) -> tuple[Any, Any]:
    """The least and the greatest t such that `count * t` lies in a range; the first is greater where none does."""
    lower, upper = known.lower, known.upper
    return sympy.ceiling(lower / count), upper // count if upper.is_Integer else upper


def substituted(value: Any, mode: FakeTensorMode, standing: Mapping[sympy.Symbol, sympy.Expr]) -> Any:
    """A size, or a fake tensor, in another mode, with `standing` put in for symbols."""
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
    """(s, n) of a size that is n * s for one symbol s, else None."""
    expr = size.node.expr
    if not expr.free_symbols:
        return None  # a size that export took for dynamic and then found constant
    symbol = next(iter(expr.free_symbols))
    count = expr / symbol
    return (symbol, int(count)) if count.is_Integer else None


def size_range(mode: FakeTensorMode, symbol: sympy.Symbol) -> Any:
    """The range that the mode's shape environment knows for a symbol."""
    assert mode.shape_env is not None
    return mode.shape_env.var_to_range[symbol]


def shape_facts(mode: FakeTensorMode) -> tuple[int, ...]:
    """How many guards, replacements and deferred assertions the shape environment holds: growth is specialisation."""
    env = mode.shape_env
    if env is None:
        return ()
    return len(env.guards), len(env.replacements), sum(map(len, env.deferred_runtime_asserts.values()))


UNKNOWN_SIZE = 8192  # as torch takes it


def sym_hint(size: Any) -> int:
    """The size in the example that the program was exported with; of one that depends on data, a large one."""
    if isinstance(size, int):
        return size
    env, expr = size.node.shape_env, size.node.expr
    if hasattr(env, "optimization_hint"):  # from torch 2.13 on
        return int(env.optimization_hint(expr))
    hint = env.size_hint(expr, allow_none=True)
    return int(expr.subs(dict.fromkeys(expr.free_symbols, UNKNOWN_SIZE)) if hint is None else hint)


def sym_expr(size: Any) -> Any:
    """A size as a sympy expression of the program's symbols."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def op_overload(op: object) -> OpOverload | None:
    """The op that is meant by itself, by its packet, by what `torch.library.custom_op` returns, or by its name.

    Without a word on the overload it is the default one, or the only one; None where there is no such op.
    """
    op = getattr(op, "_opoverload", op)  # a CustomOpDef
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        name, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, namespace, None), name, None) if namespace and name else None
        op = getattr(op, overload, None) if overload else op
    if isinstance(op, OpOverloadPacket):
        overloads: Any = op.overloads  # without types
        names = overloads()
        chosen = "default" if "default" in names else names[0] if len(names) == 1 else None
        op = None if chosen is None else getattr(op, chosen)
    return op if isinstance(op, OpOverload) else None


def program_target(text: str) -> str | None:
    """The op that a program's file means by a name below torch, `torch.ops.NS.OP.OVERLOAD`: as `NS.OP.OVERLOAD`.

    None where it stands for something else; a name that stands for nothing here is given back as it is.
    """
    found: Any = torch
    for part in text.split(".")[1:]:  # as torch's own reader does
        if not hasattr(found, part):
            return text
        found = getattr(found, part)
    if isinstance(found, OpOverload):
        return str(found)
    if isinstance(found, HigherOrderOperator):
        return str(found)
    own = getattr(found, "__module__", None) == text.rpartition(".")[0] and callable(found)
    return text if own and not text.startswith("torch.ops.") else None


def is_torchscript_op(name: str) -> bool:
    """Whether an op by `program_target`'s name is one of TorchScript's own, which computes texts, lists or numbers."""
    namespace, *rest = name.split(".")
    if namespace not in ("aten", "prim") or len(rest) != 2:
        return False
    schema = getattr(getattr(getattr(torch.ops, namespace), rest[0]), rest[1])._schema
    types = [str(each.type) for each in (*schema.arguments, *schema.returns)]
    return bool(schema.returns) and not any("Tensor" in each for each in types)


def record_reader(file: IO[bytes] | io.RawIOBase) -> Any:
    """torch's own reader of archives, which need not see what `zipfile` sees."""
    file.seek(0)  # it takes the place where the file is for its beginning
    return vars(torch._C)["PyTorchFileReader"](file)


def is_registered_class(name: str) -> bool:
    """Whether a program's file may name this class in its tree of inputs or outputs."""
    return name in vars(_pytree)["SERIALIZED_TYPE_TO_PYTHON_TYPE"]


def tree_names(spec: Any) -> list[str]:
    """The path of every leaf of a pytree, as `logits`, `0` or `cache.0.key`; equal paths are numbered, `0#2`.

    Leaves are counted where a class does not name its parts.
    """
    try:
        leaves, _ = tree_flatten_with_path(tree_unflatten(list(range(spec.num_leaves)), spec))
    except ValueError:  # a class that was registered without names for its parts
        return [str(at) for at in range(spec.num_leaves)]
    names: list[str] = []
    times: Counter[str] = Counter()
    for path, _leaf in leaves:
        parts = (str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
        name = ".".join(parts) or "output"
        times[name] += 1
        names.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return names


def guards_of(program: ExportedProgram) -> list[str]:
    """What `program.module()` asserts of its inputs beside their shapes and ranges, as Python that it runs."""
    return list(vars(program).get("_guards_code") or ())


def check_built(program: ExportedProgram) -> None:
    """What torch's constructor does at its end: it refuses what is no program, and reads the guards off the sizes."""
    program.validate()  # type: ignore[no-untyped-call]
    program._guards_code = _convert_guards_to_code(program.graph_module)  # type: ignore[no-untyped-call]


class _Hints:
    """The module `typing`, which computes the type hints of a class once."""

    def __init__(self) -> None:
        self._known: dict[type, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(typing, name)

    def get_type_hints(self, of: type, **names: Any) -> dict[str, Any]:
        if of not in self._known:
            self._known[of] = typing.get_type_hints(of, **names)
        return self._known[of]


@contextlib.contextmanager
def quick_files() -> Iterator[None]:
    """Read and write programs in this block without what torch does in vain.

    It evaluates the type hints of a node's class for each node that it reads, a sixth of the time of a load, and brings
    a copy of what it writes into a canonical form that it throws away, half of the time of a save.
    """
    from torch._export.serde import serialize

    names: dict[str, Any] = {"typing": _Hints(), "canonicalize": lambda program, constants=None: program}
    before = {name: vars(serialize)[name] for name in names if name in vars(serialize)}
    for name in before:
        setattr(serialize, name, names[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(serialize, name, value)


def save_program(program: ExportedProgram, file: Any, **more: Any) -> None:
    """`torch.export.save`."""
    with quick_files():
        torch.export.save(program, file, **more)


def with_state(
    program: ExportedProgram,
    state_dict: dict[str, Any],
    constants: dict[str, Any],
    module_call_graph: Sequence[Any],
    example_inputs: Any,
) -> ExportedProgram:
    """The same program over other tensors; its graph is the same object."""
    made = copy.copy(program)
    made._state_dict, made._constants = state_dict, constants
    made._module_call_graph, made._example_inputs = list(module_call_graph), example_inputs
    return made


def with_graph(program: ExportedProgram, root: Any, graph: torch.fx.Graph) -> ExportedProgram:
    """The same program with another graph, of whose bodies `root` holds those that it calls.

    It is written as Python, and compiled, when it is run for the first time: torch's constructors do it at once.
    """
    made = copy.copy(program)
    graph._codegen = CodeGen()  # flat
    made._graph_module = _LazyGraphModule(root, graph)
    made._graph_module.meta.update(program.graph_module.meta)
    made._state_dict, made._constants = dict(program.state_dict), dict(program.constants)
    made._range_constraints = dict(program.range_constraints)
    return made


def forget_index(value: torch.Tensor) -> None:
    """Let a fake CUDA tensor say `cuda`, as it is to be written: torch gives every one an index, and reads it back
    with that of the current device. Nothing may be computed with it any more."""
    if isinstance(value, FakeTensor):
        name = "_fake_device" if hasattr(value, "_fake_device") else "fake_device"  # torch 2.13 made it a property
        setattr(value, name, torch.device(value.device.type))


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let graphs that say `name` use `group`."""
    _register_process_group(cast(Any, name), group)


def resolve_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, name))


def default_store() -> Any:
    """The key-value store at which the ranks of the default process group have met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_is_registered(name: str) -> bool:
    try:
        resolve_group(name)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def fake_group(name: str, rank: int, size: int, device_type: str) -> Iterator[None]:
    """A process group that answers nothing, registered under a private name for the time of a trace.

    It never becomes the default group, so a caller's own process group keeps its state.
    """
    c10d: Any = dist  # its stubs leave out the stores
    group = c10d.ProcessGroup(c10d.PrefixStore(name, c10d.HashStore()), rank, size)
    create = getattr(FAKE_GROUP, "_create_internal", FAKE_GROUP)
    group._register_backend(torch.device(device_type), dist.ProcessGroup.BackendType.CUSTOM, create(rank, size))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)
    register_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(cast(Any, name))


def traced_mesh(
    device_type: str, axes: Sequence[str], degrees: Sequence[int], rank: int, groups: Sequence[str]
) -> DeviceMesh:
    """A mesh over groups that are registered already; needs no default group and makes none."""
    ranks = torch.arange(torch.Size(degrees).numel()).view(*degrees)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes), _init_backend=False, _rank=rank)
    mesh._dim_group_names = cast(Any, list(groups))
    return mesh


def redistribute(
    local: torch.Tensor,
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[Any],
) -> torch.Tensor:
    """torch's own change of placements of a dense local tensor of a global tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    meta = TensorMeta(torch.Size(shape), tuple(strides[: len(shape)]), local.dtype)
    return redistribute_local_tensor(
        local, DTensorSpec(mesh, tuple(source), meta), DTensorSpec(mesh, tuple(target), meta)
    )


class _Mapped:
    """torch's reader of an archive, which maps the tensors that it stores into memory instead of reading them."""

    def __init__(self, reader: Any, path: Path, size: int) -> None:
        self._reader = reader
        self._file = torch.UntypedStorage.from_file(str(path), False, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._reader.get_record_offset(name)
        storage = cast(torch.UntypedStorage, self._file[start : start + count * dtype.itemsize])
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def read_archive_state(path: Path, file: IO[bytes] | io.RawIOBase | None = None) -> dict[str, torch.Tensor]:
    """The parameters, buffers and constants in a .pt2, by name, without the program. Seen in torch 2.11 and 2.13.

    They are mapped from `path` and take no memory of their own until they are used, but for those that a pickle holds.
    These are unpickled: inspect the file first, and give it as `file`, open.

    Raises:
        ArtifactError: an entry that is missing or damaged.
    """
    from torch.export.pt2_archive import _package

    found: dict[str, torch.Tensor] = {}
    try:
        with contextlib.nullcontext(file) if file is not None else path.open("rb") as opened:
            opened.seek(0)
            reader: Any = _package.PT2ArchiveReader(cast(Any, opened))
            with zipfile.ZipFile(cast(Any, opened)) as archive:
                if all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()):
                    reader.archive_file = _Mapped(reader.archive_file, path, opened.seek(0, io.SEEK_END))
            for read in (_package._load_constants, _package._load_state_dict):
                made = read(reader, "model")
                assert isinstance(made, dict)
                if both := sorted(found.keys() & made.keys()):
                    raise ValueError(f"{both[0]!r} is in the state and in the constants")
                found.update(made)
    except Exception as error:  # torch raises what the layer that fails happens to raise
        line = (str(error).strip() or type(error).__name__).splitlines()[0].partition(" This is an internal")[0]
        raise ArtifactError(
            f"the tensors of {path} cannot be read: {line}", help="copy the artifact again, or convert the model again"
        ) from error
    return found


def map_symmetric(shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: str) -> torch.Tensor:
    """Zeros in memory that all ranks of a group map. Each of them must ask for it.

    Raises:
        RuntimeError: the devices cannot.
    """
    made = _symmetric_memory.empty(tuple(shape), dtype=dtype, device=device).zero_()
    _symmetric_memory.rendezvous(made, resolve_group(group))
    return made


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph of copies of all nodes under the same names, with a shallow copy of their meta.

    `Graph.node_copy` checks every argument and looks for a new name, which takes most of the time of a conversion.
    """
    new, seen = fx.Graph(), dict[fx.Node, fx.Node]()
    names, map_arg, made_of = new._graph_namespace, fx.node.map_arg, seen.__getitem__
    for node in graph.nodes:
        args, kwargs = map_arg(node._args, made_of), node._kwargs and map_arg(node._kwargs, made_of)
        made = seen[node] = fx.Node(new, node.name, node.op, node.target, args, kwargs, node.type)
        made.meta.update(node.meta)
        base, _, number = node.name.rpartition("_")
        if base and number.isdecimal():
            names._base_count[base] = int(number)
        else:
            names._base_count.setdefault(node.name, 0)
        new._insert(made)
    names._obj_to_name = {made: made.name for made in seen.values()}
    names._used_names = set(names._obj_to_name.values())
    table = new._find_nodes_lookup_table.table
    for kind, nodes in graph._find_nodes_lookup_table.table.items():
        table[kind] = {seen[node]: None for node in nodes}
    new._len = len(seen)
    return new
