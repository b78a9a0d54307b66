"""Several programs of one artifact: those of one family share tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tpcompiler.runtime.artifact import Manifest

T = TypeVar("T")


def families(programs: Mapping[str, T], family_of: Callable[[T], str | None]) -> list[dict[str, T]]:
    """Return the programs of each family, in the order of their first ones."""
    found: dict[str | None, dict[str, T]] = {}
    for name, program in programs.items():
        found.setdefault(family_of(program), {})[name] = program
    return [*found.values()]


def largest_world(programs: Mapping[str, Manifest]) -> Manifest:
    """Return the manifest of a program that has the most ranks."""
    return max(programs.values(), key=lambda manifest: manifest.world_size)


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """Return the reason why programs cannot run together; empty if they can."""
    world = largest_world(programs).world_size
    for name, manifest in programs.items():
        if world % manifest.world_size:
            return f"{name!r} is for {manifest.world_size} ranks, which do not divide the {world} of the artifact"
    for family in families(programs, lambda manifest: manifest.family):
        if misfit := _misfit_within(family):
            return misfit
    return ""


def _misfit_within(family: Mapping[str, Manifest]) -> str:
    holders: dict[str, str] = {}
    first, other = next(iter(family.items()))
    for name, manifest in family.items():
        if manifest.mesh != other.mesh:
            return f"{name!r} is for the mesh {manifest.mesh}, and {first!r} for {other.mesh}"
        if manifest.factors != other.factors:
            return f"{name!r} has axes in factors {manifest.factors}, and {first!r} in {other.factors}"
        for row in manifest.tensors:
            if row.stored_in is None and holders.setdefault(row.name, name) != name:
                return f"{row.name!r} is stored in the files of {holders[row.name]!r} and again in those of {name!r}"
    return ""
