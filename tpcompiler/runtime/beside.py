"""Several programs with one set of weights: each tensor is stored in the files of one of the programs."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompiler.runtime.artifact import Manifest


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """Return the reason why programs cannot share their tensors; empty if they can."""
    holder: dict[str, str] = {}
    for name, manifest in programs.items():
        first, other = next(iter(programs.items()))
        if manifest.mesh != other.mesh:
            return f"{name!r} is for the mesh {manifest.mesh}, and {first!r} for {other.mesh}"
        if manifest.factors != other.factors:
            return f"{name!r} has axes in factors {manifest.factors}, and {first!r} in {other.factors}"
        for row in manifest.tensors:
            if row.stored_in is None and holder.setdefault(row.name, name) != name:
                return f"{row.name!r} is stored in the files of {holder[row.name]!r} and again in those of {name!r}"
    return ""
