"""What `run_decompositions` does, here of the ops that matter."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

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
        for logger in loud:  # of its structured trace torch asks whether anybody listens, and makes it only then
            logger.handlers = [] if logger.name == "torch.__trace" else [Listener()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield heard
    finally:
        for logger, handlers in before:
            logger.handlers = handlers


class _AndDraws(set[Any]):
    """The calls that torch keeps though nobody uses their results, and those that draw."""

    def __contains__(self, target: object) -> bool:
        draws = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        return draws or super().__contains__(target)


@contextlib.contextmanager
def keeping_draws() -> Iterator[None]:
    """In this block torch does not remove a call that draws, on which all later numbers depend."""
    before = torch.fx.node._side_effectful_functions
    torch.fx.node._side_effectful_functions = _AndDraws(before)
    try:
        yield
    finally:
        torch.fx.node._side_effectful_functions = before


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
    # torch 2.13 warns about its own LeafSpec, and logs what it raises
    with quiet_torch(), keeping_draws(), unset_fake_temporarily():
        made: ExportedProgram = _decompose_exported_program(
            program,
            cia_to_decomp=how,
            python_decomp_table=others,
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
        return made
