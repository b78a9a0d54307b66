"""`tpcompiler export`, `convert --checkpoint` and `cut`, as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.commands import refused, right
from tests.zoo.case import randomise
from tpcompiler.runtime.model_file import read_model

FACTORY = """
import torch
from torch.export import Dim

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

def build():
    return Model(), (torch.ones(2, 8),), {}, ({0: Dim("rows", min=1, max=64)},)

def wrong():
    return Model()

def broken():
    return 1 / 0
"""


def llama(directory: Path, **fields: Any) -> Any:
    """A small Llama with random weights, written as Hugging Face does: config.json and files of 100 kB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
    config: Any = LlamaConfig(**{**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, **fields})  # type: ignore[arg-type]
    build: Any = AutoModelForCausalLM.from_config
    model = randomise(build(config)).eval()
    model.save_pretrained(directory, max_shard_size="100KB")
    return model


@pytest.mark.slow
@pytest.mark.sweep(2)
@pytest.mark.parametrize("asked", [False, True])
def test_a_command_prints_its_own_words_only(asked: bool, tmp_path: Path) -> None:
    """Libraries log what they could not load, and deprecations; an error of theirs is printed."""
    logs = "".join(
        f"logging.getLogger({name!r}).{level}({f'{level} of {name}'!r})\n"
        for name in ("other", "torch.utils._pytree")
        for level in ("info", "warning", "error")
    )
    (tmp_path / "models_of_mine.py").write_text(f"{FACTORY}\nimport logging\n{logs}")
    command = [sys.executable, "-m", "tpcompiler.cli", "export", "models_of_mine:build", "-o", "model.pt2"]
    paths = os.pathsep.join(str(Path(each).resolve()) for each in (".", *filter(None, [os.environ.get("PYTHONPATH")])))
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    env = {**kept, "PYTHONPATH": paths, **({"TORCH_LOGS": "export"} if asked else {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env, check=True)
    assert done.stdout == "wrote model.pt2: the program without its 4 weights (convert --checkpoint adds them)\n"
    said = [line.rpartition("] ")[2] for line in done.stderr.splitlines()]
    names = ("other", "torch.utils._pytree")
    if asked:
        assert {f"{level} of {name}" for name in names for level in ("warning", "error")} <= set(said)
    else:
        assert said == [f"error of {name}" for name in names]


def test_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert (
        right("export", "models_of_mine:build", "-o", "model.pt2")
        == "wrote model.pt2: the program without its 4 weights (convert --checkpoint adds them)\n"
    )
    assert str(read_model(tmp_path / "model.pt2").range_constraints.values()).count("64") == 1
    said = refused("export", "models_of_mine:wrong", "-o", "other.pt2")
    assert said.startswith("models_of_mine:wrong returned a Model that is not (model, args)")
    assert "raised ZeroDivisionError" in refused("export", "models_of_mine:broken", "-o", "other.pt2")
    said = refused("export", "models_of_mine:none", "-o", "other.pt2")
    assert said.startswith("models_of_mine has no function 'none'")
    assert not (tmp_path / "other.pt2").exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json cannot be read: No such file or directory"),
        ("{", "config.json cannot be read"),
        ("{}", "is not the config of a model: it names no model_type"),
        (json.dumps({"model_type": "llama"}), "names the architecture '', which transformers"),
        (json.dumps({"model_type": "llama", "architectures": 5}), "names the architecture '', which transformers"),
        (
            json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}),
            "makes no LlamaForCausalLM: ",
        ),
        (
            json.dumps({"model_type": "llama", "architectures": ["LlamaForNobody"]}),
            "names the architecture 'LlamaForNobody'",
        ),
    ],
)
def test_a_directory_that_is_none(config: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    if config is not None:
        (tmp_path / "hf" / "config.json").write_text(config)
    assert said in refused("export", tmp_path / "hf", "-o", tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.slow
def test_prefill_and_decode_over_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache of 4 MB neither the file nor the memory has anything before it is written."""
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "hf", num_hidden_layers=1)
    right("export", "hf", "--prefill-decode", "--max-length", 16384, "-o", "models")
    assert "models exists already" in refused("export", "hf", "--prefill-decode", "-o", "models")
    files = [tmp_path / "models" / f"{name}.pt2" for name in ("prefill", "decode")]
    assert max(file.stat().st_size for file in files) < 1_000_000
    prefill, decode = map(read_model, files)
    cache = prefill.constants["key_cache_0"]
    assert (cache.shape, bool(cache.any()), cache.is_contiguous()) == ((2, 4, 16384, 8), False, True)
    assert prefill.constants.keys() == decode.constants.keys()
    convert = ["convert", *files, "--tp", 2, "--plan", "hf/config.json"]
    shown = json.loads(right(*convert, "--dry-run", "--json"))
    assert [row["sharding"] for row in shown["programs"]["decode"]["tensors"] if row["name"] == "key_cache_0"] == [
        "S(1)"
    ]
    cut = json.loads(right(*convert, "--output", "decode.output=S(2)", "--dry-run", "--json"))["programs"]
    assert [cut[name]["outputs"][0]["sharding"] for name in ("prefill", "decode")] == ["R", "S(2)"]
    assert "names no program" in refused(*convert, "--output", "output=S(2)", "--dry-run")
    assert "two models are called prefill" in refused(*convert[:2], *convert[1:2], *convert[3:], "--dry-run")


def test_what_generates_no_text_has_no_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    said = refused("export", tmp_path, "--prefill-decode", "-o", tmp_path / "models")
    assert "is a BertModel, which generates no text" in said
    assert not (tmp_path / "models").exists()
