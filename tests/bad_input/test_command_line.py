"""Bad input, through the command line: what is said, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram

from tests.runtime.commands import refused
from tests.runtime.models import PLAN, PLAN_TEXT, export_conv, export_mlp, mlp_inputs
from tpcompiler import parallelize
from tpcompiler.errors import ArtifactError, LaunchError, MeshError, ShardingError
from tpcompiler.runtime.artifact import checked_file, read_manifest
from tpcompiler.runtime.load import load

EXPORT = "export the model and write it with torch.export.save(exported_program, path)"


@pytest.fixture(scope="session")
def program() -> ExportedProgram:
    return export_mlp()


@pytest.fixture(scope="session")
def model(program: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "model.pt2"
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="session")
def plan(model: Path) -> Path:
    path = model.with_name("plan.yaml")
    path.write_text(PLAN_TEXT)
    return path


@pytest.fixture(scope="session")
def pristine(model: Path, program: ExportedProgram) -> Path:
    directory = model.with_name("pristine")
    parallelize(program, 2, PLAN).save(directory)
    return directory


@pytest.fixture
def out(pristine: Path, tmp_path: Path) -> Path:
    """An artifact that a test may damage."""
    directory = tmp_path / "out"
    directory.mkdir()
    for file in pristine.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def test_a_model_that_is_missing(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    expected = f"{path} does not exist\n  help: give the path of a .pt2 file; to make one, {EXPORT}\n"
    assert refused("inspect", path) == expected
    assert refused("convert", path, "--tp", 2, "--plan", plan, "-o", tmp_path / "out") == expected


def test_a_file_that_is_no_model(plan: Path, tmp_path: Path) -> None:
    path = tmp_path / "[" / "b].pt2"  # "[/b]" is markup for rich
    path.parent.mkdir()
    path.write_text("a model, honestly\n")
    expected = f"{path} is a text file, not a .pt2\n  help: {EXPORT}\n"
    assert refused("inspect", path) == expected
    assert refused("convert", path, "--tp", 2, "--plan", plan, "--dry-run") == expected


def test_an_artifact_where_a_model_belongs(plan: Path, out: Path, tmp_path: Path) -> None:
    words = ("--tp", 2, "--plan", plan, "--dry-run")
    assert refused("convert", out, *words) == (
        f"{out} is a directory that tpcompiler wrote\n  help: give the .pt2 file of the single-device model\n"
    )
    assert refused("convert", tmp_path, *words) == f"{tmp_path} is a directory\n  help: give a .pt2 file\n"


def test_a_module_that_cannot_be_imported(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    help = "  help: give the dotted name of a module that python can import here\n"
    assert refused("inspect", model, "--import", "no_such_module") == (
        f"cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'\n{help}"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks.py").write_text("raise ValueError('not today')\n")
    assert refused("inspect", model, "--import", "breaks") == f"cannot import breaks: ValueError: not today\n{help}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '"layer.*.up": colwise\n',
            "plan entry 'layer.*.up' matches nothing\n"
            "  help: use a name of the program, such as 'layers.*.up', 'layers.*', 'layers.*.up.bias'\n"
            '  asked by: {name} line 1 ("layer.*.up": "colwise")\n',
        ),
        (
            "head: columnwise\n",
            "unknown style 'columnwise'\n"
            "  help: did you mean 'colwise'? use one of colwise, colwise_gather_output, rowwise, rowwise_split_input, "
            "embedding_rowwise, packed_colwise, packed_rowwise, replicate, gather, or a placement such as S(0) or R\n"
            '  asked by: {name} line 1 ("head": "columnwise")\n',
        ),
        (
            "head: grouped_gemm\n",
            "style 'grouped_gemm' is recognised but not supported yet\n"
            "  help: use 'replicate' meanwhile: every rank then holds and runs the whole layer\n"
            '  asked by: {name} line 1 ("head": "grouped_gemm")\n',
        ),
        (
            "head.weight: S(2)\n",
            "cannot shard 'head.weight' on dim 2: it has 2 dims\n"
            "  help: use a dim from -2 to 1\n"
            '  asked by: {name} line 1 ("head.weight": "S(2)")\n',
        ),
        ("", 'plan file {plan} is empty\n  help: write at least one entry, such as "*.up": colwise\n'),
    ],
)
def test_a_plan_that_does_not_fit(text: str, expected: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    said = refused("convert", model, "--tp", 2, "--plan", path, "-o", tmp_path / "out")
    assert said == expected.replace("{plan}", str(path)).replace("{name}", path.name)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("plan", [{"conv": "rowwise"}, {"conv.weight": "S(1)"}])
def test_a_size_that_does_not_divide(plan: dict[str, str]) -> None:
    with pytest.raises(ShardingError) as raised:
        parallelize(export_conv(), 4, plan)
    (name, style), *_ = plan.items()
    said = str(raised.value)
    assert said.startswith("cannot shard 'conv.weight' on dim 1")
    assert "3 over 4 leaves 1 empty" in said
    instead = "change 'conv' from rowwise to replicate" if name == "conv" else "pin 'conv.weight' to R"
    assert f", or {instead} (0 wire bytes per rank and call)" in said
    assert f'\n  asked by: the plan ("{name}": "{style}")      used at: models.py:' in said


def test_a_rank_outside_the_world(program: ExportedProgram, pristine: Path) -> None:
    made = parallelize(program, 2, PLAN)
    for rank in (2, -1):
        with pytest.raises(MeshError) as raised:
            made.rank_program(rank)
        assert str(raised.value) == (f"rank {rank} is outside the mesh tp=2 of 2 ranks\n  help: use a rank from 0 to 1")
        with pytest.raises(ArtifactError) as refusal:
            checked_file(pristine, read_manifest(pristine), rank)
        assert str(refusal.value) == (
            f"rank {rank} is outside the artifact's world of 2\n  help: use a rank from 0 to 1"
        )


def test_two_words_for_the_mesh_or_none(model: Path, plan: Path, tmp_path: Path) -> None:
    words = ["convert", model, "--plan", plan, "-o", tmp_path / "out"]
    for mesh in (["--tp", 2, "--mesh", "tp=2"], []):
        said = refused(*words, *mesh)
        assert said.endswith("Error: Invalid value for --tp / --mesh: give exactly one of --tp and --mesh\n")


def test_no_place_to_write(model: Path, plan: Path) -> None:
    said = refused("convert", model, "--plan", plan, "--tp", 2)
    assert said.endswith("Error: Invalid value for -o: give the directory to write with -o, or --dry-run\n")


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (["--mesh", "dp=2,tp"], "--mesh dp=2,tp is not a mesh\n  help: write axis=degree, such as --mesh tp=4\n"),
        (["--mesh", "tp"], "--mesh tp is not a mesh\n  help: write axis=degree, such as --mesh tp=4\n"),
        (["--mesh", "tp=two"], "--mesh tp=two is not a mesh\n  help: write axis=degree, such as --mesh tp=4\n"),
        (["--mesh", ""], "--mesh  is not a mesh\n  help: write axis=degree, such as --mesh tp=4\n"),
        (
            ["--mesh", "tp=2,tp=2"],
            "a mesh needs one or more differently named axes, got ['tp', 'tp']\n"
            '  help: write it as {"tp": 4} or as the integer 4\n',
        ),
        (["--tp", "0"], "mesh axis 'tp' has degree 0\n  help: a degree is an integer of at least 1\n"),
        (["--tp", "-2"], "mesh axis 'tp' has degree -2\n  help: a degree is an integer of at least 1\n"),
    ],
)
def test_a_mesh_that_is_refused(mesh: list[str], expected: str, model: Path, plan: Path, tmp_path: Path) -> None:
    assert refused("convert", model, "--plan", plan, "-o", tmp_path / "out", *mesh) == expected


def test_a_directory_that_exists_is_refused_before_the_model_is_read(plan: Path, out: Path, tmp_path: Path) -> None:
    no_model = tmp_path / "no.pt2"  # reading it would be another error
    words = ("convert", no_model, "--tp", 2, "--plan", plan, "-o")
    assert refused(*words, out) == (
        f"{out} exists already\n  help: choose another directory, or pass force=True (--force)\n"
    )
    (tmp_path / "mine").mkdir()
    assert refused(*words, tmp_path / "mine", "--force") == (
        f"{tmp_path}/mine exists and is not an artifact (it has no manifest.json)\n  help: choose another directory\n"
    )


def test_a_hash_that_does_not_match(model: Path, out: Path) -> None:
    path = out / "rank_1.pt2"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said = refused("verify", out, "--against", model)
    assert said.startswith(f"{path} has SHA-256 ")
    assert said.endswith("..\n  help: copy the artifact again, or convert the model again\n")


def test_a_file_that_is_missing(model: Path, out: Path) -> None:
    (out / "rank_1.pt2").unlink()
    assert refused("verify", out, "--against", model) == (
        f"{out}/rank_1.pt2 is missing\n  help: copy the artifact again, or convert the model again\n"
    )


def changed_manifest(out: Path, **fields: object) -> None:
    path = out / "manifest.json"
    data = json.loads(path.read_text())
    data.update(fields)
    path.write_text(json.dumps(data))


def test_a_manifest_of_another_format(model: Path, out: Path) -> None:
    changed_manifest(out, format=2, news=[])
    expected = f"{out}/manifest.json has format 2, this tpcompiler reads format 1\n  help: convert the model again\n"
    assert refused("inspect", out) == expected
    assert refused("verify", out, "--against", model) == expected
    assert refused("run", out, "--inputs", "x.safetensors") == expected


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_a_directory_that_is_no_artifact(command: str, model: Path, tmp_path: Path) -> None:
    more = {"verify": ["--against", model], "run": ["--inputs", "x.safetensors"]}.get(command, [])
    assert refused(command, tmp_path, *more) == (
        f"{tmp_path} is not an artifact: it has no manifest.json\n  help: make one with tpcompiler convert\n"
    )


def test_an_artifact_of_another_model(out: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    torch.export.save(export_conv(), other)
    assert refused("verify", out, "--against", other) == (
        f"{out} was made from another program: the two differ in 'layers.0.up.weight'\n"
        "  help: give the program that it was converted from\n"
    )


def test_inputs_that_do_not_fit(model: Path, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "inputs.safetensors"
    words = ("verify", out, "--against", model, "--inputs", path)
    assert refused(*words) == (f"inputs file {path} does not exist\n  help: give the path of a safetensors file\n")
    good = mlp_inputs()
    for tensors, expected in (
        ({"x": good["x"]}, "input 'shift' is missing\n  help: its inputs are x, shift\n"),
        ({**good, "y": torch.ones(1)}, "the program has no input 'y'\n  help: its inputs are x, shift\n"),
        (
            {**good, "x": torch.ones(2, 8)},
            "input 'x' is torch.float32 [2, 8], the program takes torch.float32 [3, 8]\n"
            "  help: give a tensor of that dtype and shape\n",
        ),
    ):
        save_file(tensors, path)
        assert refused(*words) == f"{path}: {expected}"
    torch.save(good, path)
    assert refused(*words).startswith(f"{path} is not a safetensors file: ")


def test_a_model_without_example_inputs(program: ExportedProgram, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "bare.pt2"
    examples, program.example_inputs = program.example_inputs, None
    try:
        torch.export.save(program, path)
    finally:
        program.example_inputs = examples
    assert refused("verify", out, "--against", path) == (
        f"{path} was saved without example inputs\n  help: give inputs with --inputs FILE\n"
    )


def test_run_with_another_world_size(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LaunchError) as raised:
        load(pristine)
    assert str(raised.value) == (
        "the artifact is for 2 ranks, this world has 3\n"
        "  help: start it with torchrun --nproc-per-node 2, or convert for 3"
    )
    assert refused("run", pristine, "--inputs", "x.safetensors") == f"{raised.value}\n"


def test_run_without_torchrun(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert refused("run", pristine, "--inputs", "x.safetensors") == (
        "this process is part of no group: RANK and WORLD_SIZE are not set\n"
        "  help: start it with torchrun --nproc-per-node 2\n"
    )


def test_run_refuses_a_sharded_boundary(out: Path) -> None:
    data = json.loads((out / "manifest.json").read_text())
    data["inputs"][0]["sharding"] = "S(0)"
    changed_manifest(out, inputs=data["inputs"])
    assert refused("run", out, "--inputs", "x.safetensors") == (
        "input 'x' is sharded (S(0)); tpcompiler run takes and writes whole tensors only\n"
        "  help: convert with that input at R, or call tpcompiler.load in a program of your own\n"
    )


def full_at_once(program: ExportedProgram, path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_half_way(program: ExportedProgram, path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 and then the disk is full")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nframe #0: more")


def full_at_the_second(program: ExportedProgram, path: Path) -> None:
    if path.name == "rank_1.pt2":
        full_at_once(program, path)
    path.write_bytes(b"whole")


@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (full_at_once, "[Errno 28] No space left on device"),
        (full_half_way, "[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        (full_at_the_second, "[Errno 28] No space left on device"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_disk_that_is_full(
    save: Callable[[ExportedProgram, Path], None],
    reason: str,
    force: bool,
    model: Path,
    plan: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = out if force else out.with_name("new")
    before = {path: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(torch.export, "save", save)
    said = refused("convert", model, "--tp", 2, "--plan", plan, "-o", target, *(["--force"] if force else []))
    assert said == f"cannot write {target}: {reason}\n  help: check the free space and the permissions\n"
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]
