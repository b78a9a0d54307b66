"""Caches in files of transformers' exporters: registered only if reading one makes nothing but caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import fork_code
from tpcompiler.runtime.model_file import import_known_modules, is_registered_class

CACHE = "transformers.cache_utils:QuantizedCache"  # no other test reads one
CODE = """\
import json, sys
from pathlib import Path
from tpcompiler.runtime.model_file import import_known_modules, is_registered_class
import_known_modules(json.loads(Path(sys.argv[1]).read_bytes()))
print(is_registered_class(sys.argv[2]))
"""


def write(path: Path, part: Any, escaped: bool = False) -> None:
    """The JSON of a program that returns a cache that is made of `part`."""
    context = json.dumps({"_t": "obj", "p": CACHE, "s": {"layers": [part]}})
    context = context.replace('"p"', '"\\u0070"') if escaped else context
    spec = json.dumps([1, {"type": CACHE, "context": context, "children_spec": []}])
    path.write_text(json.dumps({"out_spec": spec}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "is_registered"),
    [
        ({"_t": "obj", "p": "transformers.cache_utils:DynamicLayer", "s": {"keys": {"_t": "tensor", "i": 0}}}, True),
        ({"_t": "dtype", "n": "float32"}, True),
        ({"_t": "seq", "p": "subprocess:Popen", "v": ["true"]}, False),
        ({"_t": "obj", "p": "os:system", "s": {}}, False),
        ({"_t": "obj", "p": "transformers.cache_utils:torch.hub", "s": {}}, False),
        ({"_t": "map", "p": "transformers.cache_utils:DynamicLayer", "v": {}}, False),
    ],
)
def test_a_cache_is_made_of_caches(part: Any, is_registered: bool, tmp_path: Path) -> None:
    """In a process by itself, which has registered nothing."""
    pytest.importorskip("transformers.exporters")
    write(tmp_path / "model.json", part)
    done = fork_code(CODE, str(tmp_path / "model.json"), CACHE, cwd=tmp_path)
    assert done.stdout.split()[-1:] == [str(is_registered)], done.stderr


def test_a_name_that_is_escaped_is_read_too(tmp_path: Path) -> None:
    write(tmp_path / "model.json", {"_t": "obj", "p": "os:system", "s": {}}, escaped=True)
    assert "os:system" in (tmp_path / "model.json").read_text()
    import_known_modules(json.loads((tmp_path / "model.json").read_bytes()))
    assert not is_registered_class(CACHE)


def test_a_damaged_tree_registers_nothing() -> None:
    import_known_modules({"out_spec": f'[1, {{"type": "{CACHE}"'})
    assert not is_registered_class(CACHE)
