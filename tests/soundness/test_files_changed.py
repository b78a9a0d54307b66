"""Files that somebody has changed: what ranks hold in one memory, name twice, or take otherwise than the manifest says."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

import tpcompiler
from tests.runtime.poisons import Entries, entries_of
from tpcompiler.runtime.artifact import MANIFEST, rank_file, sha256
from tpcompiler.runtime.program_files import open_program
from tpcompiler.runtime.rank_file import read_rank

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """Two buffers that begin alike, and a value of which a copy is returned before it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("k", torch.zeros(4, 8))
        self.register_buffer("v", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.down(torch.relu(self.up(x)))
        before = self.k.clone()
        self.k.add_(h)
        self.v.mul_(0.5).sub_(h)
        return before, h - 3


PLAN = {"up": "colwise", "down": "rowwise"}


@pytest.fixture(scope="module")
def model() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Written(), (X,))


@pytest.fixture
def out(model: ExportedProgram, tmp_path: Path) -> Path:
    tpcompiler.parallelize(model, 2, PLAN).save(tmp_path / "out")
    return tmp_path / "out"


def edit(directory: Path, rank: int | None, entry: str, change: Callable[[Any], None]) -> None:
    """Change a piece of JSON in a rank's file, or in those of all ranks, and the manifest's hashes with it."""
    data = json.loads(entries_of(directory / rank_file(rank or 0))[entry])
    change(data)
    put(directory, rank, entry, json.dumps(data).encode())


def put(directory: Path, rank: int | None, entry: str, new: bytes) -> None:
    """Put an entry into a rank's file, or into those of all ranks, and the hashes into the manifest."""
    for name in ["program.pt2", *map(rank_file, range(2))] if rank is None else [rank_file(rank)]:
        _put_into(directory, directory / name, entry, new)


def _put_into(directory: Path, path: Path, entry: str, new: bytes) -> None:
    entries: Entries = entries_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**entries, entry: new}.items():
            archive.writestr(f"{path.stem}/{name}", content)
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["files"][path.name] = sha256(path)
    (directory / MANIFEST).write_text(json.dumps(manifest))


def test_two_buffers_in_one_piece_of_a_file(out: Path, model: ExportedProgram) -> None:
    """They hold the same numbers, until one is written to."""

    def change(data: Any) -> None:
        data["config"]["v"]["path_name"] = data["config"]["k"]["path_name"]

    for rank in range(2):
        edit(out, rank, "data/weights/model_weights_config.json", change)
    report = tpcompiler.open(out).check(model)
    assert report.findings == ["rank 0 writes to 'v' and 'k', which share memory"] or report.findings == [
        "rank 0 writes to 'k' and 'v', which share memory"
    ]


