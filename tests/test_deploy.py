"""docs/deploy.md runs as it stands: every block, in order, in one directory that has a checkout in it and nothing else."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import fork_launched
from tests.needs import needs
from tests.runtime.commands import right

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "deploy.md"
SECONDS = 300
HEADERS = ("gloo/algorithm.h", "nlohmann/json.hpp")

pytestmark = [
    pytest.mark.guide,
    pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests"),
    needs("c++"),  # AOTInductor calls one
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page is run: a checkout, and the commands that it calls."""
    folder = tmp_path_factory.mktemp("deploy")
    for name in ("tools", "work"):
        (folder / name).mkdir()
    for name, words in (("torchrun", "-m torch.distributed.run"), ("python", "")):
        (folder / "tools" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore {words} "$@"\n')
        (folder / "tools" / name).chmod(0o755)
    (folder / "work" / "tpcompiler").symlink_to(ROOT)
    return folder


@pytest.fixture(scope="module")
def said(directory: Path) -> dict[str, str]:
    """What the blocks print, by the heading that they stand under; those in C++ are left out."""
    pytest.importorskip("transformers")
    return {head: run(directory, blocks) for head, blocks in parts() if head != "From C++"}


def parts() -> list[tuple[str, list[tuple[str, str]]]]:
    found = []
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        blocks = re.findall(r"```(python|bash)\n(.*?)```", part, re.DOTALL)
        found.append((part.partition("\n")[0], blocks))
    return found


def run(directory: Path, blocks: Sequence[tuple[str, str]]) -> str:
    """Scripts and commands of this package run in this process, and ranks in forks: each saves an import of torch.

    All others are run by a shell. That torchrun starts ranks alike, the package and the part in C++ say.
    """
    environment = {**os.environ, "PATH": f"{directory / 'tools'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["CMAKE_BUILD_TYPE"] = "None"  # neither to be fast nor to be debugged: is built the soonest
    printed = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory / "work")
        for language, block in blocks:
            if language == "python":
                (name,) = re.findall(r"^# (\w+\.py)$", block, re.MULTILINE)
                Path(name).write_text(block)
                continue
            for line in block.splitlines():
                program, *words = shlex.split(line)
                if program == "tpcompiler":
                    printed += right(*words)
                elif program == "python":
                    runpy.run_path(*words, run_name="__main__")
                elif program == "torchrun" and "--no-python" not in words:
                    ended = fork_launched(words, SECONDS)
                    assert not any(ended.codes), ended.printed
                    printed += "".join(ended.printed)
                else:
                    shell = ["sh", "-e", "-c", line]
                    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=SECONDS)
                    assert done.returncode == 0, done.stdout + done.stderr
                    printed += done.stdout
    return printed


def numbers(name: str, said: dict[str, str]) -> Any:
    (found,) = re.findall(rf"^{name}: (?:\([\d, ]+\) )?(\[.*\])$", "\n".join(said.values()), re.MULTILINE)
    return json.loads(found)


def test_the_page_runs(said: dict[str, str], directory: Path) -> None:
    printed = "\n".join(said.values())
    assert printed.count("equal: max abs err") == 2  # verify and package
    assert numbers("uncut", said) == numbers("rank 0", said)
    run(directory, [("bash", "python in_python.py")])
    assert (directory / "work" / "mlp.pt2").stat().st_size < 100_000


def test_tokens_and_bits_are_those_of_transformers(said: dict[str, str], directory: Path) -> None:
    """From programs as they are, and compiled; the merged model has the checkpoint's weights."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    work = directory / "work"
    model: Any = LlamaForCausalLM.from_pretrained(work / "checkpoint")
    ids = torch.arange(10).reshape(2, 5)
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, do_sample=False, **asked)[:, 5:].tolist()
    assert numbers("generated", said) == numbers("compiled", said) == wanted
    merged, weights = load_file(work / "merged.safetensors"), model.state_dict()
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in merged)
    back = torch.export.load(work / "merged.pt2")
    assert all(torch.equal(back.state_dict[name], weights[name]) for name in weights)


@needs("cmake", *HEADERS)
def test_the_part_in_cpp_runs(said: dict[str, str], directory: Path) -> None:
    """The same tokens from two processes without Python, and an error in place of an answer beyond the cache."""
    (blocks,) = (blocks for head, blocks in parts() if head == "From C++")
    *_, first, second = run(directory, blocks).splitlines()
    last = [row[-1] for row in json.loads(first)["output"]]
    assert last == [row[0] for row in numbers("compiled", said)]
    assert json.loads(second) == {"error": "the input cache_position has the value 64, and may have those of [0,63]"}


def test_the_example_generates(said: dict[str, str], directory: Path) -> None:
    """Greedy as transformers does, to a stop token; sampled, the same compiled or not."""
    from transformers import LlamaForCausalLM

    work, ids = directory / "work", torch.arange(10).reshape(2, 5) % 97 + 2
    model: Any = LlamaForCausalLM.from_pretrained(work / "checkpoint")
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    stop = int(model.generate(ids, eos_token_id=None, **asked)[0, 7])
    wanted = model.generate(ids, eos_token_id=[stop], **asked)[:, 5:]
    words = f"torchrun --nproc-per-node 2 tpcompiler/examples/generate.py --artifact chat --length 5 --tokens 8 --stop {stop}"
    found = []
    for more in (" --compiled", " --sample", " --sample --compiled"):
        printed = run(directory, [("bash", words + more)]).splitlines()
        found.append(torch.load(work / "chat.tokens"))
        assert [[int(each) for each in line.split()] for line in printed[:-1]] == found[-1].T.tolist()
        assert printed[-1].endswith(" tokens/s")
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[0], found[1])
