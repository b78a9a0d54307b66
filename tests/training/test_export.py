"""Training programs by the command line, from a Hugging Face directory and from a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.commands import refused, right
from tpcompiler.errors import ProgramError
from tpcompiler.frontend.exporting import export_without_weights

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


def directory(folder: Path, name: str, **more: Any) -> Path:
    kind = getattr(transformers, name)
    config = kind.config_class(**SIZES, **more)
    config.architectures = [name]
    config.save_pretrained(folder)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("BertForMaskedLM", [2, 16]), ("BertForSequenceClassification", [2]), ("ViTForImageClassification", [2])],
)
def test_labels_for_tokens_or_samples(name: str, shape: list[int], tmp_path: Path) -> None:
    more = {"image_size": 16, "patch_size": 8} if "ViT" in name else {}
    program = export_without_weights(directory(tmp_path, name, **more), training=True).program
    labels = next(node for node in program.graph.nodes if node.name == "labels")
    assert [*map(int, labels.meta["val"].shape)] == shape or labels.meta["val"].ndim == len(shape)


def test_a_model_without_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="BertModel computes no loss of labels for tokens or for samples"):
        export_without_weights(directory(tmp_path, "BertModel"), training=True)


def build() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model whose forward returns its loss."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).square().mean()

    return Model(), (torch.randn(4, 8),)


def test_from_a_function(tmp_path: Path) -> None:
    right("export", "tests.training.test_export:build", "--training", "-o", str(tmp_path / "m.pt2"))
    program = torch.export.load(tmp_path / "m.pt2")
    assert [s.target for s in program.graph_signature.output_specs] == [None, "up.weight", "up.bias"]


def test_not_with_caches(tmp_path: Path) -> None:
    said = refused("export", str(tmp_path), "--training", "--prefill-decode", "-o", str(tmp_path / "m"))
    assert "leave it out with --prefill-decode" in said
