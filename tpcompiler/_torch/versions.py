"""Supported versions of torch, and the ops that some versions lack."""

from __future__ import annotations

import re
import warnings

import torch

from tpcompiler.errors import TpCompilerWarning

OLDEST, NEWEST = (2, 11), (2, 15)  # tested versions: docs/compat.md
GONE = {"aten::cholesky": (2, 14)}  # an op that a rule names -> the version since which torch lacks it


def warn_of_newer(version: str) -> None:
    """Warn if torch is newer than all tested versions: private names may have moved."""
    if match := re.match(r"(\d+)\.(\d+)", version):
        if (int(match[1]), int(match[2])) > NEWEST:
            newest = ".".join(map(str, NEWEST))
            warnings.warn(
                f"torch {version} is newer than {newest}, the newest that tpcompiler was tested with: "
                f"if something fails, install torch {newest}",
                TpCompilerWarning,
                stacklevel=2,
            )


warn_of_newer(torch.__version__)
