"""Programs that some tests need, and the Debian packages that have them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

PACKAGES = {
    "dot": "graphviz",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "c++": "g++",
    "cmake": "cmake",
    "gloo/algorithm.h": "libgloo-dev",
    "nlohmann/json.hpp": "nlohmann-json3-dev",
}


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test on a machine that lacks one of these programs or headers."""
    missing = [
        name for name in names if not (Path("/usr/include", name).exists() if "/" in name else shutil.which(name))
    ]
    return pytest.mark.skipif(bool(missing), reason=f"apt-get install {' '.join(PACKAGES[name] for name in missing)}")
