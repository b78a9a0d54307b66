"""Which versions of torch this runs on, and what a version lacks."""

from __future__ import annotations

import re
import warnings

import torch

from tpcompiler.errors import TpCompilerWarning

OLDEST, NEWEST = (2, 11), (2, 15)  # that this was run with: docs/compat.md
GONE = {"aten::cholesky": (2, 14)}  # ops that a rule names, and the version since when torch lacks them


def warn_of_newer(version: str) -> None:
    """Say it where a torch is newer than all that this was run with: private names may have moved."""
    if found := re.match(r"(\d+)\.(\d+)", version):
        if (int(found[1]), int(found[2])) > NEWEST:
            newest = ".".join(map(str, NEWEST))
            warnings.warn(
                f"torch {version} is newer than {newest}, the newest that tpcompiler was run with: "
                f"where something fails, install torch {newest}",
                TpCompilerWarning,
                stacklevel=2,
            )


warn_of_newer(torch.__version__)
