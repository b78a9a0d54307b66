"""torch's ops: look-up by name, this project's own ops, and properties of kernels and schemas."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (defines PT2E's ops)
from torch.fx.graph import _custom_builtins

OWN = "tpcompiler"  # the namespace of this project's own ops
_LIBRARIES: list[Any] = []
MISSING: set[str] = set()  # looked up, but absent in this torch


class _Ops:
    """`torch.ops.NAMESPACE`, in which an op that this torch lacks is a placeholder that no program calls."""

    def __init__(self, namespace: str) -> None:
        self._name, self._ops = namespace, getattr(torch.ops, namespace)

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name, None)
        if op is None:
            MISSING.add(f"{self._name}::{name}")
            op = _MissingOp(f"{self._name}.{name}")
        setattr(self, name, op)  # cached: looked up once
        return op


class _MissingOp(str):
    def __getattr__(self, overload: str) -> _MissingOp:
        return _MissingOp(f"{self}.{overload}")


aten, c10d_functional = _Ops("aten"), _Ops("_c10d_functional")
NAMED_BY_TORCH = frozenset(_custom_builtins)  # names in a graph's Python code: `inf`, `device`, ...
# Calls of a graph under an autograd switch, and the position of their first operand.
WRAPPERS = {_Ops("higher_order").wrap_with_set_grad_enabled: 2}
quantized_decomposed = _Ops("quantized_decomposed")  # PT2E's
symm_mem = _Ops("symm_mem")


def define_op(schema: str, run: Any, fake: Any) -> OpOverload:
    """Register an op in this project's namespace, which `schema` omits."""
    library: Any = vars(torch.library)["Library"](OWN, "FRAGMENT")  # it is untyped
    name = library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{OWN}::{name}", fake, lib=library)
    _LIBRARIES.append(library)  # the op lives as long as its library
    return cast(OpOverload, getattr(getattr(torch.ops, OWN), name).default)


def find_op(name: str) -> OpOverload:
    """Return the op with this name, such as `aten.mm.default`."""
    namespace, packet, overload = name.split(".")
    return cast(OpOverload, getattr(getattr(getattr(torch.ops, namespace), packet), overload))


def op_overload(op: object) -> OpOverload | None:
    """Return the op given as itself, as its packet, as a `torch.library.custom_op` result, or as its name.

    Without an overload, return the default one, or the only one; None if there is no such op.
    """
    op = getattr(op, "_opoverload", op)  # a CustomOpDef
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        name, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops, namespace, None), name, None) if namespace and name else None
        op = getattr(op, overload, None) if overload else op
    if isinstance(op, OpOverloadPacket):
        overloads: Any = op.overloads  # untyped
        names = overloads()
        overload_name = "default" if "default" in names else names[0] if len(names) == 1 else None
        op = None if overload_name is None else getattr(op, overload_name)
    return op if isinstance(op, OpOverload) else None


def program_target(text: str) -> str | None:
    """Return `NS.OP.OVERLOAD` for an op that a program's file names `torch.ops.NS.OP.OVERLOAD`.

    Return None for a name of something else, and an unknown name unchanged.
    """
    target: Any = torch
    for part in text.split(".")[1:]:  # as torch's own reader does
        if not hasattr(target, part):
            return text
        target = getattr(target, part)
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return str(target)
    own = getattr(target, "__module__", None) == text.rpartition(".")[0] and callable(target)
    return text if own and not text.startswith("torch.ops.") else None


def is_torchscript_op(name: str) -> bool:
    """Return True if an op, named as by `program_target`, is TorchScript's own for texts, lists or numbers."""
    namespace, *rest = name.split(".")
    if namespace not in ("aten", "prim") or len(rest) != 2:
        return False
    schema = getattr(getattr(getattr(torch.ops, namespace), rest[0]), rest[1])._schema
    types = [str(each.type) for each in (*schema.arguments, *schema.returns)]
    return bool(schema.returns) and not any("Tensor" in each for each in types)


@functools.cache
def functional_op(op: OpOverload) -> OpOverload | None:
    """Return the op that returns what this one writes to its first argument, if one has the same arguments."""
    namespace, _, name = op._schema.name.partition("::")
    arguments = op._schema.arguments
    if namespace != "aten" or not name.endswith("_") or name.startswith("_") or not arguments:
        return None
    if torch.Tag.inplace_view in op.tags or name == "set_":  # the tensor becomes another one
        return None
    is_mutated = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    candidate = getattr(packet, op._overloadname, None)
    if is_mutated != [True] + [False] * (len(arguments) - 1) or not isinstance(candidate, OpOverload):
        return None
    same = [each.name for each in candidate._schema.arguments] == [each.name for each in arguments]
    return candidate if same and not candidate._schema.is_mutable and len(candidate._schema.returns) == 1 else None


def declares_view(op: object) -> bool:
    """Return True if an op's schema declares that a result may share memory with an operand."""
    return isinstance(op, OpOverload) and any(result.alias_info is not None for result in op._schema.returns)


def is_vmap(target: object) -> bool:
    """Return True for a call that an export records where `torch.vmap` begins, ends, or adds or removes its dim."""
    return getattr(target, "__module__", None) == "torch._functorch.predispatch"


@functools.cache
def calls_others(op: OpOverload) -> bool:
    """Return True if the op's kernel calls other ops, on tensors of any device (CompositeImplicitAutograd)."""
    name = op.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
