"""A model twice, with weights and without, and its checkpoint in several files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.zoo.case import randomise
from tpcompiler.checkpoint.files import INDEX

ARGS = (torch.randint(21, (2, 6), generator=torch.Generator().manual_seed(0)),)
SIZES = ({0: Dim("batch", min=1, max=8)},)
PLAN = {"table": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.down(self.up(x).relu())
        return added


class Model(nn.Module):
    """A tied head, frequencies that no checkpoint has, 21 ids."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(21, 8), nn.Linear(8, 21, bias=False)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("frequencies", torch.arange(8.0) / 8, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids) * self.frequencies
        for layer in self.layers:
            hidden = layer(hidden)
        made: torch.Tensor = self.head(hidden)
        return made


@cache
def model(layers: int = 1) -> Model:
    return randomise(Model(layers))


@cache
def exported(layers: int = 1) -> ExportedProgram:
    return export(model(layers), ARGS, dynamic_shapes=SIZES)


def hollow() -> ExportedProgram:
    with tpcompiler.weightless():
        return export(Model(), ARGS, dynamic_shapes=SIZES)


def write_checkpoint(directory: Path, prefix: str = "", files: int = 3, **changed: torch.Tensor) -> Path:
    """The model's weights under Hugging Face's names of files; tied ones once."""
    tensors = {name: value.detach().contiguous() for name, value in model().named_parameters()}
    tensors = {prefix + name: value for name, value in {**tensors, **changed}.items()}
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    where = {}
    for at in range(files):
        own = names[at::files]
        file = f"model-{at + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in own}, directory / file)
        where.update(dict.fromkeys(own, file))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory
