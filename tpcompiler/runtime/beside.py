"""Several programs with one set of weights: each tensor is stored in the files of one of the programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tpcompiler.runtime.artifact import Manifest, inside, read_manifest


def manifests_beside(directory: str | os.PathLike[str], manifest: Manifest) -> dict[str, Manifest]:
    """Return the other programs that store tensors of this one, by name.

    Raises:
        ArtifactError: as `read_manifest`; a link out of the directory.
    """
    above = Path(directory).parent
    return {
        name: read_manifest(inside(above, name))
        for name in {row.stored_in for row in manifest.tensors if row.stored_in is not None}
    }


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """Return the reason why programs cannot share their tensors; empty if they can."""
    holder: dict[str, str] = {}
    for name, manifest in programs.items():
        first, other = next(iter(programs.items()))
        if manifest.mesh != other.mesh:
            return f"{name!r} is for the mesh {manifest.mesh}, and {first!r} for {other.mesh}"
        for row in manifest.tensors:
            if row.stored_in is None and holder.setdefault(row.name, name) != name:
                return f"{row.name!r} is stored in the files of {holder[row.name]!r} and again in those of {name!r}"
    return ""
