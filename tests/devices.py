"""Programs that name devices in every way, and a search for what is left of one."""

from __future__ import annotations

import functools
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten_with_path

from tests.passes.models import HEADS, MEGATRON, Attention, Mlp


class Literals(nn.Module):
    """Factories, casts, masks, lifted literals, a vocabulary that is cut and a mean over a cut dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(self.up(self.embed(ids)))
        x = self.down(h) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) / torch.tensor(4.0)
        x = x + torch.arange(8) + torch.zeros(8) + torch.full((8,), 0.5, device="cpu") + torch.ones(1, 8)
        rows = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()[rows[:, None], torch.arange(8)]
        x = x.masked_fill(~mask, -1.0).to("cpu", torch.float64).to(torch.float32)
        return torch.where(x > 0, x, 0.0), h.mean(-1), x.new_zeros(2), torch.empty(3).fill_(2.0), torch.scalar_tensor(3)


class Written(nn.Module):
    """A buffer that is written back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        self.seen.add_(x.sum(0) + torch.arange(4.0))
        return x + self.seen


LITERALS_PLAN = {"embed": "embedding_rowwise", "up": "colwise", "down": "rowwise"}


MODELS: dict[str, tuple[type[nn.Module], dict[str, str], Callable[[], torch.Tensor]]] = {
    "literals": (Literals, LITERALS_PLAN, lambda: torch.randint(0, 12, (2, 5))),
    "mlp": (Mlp, MEGATRON, lambda: torch.randn(3, 4)),
    "attention": (Attention, HEADS, lambda: torch.randn(2, 6, 8)),
    "written": (Written, MEGATRON, lambda: torch.randn(3, 4)),
}


@functools.cache
def exported(name: str) -> tuple[ExportedProgram, dict[str, str], tuple[torch.Tensor, ...]]:
    """The program as it was exported on the CPU, its plan and its inputs."""
    torch.manual_seed(0)
    build, plan, inputs = MODELS[name]
    args = (inputs(),)
    return torch.export.export(build().eval(), args), plan, args


def other_devices(program: ExportedProgram, device_type: str) -> list[str]:
    """Whatever in the graph is on, or names, another type of device; and every literal with an index."""
    found = []
    for node in program.graph.nodes:
        for what in ("args", "kwargs"):
            for path, leaf in _leaves(getattr(node, what)):
                named = isinstance(leaf, torch.device) or (
                    isinstance(leaf, str) and re.fullmatch(r"(cpu|cuda|meta)(:\d+)?", leaf)
                )
                if named and str(leaf) != device_type:
                    found.append(f"{node.name}.{what}{path} is {leaf}")
        for path, leaf in _leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != device_type:
                found.append(f"{node.name}{path} is on {leaf.device}")
    return found


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    for path, leaf in tree_flatten_with_path(tree)[0]:
        yield "".join(map(str, path)), leaf


def devices_in_file(path: Path) -> dict[str, set[tuple[str, int | None]]]:
    """(type, index) of every device that a .pt2 file names, by part of the file."""
    found: dict[str, set[tuple[str, int | None]]] = {}

    def search(part: str, data: Any) -> None:
        if isinstance(data, dict):
            if set(data) == {"type", "index"}:
                found.setdefault(part, set()).add((data["type"], data["index"]))
            for value in data.values():
                search(part, value)
        elif isinstance(data, list):
            for value in data:
                search(part, value)

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                search(name.rpartition("/")[2], json.loads(archive.read(name)))
    return found


def propagate(program: ExportedProgram) -> None:
    """Run the graph on its own fake values: torch refuses an op whose operands are on two devices."""
    env: dict[Any, Any] = {}
    values = [n.meta["val"] for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    with values[0].fake_mode, torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = node.meta["val"]
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
                env[node] = node.target(*args, **kwargs)
