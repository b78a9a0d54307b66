"""One program for all ranks that run one graph, and the weights of each in a safetensors file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.launch import called
from tests.zoo.case import randomise
from tpcompiler import ArtifactError, UnsupportedError
from tpcompiler.runtime.artifact import read_manifest, sha256, weights_file
from tpcompiler.runtime.program_files import open_program
from tpcompiler.runtime.rank_file import read_rank

ARGS = (torch.randint(21, (2, 6), generator=torch.Generator().manual_seed(0)), torch.ones(2, 6, 8))
PLAN = {"table": "embedding_rowwise", "up": "colwise", "down": "rowwise"}


class Model(nn.Module):
    """A tied head, a buffer that is written, a constant, a weight whose dims lie in another order, 21 ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(21, 8), nn.Linear(8, 21)
        self.head.weight = self.table.weight
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.up.weight = nn.Parameter(torch.randn(8, 12).t())
        self.shift = torch.randn(8)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        hidden = self.table(ids) + x * self.calls.sum() + self.shift
        return {"logits": self.head(self.down(self.up(hidden).relu()))}


@cache
def exported() -> ExportedProgram:
    return export(randomise(Model()), ARGS)


@pytest.fixture(scope="module", params=[3, 4])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("shared") / "out"
    tpcompiler.parallelize(exported(), request.param, PLAN).save(directory, layout="shared")
    return directory


@pytest.mark.slow
def test_the_weights_are_those_of_the_other_layout(out: Path, tmp_path: Path) -> None:
    world = read_manifest(out).world_size
    tpcompiler.parallelize(exported(), world, PLAN).save(tmp_path / "out")
    for rank in range(world):
        one, two = (read_rank(open_program(path), rank) for path in (out, tmp_path / "out"))
        for held, other in ((one.state_dict, two.state_dict), (one.constants, two.constants)):
            assert held.keys() == other.keys()
            for name, value in held.items():
                assert torch.equal(value, other[name])
                assert (value.stride(), type(value), value.requires_grad) == (
                    other[name].stride(),
                    type(other[name]),
                    other[name].requires_grad,
                )
        assert one.state_dict["head.weight"] is one.state_dict["table.weight"]


@pytest.mark.sample(1)
def test_what_is_written_to_a_weight_stays_in_the_process(out: Path) -> None:
    before = sha256(out / weights_file(0))
    program = read_rank(open_program(out), 0)
    with torch.no_grad():
        program.state_dict["down.weight"].zero_()
    assert str(out / weights_file(0)) in Path("/proc/self/maps").read_text()
    assert sha256(out / weights_file(0)) == before
    assert read_rank(open_program(out), 0).state_dict["down.weight"].any()


@pytest.mark.slow
def test_real_processes(out: Path, tmp_path: Path) -> None:
    """The buffer keeps its count from call to call."""
    world = read_manifest(out).world_size
    shutil.copytree(out, tmp_path / "out")
    model = exported().module()
    with torch.no_grad():
        expected = [model(*ARGS)["logits"] for _ in range(2)]
    for own in called([[ARGS, ARGS]] * world, tmp_path):
        for got, want in zip(own, expected, strict=True):
            torch.testing.assert_close(got["logits"], want, rtol=0, atol=1e-5 * float(want.abs().max()))


def _resave(out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rank 0's weights after a change, with their hash in the manifest."""
    path = out / weights_file(0)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    _say_hash(out)


def _say_hash(out: Path) -> None:
    data = json.loads((out / "manifest.json").read_text())
    data["files"][weights_file(0)] = sha256(out / weights_file(0))
    (out / "manifest.json").write_text(json.dumps(data))


def _cut_short(out: Path) -> None:
    path = out / weights_file(0)
    path.write_bytes(path.read_bytes()[:-8])
    _say_hash(out)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda out: (out / weights_file(0)).unlink(), "rank_0.safetensors is missing"),
    "another": (lambda out: shutil.copy(out / weights_file(1), out / weights_file(0)), r"has SHA-256 \w+\.\., the man"),
    "short": (_cut_short, "rank_0.safetensors cannot be read: .*incomplete"),
    "less": (lambda out: _resave(out, lambda t: t.pop("up.bias")), "has no tensor 'up.bias', which its program takes"),
    "more": (
        lambda out: _resave(out, lambda t: t.update(new=torch.ones(1))),
        "holds the tensor 'new', which its program does not take",
    ),
    "dtype": (
        lambda out: _resave(out, lambda t: t.update(calls=t["calls"].half())),
        "'calls' is torch.float16 .3., its",
    ),
    "shape": (
        lambda out: _resave(out, lambda t: t.update(calls=torch.ones(4))),
        r"'calls' is torch.float32 \[4\], its",
    ),
    "numbers": (
        lambda out: _resave(out, lambda t: t.update(rank_numbers=t["rank_numbers"] + 1)),
        r"rank 0 has the numbers \[\[1\]\], and the manifest says \[\[0\]\]",
    ),
    "stray": (lambda out: shutil.copy(out / weights_file(0), out / "rank_7.safetensors"), "is of another artifact"),
    "ranks": (
        lambda out: _say(out, "programs", {"program.pt2": [0, 0, 2]}),
        "programs does not have each of 3 ranks once",
    ),
    "elsewhere": (
        lambda out: _say(out, "programs", {"../program.pt2": [0, 1, 2]}),
        r"is damaged at key in \$.programs: expected str",
    ),
}


def _say(out: Path, field: str, value: Any) -> None:
    data = json.loads((out / "manifest.json").read_text())
    data[field] = value
    (out / "manifest.json").write_text(json.dumps(data))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("three") / "out"
    tpcompiler.parallelize(exported(), 3, PLAN).save(directory, layout="shared")
    return directory


@pytest.mark.sample(8)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_refused(damage: str, three: Path, tmp_path: Path) -> None:
    shutil.copytree(three, tmp_path / "out")
    change, said = DAMAGES[damage]
    change(tmp_path / "out")
    with pytest.raises(ArtifactError, match=said):
        read_rank(open_program(tmp_path / "out"), 0)


@pytest.mark.slow
def test_weights_that_are_exchanged_are_found(tmp_path: Path) -> None:
    """With the original, or where replicas differ."""
    tpcompiler.parallelize(exported(), 3, PLAN).save(tmp_path / "out", layout="shared")
    _resave(tmp_path / "out", lambda tensors: tensors.update({"up.bias": tensors["up.bias"] + 1}))
    report = tpcompiler.open(tmp_path / "out").check(exported())
    assert report.findings == ["'up.bias': the ranks' shares do not make the original's tensor"]
    assert tpcompiler.open(tmp_path / "out").check().ok
    _resave(tmp_path / "out", lambda tensors: tensors.update(calls=tensors["calls"] + 1))
    assert tpcompiler.open(tmp_path / "out").check().findings == ["'calls' is not the same on ranks that share it"]


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    program = tpcompiler.parallelize(export(Complex(), (torch.randn(4, dtype=torch.complex128),)), 2, {})
    with pytest.raises(UnsupportedError, match=r"'weight' is of torch.complex128, .*\n  help: .*layout=.ranks."):
        program.save(tmp_path / "out", layout="shared")
    assert list(tmp_path.iterdir()) == []