class Trained(nn.Module):
    """A parameter that forward writes to, and another of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.seen = nn.Parameter(torch.zeros(8), requires_grad=False)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        h: torch.Tensor = self.down(torch.relu(self.up(x)))
        return h + self.seen


def test_a_written_parameter_in_the_memory_of_another(tmp_path: Path) -> None:
    exported = export(Trained(), (X,))
    tpcompiler.parallelize(exported, 2, PLAN).save(tmp_path / "out")

    def change(data: Any) -> None:
        data["config"]["seen"]["path_name"] = data["config"]["down.bias"]["path_name"]

    for rank in range(2):
        edit(tmp_path / "out", rank, "data/weights/model_weights_config.json", change)
    (found,) = tpcompiler.open(tmp_path / "out").check(exported).findings
    assert re.fullmatch("rank 0 writes to '(seen|down.bias)' and '(seen|down.bias)', which share memory", found)


def test_a_buffer_that_overlaps_itself(out: Path, model: ExportedProgram) -> None:
    """It holds zeros, which are the same however they lie, until it is written to; torch does not notice either."""

    def change(data: Any) -> None:
        data["config"]["k"]["tensor_meta"]["strides"] = [{"as_int": 1}, {"as_int": 1}]

    edit(out, 1, "data/weights/model_weights_config.json", change)
    report = tpcompiler.open(out).check(model)
    said = "'k' has the strides [1, 1] on rank 1, and its program says [8, 1]"
    assert report.findings == [said]
    with pytest.raises(tpcompiler.ArtifactError, match=r"'k' has the strides \[1, 1\], its program takes \[8, 1\]"):
        read_rank(open_program(out), 1)
    read_rank(open_program(out), 0)


@pytest.mark.parametrize("strides", [[0, 1], [1, 1]])
def test_a_buffer_that_overlaps_itself_on_all_ranks(strides: list[int], out: Path, model: ExportedProgram) -> None:
    """As their programs say too; torch refuses the write where a stride is 0, and else does it."""
    said = [{"as_int": stride} for stride in strides]

    def in_the_file(data: Any) -> None:
        data["config"]["k"]["tensor_meta"]["strides"] = said

    def in_the_program(data: Any) -> None:
        data["graph_module"]["graph"]["tensor_values"]["b_k"]["strides"] = said

    for rank in range(2):
        edit(out, rank, "data/weights/model_weights_config.json", in_the_file)
    edit(out, None, "models/model.json", in_the_program)
    assert "rank 0 writes to 'k', whose elements may share memory" in tpcompiler.open(out).check(model).findings


def test_an_output_in_the_memory_of_what_is_written(out: Path, model: ExportedProgram) -> None:
    """torch's module writes at the end, and the caller sees it."""

    def change(data: Any) -> None:
        graph = data["graph_module"]["graph"]
        clone = next(node for node in graph["nodes"] if "clone" in node["target"])
        graph["nodes"].remove(clone)
        text = json.dumps(data).replace(json.dumps(clone["name"]), '"b_k"')
        data.clear()
        data.update(json.loads(text))

    assert tpcompiler.open(out).verify((X,), original=model, then=[(X + 1,)]).ok
    edit(out, None, "models/model.json", change)
    report = tpcompiler.open(out).verify((X,), original=model, then=[(X + 1,)])
    assert [each.name for each in report.outputs if not each.ok] == ["call 1: 0", "call 2: 0"]
    assert any("shares the memory of 'k'" in finding for finding in tpcompiler.open(out).check(model).findings)


def test_a_program_of_one_rank_alone(out: Path, model: ExportedProgram) -> None:
    """Ranks of equal shapes run one program, to the byte: else torch alone would run another than was judged."""

    def change(data: Any) -> None:
        nodes = data["graph_module"]["graph"]["nodes"]
        minus = next(node for node in nodes if node["inputs"][-1]["arg"] == {"as_int": 3})
        minus["inputs"][-1]["arg"] = {"as_float": 3.0}

    edit(out, 1, "models/model.json", change)
    other = pytest.raises(tpcompiler.ArtifactError, match=r"rank_1\.pt2 has another program than .*program\.pt2")
    with other:
        tpcompiler.open(out).check(model)
    with other:
        tpcompiler.open(out).verify((X,), original=model)
    with other:
        read_rank(open_program(out), 1)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.c(self.a(x))) + torch.arange(8)


def test_a_device_that_is_not_the_artifacts(tmp_path: Path) -> None:
    out, model = tmp_path / "out", export(Counted(), (X,))
    tpcompiler.parallelize(model, 2, {"a": "colwise", "c": "rowwise"}).save(out)
    assert tpcompiler.open(out).check(model).ok

    def change(data: Any) -> None:
        text = json.dumps(data["graph_module"]["graph"]["nodes"])
        assert '"type": "cpu"' in text
        data["graph_module"]["graph"]["nodes"] = json.loads(text.replace('"type": "cpu"', '"type": "cuda"'))

    edit(out, None, "models/model.json", change)
    for judge in (
        lambda out, model: tpcompiler.open(out).check(model),
        lambda out, model: tpcompiler.open(out).verify((X,), original=model),
    ):
        with pytest.raises(tpcompiler.ArtifactError, match="names the device 'cuda', and the manifest says 'cpu'"):
            judge(out, model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("examples", [((), {}), ((X, X), {}), (([X],), {}), ((X,), {"other": X})], ids=str)
@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=str)
def test_examples_that_are_no_arguments(ranks: list[int], examples: Any, out: Path, model: ExportedProgram) -> None:
    """torch's module makes its input checks of them, and cannot."""
    manifest = json.loads((out / MANIFEST).read_text())
    for rank in ranks:
        path = out / rank_file(rank)
        program = torch.export.load(path)
        program._example_inputs = examples
        torch.export.save(program, path)
        manifest["files"][path.name] = sha256(path)
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(tpcompiler.ArtifactError, match="rank_"):
        tpcompiler.open(out).check(model)


