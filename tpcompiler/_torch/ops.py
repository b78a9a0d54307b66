"""torch's ops: by name, of this project's own, and what their kernels and schemas say."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.ao.quantization.fx import _decomposed  # noqa: F401  (defines PT2E's ops)
from torch.fx.graph import _custom_builtins

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
NAMED_BY_TORCH = frozenset(_custom_builtins)  # in the Python of a graph: `inf`, `device`, ...
# Calls of a graph under a switch of autograd's, and at which argument its operands begin.
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
