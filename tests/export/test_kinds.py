"""`tpcompiler export DIR` for every kind of Hugging Face model, converted for 2 ranks and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PatchTSTConfig

import tpcompiler
from tests.long import in_long_runs
from tests.runtime.commands import refused
from tools.hf_models import ROWS, Row
from tools.hf_table import PAGE, build, measure, table_rows
from tpcompiler._torch import FakeTensor, KnownTensor
from tpcompiler.checkpoint.fill import fill_weights
from tpcompiler.checkpoint.ranks import open_source
from tpcompiler.frontend.dynamic_sizes import Sizes
from tpcompiler.frontend.example_inputs import Example
from tpcompiler.frontend.exporting import export_without_weights

MACHINE = "ideal"  # as if latencies were none: small models are worth cutting

KINDS = {
    "electra": ("dynamic: batch, length", "auto"),
    "t5": ("dynamic: batch, length, target", "auto"),
    "whisper": ("dynamic: batch, target", "auto"),
    "vit": ("dynamic: batch", "auto"),
    "siglip": ("dynamic: images, batch, length", "auto"),
    "wav2vec2": ("dynamic: batch (from 2), samples (from 30)", "auto"),
    "llava": ("dynamic: length; fixed: batch 2 (the model's code depends on it)", "config.json"),
    "qwen2_vl": ("fixed: batch 2, length 20 (the model's code depends on it)", "config.json"),
}
# A config's plan, names that differ from the model's, and sizes that the model's code fixes, are in llava; of the search
# test_prefill_decode.py has two. The sizes of the others are those of `SIZES`.
SHORT = "llava"
SIZES = ("whisper", "siglip", "wav2vec2")


def row(model_type: str) -> Row:
    return next(row for row in ROWS if row.model_type == model_type)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model_type", [kind if kind == SHORT else pytest.param(kind, marks=in_long_runs) for kind in KINDS]
)
def test_a_directory_of_each_kind(model_type: str, tmp_path: Path) -> None:
    """From `save_pretrained` to two verified ranks: VLM checkpoints have other names than their models, too."""
    sizes, plan, result = measure(row(model_type), tmp_path)
    assert (sizes, plan) == KINDS[model_type], result
    assert result.startswith("equal")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SIZES)
def test_sizes_of_each_kind(model_type: str, tmp_path: Path) -> None:
    build(row(model_type), tmp_path)
    assert export_without_weights(tmp_path).sizes == KINDS[model_type][0]


@pytest.mark.skipif(not PAGE.exists(), reason="an installed wheel has no docs beside the tests")
def test_the_page_has_the_rows_of_the_list() -> None:
    """`python -m tools.hf_table --write` measures them again."""
    assert list(table_rows(PAGE.read_text(encoding="utf-8"))) == [row.model_type for row in ROWS]


def test_outputs_are_tensors_and_no_caches(tmp_path: Path) -> None:
    """Of a config that asks for a cache, in a program that needs no class of transformers to be read."""
    build(row("t5"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    program = export_without_weights(tmp_path, length=4, static=True).program
    spec = program.call_spec.out_spec
    assert spec is not None
    assert (spec.type, spec.context) == (dict, ["logits", "encoder_last_hidden_state"])
    assert all(child.is_leaf() for child in spec.children())


@pytest.mark.parametrize(
    "model_type", ["resnet", *(pytest.param(kind, marks=in_long_runs) for kind in ("bart", "llava"))]
)
def test_numbers_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Statistics and other buffers that a checkpoint has are taken from it; names become the model's by its own table."""
    build(row(model_type), tmp_path)
    program = export_without_weights(tmp_path).program
    fill_weights(program, open_source(tmp_path))
    auto: Any = getattr(transformers, f"AutoModel{row(model_type).head}")
    assert program.example_inputs is not None
    inputs = program.example_inputs[1]
    with torch.no_grad():
        expected = auto.from_pretrained(tmp_path).eval()(**inputs).logits
        torch.testing.assert_close(program.module()(**inputs)["logits"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["its final_logits_bias", "none", "nothing"])
def test_a_buffer_that_transformers_lets_a_checkpoint_lack(stored: str, tmp_path: Path) -> None:
    """It keeps the constructor's value where the directory's checkpoint has no such tensor."""
    build(row("bart"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    bias = tensors.pop("final_logits_bias") + 1
    save_file(tensors if stored == "none" else {**tensors, "final_logits_bias": bias}, file)
    if stored == "nothing":
        file.rename(tmp_path / "elsewhere")
    program = export_without_weights(tmp_path, length=4, static=True).program
    persistent = "final_logits_bias" in program.state_dict
    assert persistent == (stored != "none")
    made = tpcompiler.parallelize(program, 2, {})
    made.save(tmp_path / "out")
    if stored == "nothing":
        (tmp_path / "elsewhere").rename(file)
    tpcompiler.open(tmp_path / "out").cut(tmp_path)
    held = load_file(tmp_path / "out" / "rank_0.safetensors")["final_logits_bias"]
    assert torch.equal(held, bias if persistent else torch.zeros_like(bias))


def test_floats_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    build(row("whisper"), tmp_path)
    made = export_without_weights(tmp_path, dtype="bfloat16", static=True)
    assert made.program.example_inputs is not None
    assert made.program.example_inputs[1]["input_features"].dtype == torch.bfloat16
    assert made.sizes == "fixed: batch 2, target 16 (by --static)"


def test_inputs_of_another_kind(tmp_path: Path) -> None:
    """Series of numbers: named, with what to do instead, and no file."""
    config = PatchTSTConfig(context_length=8, patch_length=4, d_model=8, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["PatchTSTForPrediction"]
    config.save_pretrained(tmp_path)
    said = refused("export", tmp_path, "-o", tmp_path / "model.pt2")
    assert said.splitlines() == [
        "PatchTSTForPrediction takes 'past_values', for which tpcompiler has no example input",
        "  help: export it with a function that returns (model, args, kwargs): tpcompiler export module:factory",
    ]
    assert not (tmp_path / "model.pt2").exists()


BRANCHES = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def build():
    return Model(), (torch.ones(2),)
"""


def test_a_model_that_cannot_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own line is named, and nothing of torch's is printed."""
    (tmp_path / "branches_of_mine.py").write_text(BRANCHES)
    monkeypatch.chdir(tmp_path)
    said = refused("export", "branches_of_mine:build", "-o", "model.pt2").splitlines()
    at = f"{tmp_path.name}/branches_of_mine.py:6: return x if x.sum() > 0 else -x"
    assert said[0] == f"branches_of_mine:build cannot be exported: torch.export cannot trace {at}"
    assert len(said) == 2


class Pair(torch.nn.Module):
    """Both inputs have one batch and one length; the last size is a constant of the code."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b) @ torch.ones(3, 2)


def test_sizes_are_named_as_they_are_found() -> None:
    example = Example()
    for name in ("a", "b"):
        example.add(name, torch.ones(2, 4, 3), "batch", "length", "wide")
    sizes = Sizes(example, {"length": (2, 64)})
    named, decided = sizes.proposals()
    with pytest.raises(Exception, match="wide"):
        torch.export.export(Pair(), (), example.inputs, dynamic_shapes=named)
    program = torch.export.export(Pair(), (), example.inputs, dynamic_shapes=decided)
    assert sizes.describe(program, "why") == "dynamic: batch (from 2), length; fixed: wide 3 (why)"


def test_initializers_leave_parameters_without_values() -> None:
    """`trunc_normal_` reads what it draws; tensors with values it still fills."""
    with tpcompiler.weightless():
        layer = torch.nn.Linear(4, 3)
        torch.nn.init.trunc_normal_(layer.weight)
        assert torch.nn.init.trunc_normal_(torch.zeros(64)).any()
    assert isinstance(layer.weight.data, FakeTensor)


def test_ops_on_known_tensors_are_computed() -> None:
    """Their numbers cut another tensor; where they meet one, they are constants."""
    grid = torch.tensor([[1, 2, 2], [1, 2, 1]]).as_subclass(KnownTensor)

    class Cut(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first, _ = torch.split(x, grid.prod(-1).tolist())
            return first, x[grid[:, 1].cumsum(0)]

    x = torch.randn(6, 3)
    program = torch.export.export(Cut(), (x,))
    first, picked = program.module()(x + 1)
    assert torch.equal(first, x[:4] + 1)
    assert torch.equal(picked, x[[2, 4]] + 1)
