"""Several programs over one set of weights: each lies beside the others, and its weights in the files of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tpcompiler.runtime.artifact import Manifest, inside, read_manifest


def manifests_beside(directory: str | os.PathLike[str], manifest: Manifest) -> dict[str, Manifest]:
    """Of the other programs in whose files tensors of this one lie, by name.

    Raises:
        ArtifactError: as `read_manifest`; a link to somewhere else.
    """
    above = Path(directory).parent
    return {
        name: read_manifest(inside(above, name))
        for name in {str(row["stored_in"]) for row in manifest.tensors if "stored_in" in row}
    }


def misfit_of(programs: Mapping[str, Manifest]) -> str:
    """What keeps programs from sharing their tensors; nothing where they do."""
    holder: dict[str, str] = {}
    for name, manifest in programs.items():
        first, other = next(iter(programs.items()))
        if manifest.mesh != other.mesh:
            return f"{name!r} is for the mesh {manifest.mesh}, and {first!r} for {other.mesh}"
        for row in manifest.tensors:
            if "stored_in" not in row and holder.setdefault(row["name"], name) != name:
                return f"{row['name']!r} lies in the files of {holder[row['name']]!r} and again in those of {name!r}"
    return ""
