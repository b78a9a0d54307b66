"""Damages of how programs are called: pytrees, names of arguments, ranges of sizes, what is asserted of inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram

from tests.trust.damage import Artifact, kind

Change = Callable[[ExportedProgram], bool]


def _on_all_and_on_one(change: Change) -> Change:
    """Register the damages that do this to every rank's program, and to the last one's."""

    def on_all(artifact: Artifact, nth: int) -> bool:
        done = [change(program) for program in artifact.ranks]
        return nth == 0 and all(done)

    def on_one(artifact: Artifact, nth: int) -> bool:
        return nth == 0 and change(artifact.last)

    for damage, where in ((on_all, "on_all_ranks"), (on_one, "on_one_rank")):
        damage.__doc__, damage.__name__ = change.__doc__, f"{change.__name__}_{where}"
        kind(damage)
    return change


@_on_all_and_on_one
def an_assertion_too_many(program: ExportedProgram) -> bool:
    """What no input answers to is asserted."""
    program._guards_code = [*program._guards_code, "1 == 2"]
    return True


@_on_all_and_on_one
def a_narrower_range_of_sizes(program: ExportedProgram) -> bool:
    """The smallest size is refused."""
    for symbol, known in program.range_constraints.items():
        program.range_constraints[symbol] = type(known)(known.lower + 1, known.upper)
    return bool(program.range_constraints)


@_on_all_and_on_one
def a_wider_range_of_sizes(program: ExportedProgram) -> bool:
    """A size is taken that the model was not exported for."""
    for symbol, known in program.range_constraints.items():
        program.range_constraints[symbol] = type(known)(known.lower, known.upper + 1)
    return any(known.upper.is_Integer for known in program.range_constraints.values())


def _signature(program: ExportedProgram) -> Any:
    """One of its own, to write to."""
    entry = program.module_call_graph[0]
    assert entry.signature is not None
    own = dataclasses.replace(entry.signature)
    program.module_call_graph[0] = dataclasses.replace(entry, signature=own)
    return own


@_on_all_and_on_one
def arguments_under_each_others_name(program: ExportedProgram) -> bool:
    """The names of arguments are exchanged."""
    signature = _signature(program)
    names = signature.forward_arg_names or []
    signature.forward_arg_names = [*names[1:], *names[:1]]
    return len(names) > 1


@_on_all_and_on_one
def values_taken_in_another_order(program: ExportedProgram) -> bool:
    """Each is taken under another one's key."""
    signature = _signature(program)
    args, kwargs = signature.in_spec.child(0), signature.in_spec.child(1)
    parts = [kwargs.child(at) for at in range(kwargs.num_children)]
    made = type(kwargs)(dict, list(reversed(kwargs.context)), list(reversed(parts)))
    signature.in_spec = type(kwargs)(tuple, None, [args, made])
    return len(parts) > 1


@_on_all_and_on_one
def values_returned_in_another_structure(program: ExportedProgram) -> bool:
    """They have lost their keys."""
    signature = _signature(program)
    spec = signature.out_spec
    if spec.num_children > 1:
        signature.out_spec = type(spec)(list, None, [spec.child(at) for at in range(spec.num_children)])
    return bool(spec.num_children > 1)
