"""A C++ compiler that builds what would crash beside torch is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.needs import needs
from tpcompiler.api.packaging import refuse_static
from tpcompiler.errors import UnsupportedError


@needs("c++")
def test_a_copy_of_the_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.cpp").write_text("#include <locale>\nvoid* own() { return new std::locale; }\n")
    for name, words in (("shared.so", []), ("copied.so", ["-static-libstdc++"])):
        subprocess.run(["g++", "-shared", "-fPIC", *words, "own.cpp", "-o", name], cwd=tmp_path, check=True, timeout=60)
    refuse_static(tmp_path / "shared.so", "g++")
    with pytest.raises(UnsupportedError, match=r"^/opt/cxx puts the C\+\+ library into what it builds"):
        refuse_static(tmp_path / "copied.so", "/opt/cxx")