def test_verify_runs_the_groups_of_the_manifest(out: Path, model: ExportedProgram) -> None:
    """As `load` makes them."""
    manifest = json.loads((out / MANIFEST).read_text())
    (name,) = manifest["groups"]
    manifest["groups"] = {name: [[0], [1]]}
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(tpcompiler.ArtifactError, match=f"the manifest's ranks of the group '{name}' are not those of"):
        tpcompiler.open(out).verify((X,), original=model)


def test_a_reduction_that_nobody_knows(out: Path, model: ExportedProgram) -> None:
    def change(data: Any) -> None:
        text = json.dumps(data).replace('{"as_string": "sum"}', '{"as_string": "SUM"}')
        data.update(json.loads(text))

    edit(out, None, "models/model.json", change)
    with pytest.raises(tpcompiler.InputsError, match="a rank's program does not run on these inputs"):
        tpcompiler.open(out).verify((X,), original=model)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("k", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.down(torch.relu(self.up(x + self.k)))
        self.k.add_(h)
        return h


@pytest.mark.slow
def test_a_set_of_programs_that_do_not_belong_together(tmp_path: Path) -> None:
    """One with a cache of its own, and one for another mesh."""
    torch.manual_seed(0)
    exported = export(Cached(), (X,))
    both = {"prefill": exported, "decode": exported}
    for name, mesh in (("own", {"tp": 2, "dp": 2}), ("mesh", {"tp": 4, "dp": 1})):
        tpcompiler.parallelize(both, {"tp": 2, "dp": 2}, PLAN).save(tmp_path / name)
        assert tpcompiler.open(tmp_path / name).check().ok
        shutil.rmtree(tmp_path / name / "decode")
        if name == "own":
            tpcompiler.parallelize(exported, mesh, PLAN).save(tmp_path / name / "decode")
        else:
            tpcompiler.parallelize(both, mesh, PLAN).save(tmp_path / "other")
            shutil.copytree(tmp_path / "other" / "decode", tmp_path / name / "decode")
    said = {name: tpcompiler.open(tmp_path / name).check().findings[-1] for name in ("own", "mesh")}
    assert said["own"].endswith(" is stored in the files of 'prefill' and again in those of 'decode'")
    assert said["mesh"] == "'decode' is for the mesh {'tp': 4, 'dp': 1}, and 'prefill' for {'tp': 2, 'dp': 2}"
    for name, finding in said.items():
        with pytest.raises(tpcompiler.ArtifactError) as raised:
            tpcompiler.load(tmp_path / name)
        assert str(raised.value) == (
            f"the programs of {tmp_path / name} do not belong together: {finding}\n  help: convert them together"
        )


def test_a_set_whose_tensors_lie_otherwise_than_one_says(tmp_path: Path) -> None:
    """What reads a tensor of another program's files reads it as its own file says."""
    torch.manual_seed(0)
    exported = export(Cached(), (X,))
    tpcompiler.parallelize({"prefill": exported, "decode": exported}, 2, PLAN).save(tmp_path / "out")
    assert tpcompiler.open(tmp_path / "out").check().ok

    def change(data: Any) -> None:
        value = data["graph_module"]["graph"]["tensor_values"]["b_k"]
        value["strides"] = value["strides"][::-1]

    edit(tmp_path / "out" / "decode", None, "models/model.json", change)
    found = tpcompiler.open(tmp_path / "out").check().findings
    assert found[-1] == "'k' has the strides [1, 8] to 'decode' on rank 0, and [8, 1] to 'prefill'"


def not_a_parameter(data: Any) -> None:
    next(each for each in data["config"].values() if each["is_param"])["is_param"] = False


def another_root(data: Any) -> None:
    data["graph_module"]["module_call_graph"][0]["fqn"] = "zz"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "change"),
    [("data/weights/model_weights_config.json", not_a_parameter), ("models/model.json", another_root)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_torch_does_not_take(
    rank: int, entry: str, change: Callable[[Any], None], out: Path, model: ExportedProgram
) -> None:
    """Of the first rank, and of one whose graph is the first's."""
    edit(out, rank, entry, change)
    with pytest.raises(tpcompiler.ArtifactError):
        tpcompiler.open(out).check(model)
