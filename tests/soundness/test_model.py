"""The model in an artifact must be the program that its ranks run: whoever exchanges it, hash and all, is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

import tpcompiler
from tests.sound import findings
from tests.trust.subjects import subject
from tpcompiler.errors import ArtifactError
from tpcompiler.judge.sound.check import check_programs
from tpcompiler.passes.canonicalize import canonicalize
from tpcompiler.runtime.artifact import MANIFEST, MODEL, sha256

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"up": "colwise", "down": "rowwise"}


class Layers(nn.Module):
    """Two layers with something between them; a buffer is written, and some values may be other ones."""

    def __init__(self, act: Callable[[Any], Any] = torch.relu, scale: float = 3.0, turned: bool = False) -> None:
        super().__init__()
        self.act, self.scale, self.turned = act, scale, turned
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("other", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.down(self.act(self.up(x)))
        (self.other if self.turned else self.seen).add_(h.sum(0))
        return (x - h, h * self.scale) if not self.turned else (h - x, h * self.scale)


def exported(model: nn.Module, *, dynamic: tuple[int, int] | None = None) -> ExportedProgram:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    sizes = {"x": {0: Dim("batch", min=dynamic[0], max=dynamic[1])}} if dynamic else None
    return export(model, (X,), dynamic_shapes=sizes)


def written(model: ExportedProgram, out: Path, layout: Any = "ranks") -> Path:
    tpcompiler.parallelize(model, 2, PLAN).save(out, layout=layout)
    return out


def put(out: Path, other: ExportedProgram) -> None:
    """Exchange the model for that of an artifact of another program, and its hash."""
    tpcompiler.parallelize(other, 2, PLAN).save(out.parent / "other")
    shutil.copy(out.parent / "other" / MODEL, out / MODEL)
    shutil.rmtree(out.parent / "other")
    _say(out)


def _say(out: Path) -> None:
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"][MODEL] = sha256(out / MODEL)
    (out / MANIFEST).write_text(json.dumps(manifest))


OTHERS: dict[str, tuple[Callable[[], ExportedProgram], str]] = {
    "another activation": (
        lambda: exported(Layers(torch.sigmoid)),
        "model.pt2 has 'sigmoid' = aten.sigmoid.default(linear) there: on random values they differ by",
    ),
    "another activation of the same name": (
        lambda: exported(Layers(lambda x: torch.relu(x).relu().neg())),
        "model.pt2 has 'neg' = aten.neg.default(relu_1) there: on random values they differ by",
    ),
    "another number": (
        lambda: exported(Layers(scale=3.5)),
        "model.pt2 has 'mul' = aten.mul.Tensor(linear_1, 3.5) there",
    ),
    "operands turned, another buffer": (
        lambda: exported(Layers(turned=True)),
        "output 0 of the ranks is buffer_mutation of seen, and that of model.pt2 is buffer_mutation of other",
    ),
    "sizes that are free": (
        lambda: exported(Layers(), dynamic=(2, 64)),
        "'x' of the ranks and of model.pt2 are f32 [4, 8] and f32 [s",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused(name: str, tmp_path: Path) -> None:
    """By the check with the original and without, by verify against it, and by what is made from the artifact."""
    original, (other, said) = exported(Layers()), OTHERS[name]
    out = written(original, tmp_path / "out")
    assert tpcompiler.open(out).check().ok
    assert tpcompiler.open(out).verify((X,), original=original).ok
    put(out, other())
    for found in (tpcompiler.open(out).check().findings, tpcompiler.open(out).check(original).findings):
        assert any(said in finding for finding in found), found
    with pytest.raises(ArtifactError, match=r"model\.pt2 is not what the ranks run"):
        tpcompiler.open(out).verify((X,), original=original)
    with pytest.raises(ArtifactError, match=r"model\.pt2 is not what the ranks run"):
        tpcompiler.open(out).merge(tmp_path / "merged.pt2")
    with pytest.raises(ArtifactError, match=r"model\.pt2 is not what the ranks run"):
        tpcompiler.open(out).reshard(3, tmp_path / "three")
    assert {each.name for each in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_so_it_is_where_weights_lie_apart(tmp_path: Path) -> None:
    out = written(exported(Layers()), tmp_path / "out", "shared")
    assert tpcompiler.open(out).check().ok
    put(out, exported(Layers(torch.sigmoid)))
    assert not tpcompiler.open(out).check().ok


@pytest.mark.slow
def test_another_range_of_a_size(tmp_path: Path) -> None:
    out = written(exported(Layers(), dynamic=(2, 64)), tmp_path / "out")
    assert tpcompiler.open(out).check().ok
    put(out, exported(Layers(), dynamic=(2, 128)))
    assert any(
        "of model.pt2 ends at 128, and that of the ranks at 64" in each
        for each in tpcompiler.open(out).check().findings
    )


@pytest.mark.slow
def test_a_dynamic_size_that_can_only_be_one_number() -> None:
    """In the model it is a symbol that torch has replaced; in ranks whose other sizes are divided it is a number."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x) * torch.ones(4, 1), y + 1

    model = export(Scaled(8, 8), (X, X), dynamic_shapes={"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}})
    assert findings(tpcompiler.parallelize(model, 2, {"weight": "S(0)"}, inputs={"y": "S(0)"})) == []


def test_a_model_with_weights_of_its_own(tmp_path: Path) -> None:
    """It would be believed in place of the ranks'."""
    original = exported(Layers())
    out = written(original, tmp_path / "out")
    state = {name: value + 1 for name, value in original.state_dict.items()}
    original.state_dict.update(
        {n: nn.Parameter(v) if isinstance(original.state_dict[n], nn.Parameter) else v for n, v in state.items()}
    )
    torch.export.save(original, out / MODEL)
    _say(out)
    assert "'up.weight': the ranks' shares do not make the original's tensor" in tpcompiler.open(out).check().findings
    with pytest.raises(ArtifactError, match=r"'up\.weight' in model\.pt2 is not what the ranks hold"):
        tpcompiler.open(out).merge(tmp_path / "merged.pt2")
    with pytest.raises(ArtifactError, match=r"'up\.weight' in model\.pt2 is not what the ranks hold"):
        tpcompiler.open(out).reshard(3, tmp_path / "three")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a link", "a device", "nothing", "other bytes"])
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    out = written(exported(Layers()), tmp_path / "out")
    content = (out / MODEL).read_bytes()
    (out / MODEL).unlink()
    if kind == "a pipe":
        os.mkfifo(out / MODEL)
    elif kind == "a directory":
        (out / MODEL).mkdir()
    elif kind == "a link":
        (tmp_path / "elsewhere.pt2").write_bytes(content)
        (out / MODEL).symlink_to(tmp_path / "elsewhere.pt2")
    elif kind == "a device":
        (out / MODEL).symlink_to("/dev/zero")
    elif kind == "other bytes":
        (out / MODEL).write_bytes(content + b"\0")
    with pytest.raises(ArtifactError, match=f"{MODEL} (is missing|cannot be read|leads out of|has SHA-256)"):
        tpcompiler.open(out).check()


@pytest.mark.slow
def test_a_rewritten_piece_of_another_model() -> None:
    """The negative control of pieces that are run: attention over a cut cache, and attention in turns."""
    for name in ("cache by steps", "in turns"):
        of = subject(name)
        manifest, ranks = of.sound.manifest, of.sound.written()
        assert check_programs(ranks, manifest, model=of.model).findings == []
        other = canonicalize(of.original)
        for node in other.graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        ):
            node.kwargs = {**node.kwargs, "scale": 0.5}
        (finding,) = check_programs(ranks, manifest, model=other).findings
        assert "on random values they differ by" in finding
