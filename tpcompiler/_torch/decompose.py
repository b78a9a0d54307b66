"""Decompose as `run_decompositions` does, but only the ops that matter."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _get_decomp_for_cia, _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import ExportedProgram
from torch.export.decomp_utils import PRESERVED_ATEN_CIA_OPS
from torch.export.exported_program import _decompose_exported_program, _override_composite_implicit_decomp

from tpcompiler._torch.ops import calls_others
from tpcompiler._torch.programs import graph_modules


def decomposed(
    program: ExportedProgram,
    kept: Collection[OpOverload],
    own: Mapping[OpOverload, Callable[..., Any]],
    opened: Collection[OpOverload],
) -> ExportedProgram:
    """Return a functional copy in core ATen ops, except the `kept` ops, and with `own` decompositions.

    The `opened` ops are decomposed as their kernels do.
    """
    return _retrace(program, *_tables(program, kept, own), opened)


@contextlib.contextmanager
def decomposing(
    program: ExportedProgram, kept: Collection[OpOverload], own: Mapping[OpOverload, Callable[..., Any]]
) -> Iterator[tuple[Mapping[Any, Any], Mapping[Any, Any]]]:
    """Yield decomposition tables; in this block, a trace with the second table decomposes calls as `decomposed` does.

    The first table is for composite ops, including the ones that stay whole.
    """
    how, others = _tables(program, kept, own)
    how = {op: each for op, each in how.items() if _is_composite(op)}
    with quiet_torch(), unset_fake_temporarily(), _override_composite_implicit_decomp(how):
        yield how, others


@contextlib.contextmanager
def keeping_whole(*ops: OpOverload) -> Iterator[None]:
    """Leave these composite ops whole in traces inside this block."""
    with (
        enable_python_dispatcher(),
        _override_composite_implicit_decomp(dict.fromkeys(ops, _special_op_to_preserve_cia)),
    ):
        yield


def stays_whole(op: OpOverload, how: Mapping[Any, Any], table: Mapping[Any, Any]) -> bool:
    """Return True if a trace in `decomposing` leaves an op as it is, so that tracing it is unnecessary."""
    if op in how:
        return how[op] is _special_op_to_preserve_cia
    return op not in table and not calls_others(op)


def _tables(
    program: ExportedProgram, kept: Collection[OpOverload], own: Mapping[OpOverload, Callable[..., Any]]
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    # Equals `default_decompositions`, which would load every ATen op.
    table: dict[Any, Any] = {**_core_aten_decompositions_post_autograd(), **own}
    how = {op: table.get(op, _special_op_to_preserve_cia) for op in (*_ops_called(program), *own)}
    composite = (op for op in _ops_called(program) if op not in table and _is_composite(op))
    how |= {op: _get_decomp_for_cia(op) for op in composite if op not in PRESERVED_ATEN_CIA_OPS}
    how |= dict.fromkeys(kept, _special_op_to_preserve_cia)  # inside other decompositions too
    return how, {op: f for op, f in table.items() if not _is_composite(op) and op not in kept}


def _kernel_of(op: OpOverload) -> Callable[..., Any]:
    """Return the C++ kernel. For dropout, torch has a Python one that clones a result which this one aliases."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("kernel", None)  # torch passes the op itself to its own functions
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return decompose


def _ops_called(program: ExportedProgram) -> set[OpOverload]:
    graphs = [each.graph for each in graph_modules(program.graph_module)]
    return {node.target for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)}


@contextlib.contextmanager
def quiet_torch() -> Iterator[list[BaseException]]:
    """Keep torch's logs and warnings off the terminal; yield the errors that it logged."""
    errors: list[BaseException] = []

    def listen(record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])

    listener = logging.Handler()
    listener.emit = listen  # type: ignore[method-assign]
    loggers = logging.root.manager.loggerDict.items()
    loud = [
        logger
        for name, logger in loggers
        if isinstance(logger, logging.Logger) and logger.handlers and name.partition(".")[0] == "torch"
    ]
    with contextlib.ExitStack() as patches, warnings.catch_warnings():
        for logger in loud:  # torch builds its structured trace only if it has a handler
            handlers = [] if logger.name == "torch.__trace" else [listener]
            patches.enter_context(patch.object(logger, "handlers", handlers))
        warnings.simplefilter("ignore")
        yield errors


class _AndDraws(set[Any]):
    """The calls that torch keeps although their results are unused, extended by calls that draw."""

    def __contains__(self, target: object) -> bool:
        draws = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        return draws or super().__contains__(target)


@contextlib.contextmanager
def keeping_draws() -> Iterator[None]:
    """Stop torch from removing unused draws in this block, because later numbers depend on them."""
    name = "_side_effectful_functions"
    with patch.object(torch.fx.node, name, _AndDraws(getattr(torch.fx.node, name))):
        yield


@functools.cache
def _is_composite(op: object) -> bool:
    """Return True if torch allows keeping the op, or decomposing it differently from its kernel."""
    return isinstance(op, OpOverload) and _is_preservable_cia_op(op)


def _retrace(
    program: ExportedProgram, composite: Mapping[Any, Any], others: dict[Any, Any], opened: Collection[OpOverload]
) -> ExportedProgram:
    """Decompose with two tables, as `run_decompositions` does, restricted to the ops that matter.

    torch's function changes 900 composite ops for the time of the call, and asks every namespace for its own; for a
    small program that takes longer than everything else. An op in neither table is decomposed as its kernel does.
    """
    how = {op: each for op, each in composite.items() if _is_composite(op)} | {op: _kernel_of(op) for op in opened}
    # torch 2.13 warns about its own LeafSpec, and logs the errors that it raises
    with quiet_torch(), keeping_draws(), unset_fake_temporarily():
        result: ExportedProgram = _decompose_exported_program(
            program,
            cia_to_decomp=how,
            python_decomp_table=others,
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
        return result
