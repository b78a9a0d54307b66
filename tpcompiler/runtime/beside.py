"""Several programs of one artifact: those of one family share tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from tpcompiler.runtime.artifact import Manifest
from tpcompiler.runtime.records import StageRecord

T = TypeVar("T")


def families(programs: Mapping[str, T], family_of: Callable[[T], str | None]) -> list[dict[str, T]]:
    """Return the programs of each family, in the order of their first ones."""
    found: dict[str | None, dict[str, T]] = {}
    for name, program in programs.items():
        found.setdefault(family_of(program), {})[name] = program
    return [*found.values()]


def world_of(manifest: Manifest) -> int:
    """Return the number of ranks of a program, or of all stages of the one that it is a stage of."""
    return manifest.world_size * (manifest.stage.count if manifest.stage else 1)


def largest_world(programs: Mapping[str, Manifest]) -> int:
    """Return the number of ranks that run the programs of an artifact."""
    return max(map(world_of, programs.values()))


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """Return the reason why programs cannot run together; empty if they can."""
    world = largest_world(programs)
    for name, manifest in programs.items():
        if world % world_of(manifest):
            return f"{name!r} is for {world_of(manifest)} ranks, which do not divide the {world} of the artifact"
    stages: dict[str, list[StageRecord]] = {}
    for manifest in programs.values():
        if manifest.stage is not None:
            stages.setdefault(manifest.stage.of, []).append(manifest.stage)
    for whole, own in stages.items():
        if [stage.index for stage in own] != list(range(own[0].count)):
            return f"stages {[stage.index for stage in own]} of {whole!r} are not all of {own[0].count}, in order"
    is_known = all(manifest.family for manifest in programs.values())  # one that was converted alone has none
    for family in families(programs, lambda manifest: manifest.family if is_known else None):
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
