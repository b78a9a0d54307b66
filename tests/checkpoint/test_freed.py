"""Commands that stream weights return what they free."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import tpcompiler
from tests.checkpoint.models import PLAN, hollow, write_checkpoint
from tests.runtime.commands import right
from tpcompiler.cli import commands, weights

BLOCKS = """
import sys
from pathlib import Path
from tpcompiler.cli.weights import return_freed_tensors

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024

if sys.argv[1:]:
    return_freed_tensors()
bytearray(8 << 20)  # once it is freed, glibc takes blocks of its size from the heap
before = own()
blocks = [bytearray(b"x" * (4 << 20)) for _ in range(40)]
del blocks[:-1]  # the last one is above them
print(own() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another malloc")
def test_freed_blocks_do_not_stay() -> None:
    """39 blocks of 4 MiB. Where nothing is done the heap keeps them: the measure is none without that."""
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", BLOCKS, *words], capture_output=True, check=True).stdout)
        for words in ([], ["returned"])
    )
    assert kept > 100
    assert returned < 20


@pytest.mark.slow
def test_commands_that_stream_weights_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for module in (commands, weights):
        monkeypatch.setattr(module, "return_freed_tensors", lambda: called.append(word))
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    tpcompiler.save_weightless(hollow(), tmp_path / "model.pt2")
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    convert = [tmp_path / "model.pt2", "--tp", 2, "--plan", tmp_path / "plan.yaml", "-o"]
    calls = {
        "convert": [*convert, tmp_path / "out", "--checkpoint", checkpoint],
        "reshard": [tmp_path / "out", "--tp", 3, "-o", tmp_path / "three"],
        "reshard --single-device": [tmp_path / "out", "-o", tmp_path / "merged.pt2"],
        "cut": [tmp_path / "hollow", "--checkpoint", checkpoint],
    }
    word = ""
    right("convert", *convert, tmp_path / "hollow")
    assert called == []
    for word, given in calls.items():
        right(*word.split(), *given)
    assert called == list(calls)
