"""Families of programs: those of one model, which share tensors by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tpcompiler._torch import FakeTensor
from tpcompiler.errors import ProgramError, UnsupportedError, option
from tpcompiler.ir.program import Note
from tpcompiler.ir.shares import same_bits
from tpcompiler.parallel.conversion import Conversion

MOST_UNLIKE = 0.5  # of the bytes under common names, that may have other shapes or values in programs of one model


class _Unlike(NamedTuple):
    """A leaf of one name that is not one tensor."""

    fqn: str
    program: str  # another one, which has `theirs`
    ours: torch.Tensor
    theirs: torch.Tensor


def find_families(conversions: Mapping[str, Conversion]) -> dict[str, Conversion]:
    """Give each of several programs the name of the first one that it shares tensors with.

    A program shares tensors by name with those that run over the same mesh, in the same stage. If most bytes under the
    common names have other shapes, the programs are of different models, and share nothing.

    Raises:
        ProgramError: a leaf of one name that is not one tensor, in programs of one model.
        UnsupportedError: a program of the same model has, over another mesh or under another name, a buffer that one
            writes or a parameter that it trains.
    """
    found: dict[str, dict[str, Conversion]] = {}  # by the name of the first
    _refuse_other_names(conversions)
    for name, own in conversions.items():
        apart, related = dict[str, set[str]](), list[str]()
        for first, family in found.items():
            other = family[first]
            if own.mesh != other.mesh:
                _refuse_state_apart(name, own, family)
            if own.mesh != other.mesh or (own.stage and own.stage.index) != (other.stage and other.stage.index):
                continue
            common, unlike = _compare(own, family)
            shaped = [each.fqn for each in unlike if each.ours.shape != each.theirs.shape]
            if sum(map(common.__getitem__, shaped)) > MOST_UNLIKE * sum(common.values()):
                apart[first] = set(common)
            elif unlike:
                raise _unlike_leaf(name, unlike[0])
            elif common:
                related.append(first)
        notes = tuple(
            Note("apart", f"{', '.join(found[first])}: {len(names)} names stand for other tensors, as {min(names)!r}")
            for first, names in apart.items()
        )
        joined = {name: replace(own, dropped=(*own.dropped, *notes))}
        for first in reversed(related):
            joined = {**found.pop(first), **joined}
        found[next(iter(joined))] = joined
    families = {name: first for first, family in found.items() for name in family}
    made = {name: own for family in found.values() for name, own in family.items()}
    return {name: replace(made[name], family=families[name]) for name in conversions}


def _refuse_state_apart(name: str, own: Conversion, family: Mapping[str, Conversion]) -> None:
    """Raise UnsupportedError if a program would not see what changes a leaf in one of another mesh: each has its own.

    Programs write buffers, and train parameters. Two models may have buffers and biases of one name, of the same zeros:
    programs are of one if most bytes under the common names are equal, and they have more in common than such buffers.
    """
    common, unlike = _compare(own, family)
    apart = {each.fqn for each in unlike}
    if sum(map(common.__getitem__, apart)) > MOST_UNLIKE * sum(common.values()):
        return
    programs = {**family, name: own}
    written = {fqn: each for each, other in programs.items() for _, fqn in other.program.mutations()}
    trained = {fqn: each for each, other in programs.items() for _, fqn in other.program.gradients()}
    states = [fqn for fqn in common if fqn in written]
    states = [fqn for fqn in common if fqn in trained] + (states if len(states) < len(common) else [])
    states = [fqn for fqn in states if fqn not in apart]
    if not states:
        return
    first = states[0]
    is_trained = first in trained
    writer = trained[first] if is_trained else written[first]
    reader = next(each for each in family if _has(family[each], first)) if writer == name else name
    meshes = {each: programs[each].mesh for each in (writer, reader)}
    kind, does = ("parameter", "trains") if is_trained else ("buffer", "writes")
    raise UnsupportedError(
        f"{first!r} is a {kind} that {writer!r} {does} on {meshes[writer]}, and {reader!r} has it on {meshes[reader]}: "
        f"each would have its own {kind}, and see nothing of the other's",
        help="run both over the same ranks: "
        + option(
            f"leave out the --degree of {writer} and {reader}", f"leave {writer!r} and {reader!r} out of degrees="
        ),
    )


def _refuse_other_names(conversions: Mapping[str, Conversion]) -> None:
    """Raise UnsupportedError if a program changes a tensor that another one has under another name: they share none."""
    leaves = {name: _by_memory(own) for name, own in conversions.items()}
    for (writer, own), reader in itertools.product(conversions.items(), conversions):
        changed = {fqn for _, fqn in (*own.program.mutations(), *own.program.gradients())}
        for memory, names in leaves[writer].items():
            theirs = leaves[reader].get(memory, set())
            if theirs and changed & names and not names & theirs:
                raise UnsupportedError(
                    f"{min(changed & names)!r}, which {writer!r} changes, is {min(theirs)!r} in {reader!r}: programs "
                    "share tensors by name, so each would have its own",
                    help="export both from one module, so that the names are the same",
                )


def _by_memory(own: Conversion) -> dict[tuple[int, int], set[str]]:
    """Return the names of the leaves by where their values are."""
    found = dict[tuple[int, int], set[str]]()
    for _, fqn in own.program.leaves():
        value = own.program.state(fqn)
        if not isinstance(value, FakeTensor) and value.device.type != "meta" and value.numel():
            found.setdefault((value.data_ptr(), value.numel()), set()).add(fqn)
    return found


def _has(own: Conversion, fqn: str) -> bool:
    return any(each == fqn for _, each in own.program.leaves())


def _compare(own: Conversion, family: Mapping[str, Conversion]) -> tuple[dict[str, int], list[_Unlike]]:
    """Return the bytes of leaves that a family has too, by name, and those that are other tensors there."""
    theirs = {fqn: (name, other.program) for name, other in family.items() for _, fqn in other.program.leaves()}
    common, unlike = dict[str, int](), list[_Unlike]()
    for _, fqn in own.program.leaves():
        if fqn in theirs:
            name, program = theirs[fqn]
            ours, other = own.program.state(fqn), program.state(fqn)
            common[fqn] = ours.numel() * ours.element_size()
            # Of weights without values a checkpoint says, by name, what they are.
            is_unknown = isinstance(ours, FakeTensor) and isinstance(other, FakeTensor)
            if ours.shape != other.shape or ours.dtype != other.dtype or not (is_unknown or same_bits(ours, other)):
                unlike.append(_Unlike(fqn, name, ours, other))
    return common, unlike


def _unlike_leaf(name: str, leaf: _Unlike) -> ProgramError:
    fqn, other, ours, theirs = leaf
    return ProgramError(
        f"'{fqn}' is {list(theirs.shape)} of {theirs.dtype} in program '{other}' and {list(ours.shape)} of "
        f"{ours.dtype} in '{name}', or its values differ",
        help="export all programs of a model one after the other, with nothing run in between; for another model "
        + option(f"give a degree: --degree {name}=1", f'give a degree: degrees={{"{name}": 1}}'),
    )
