"""What `read_model` says of files that are none: what each seems to be, and one action."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.runtime.models import Mlp, export_mlp
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.model_file import read_model

EXPORT = "export the model and write it with torch.export.save(exported_program, path)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "model.pt2"
    torch.export.save(export_mlp(), path)
    return path


def text_file(path: Path, _: Path) -> None:
    path.write_text("a model, honestly\n")


def truncated(path: Path, model: Path) -> None:
    content = model.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def state_dict(path: Path, _: Path) -> None:
    torch.save(Mlp().state_dict(), path)


def old_pickle(path: Path, _: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def safetensors(path: Path, _: Path) -> None:
    save_file({"w": torch.ones(3)}, path)


def nothing(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def pointer(path: Path, _: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def noise(path: Path, _: Path) -> None:
    path.write_bytes(bytes(range(255, 100, -1)))


def other_zip(path: Path, _: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("folder/readme.txt", "hello")


def torchscript(path: Path, _: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # torch.jit is deprecated: only its entries count
        for entry in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"model/{entry}", "")


def compiled(path: Path, _: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/aotinductor/model/model.so", "")


def rewritten(path: Path, model: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    with zipfile.ZipFile(model) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                target.writestr(name, content)


def other_name(path: Path, model: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("encoder", "decoder"):
            archive.writestr(f"model/models/{name}.json", "{}")


def other_version(path: Path, model: Path) -> None:
    rewritten(path, model, lambda name, content: b"7" if name.endswith("archive_version") else content)


def without_a_weight(path: Path, model: Path) -> None:
    rewritten(path, model, lambda name, content: None if name.endswith("weight_1") else content)


def unknown_op(path: Path, model: Path) -> None:
    rewritten(path, model, lambda name, content: content.replace(b"aten.relu.default", b"mylib.relu.default"))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (text_file, f"is a text file, not a .pt2\n  help: {EXPORT}"),
        (
            truncated,
            "is a damaged or truncated .pt2 (a zip archive without its end)\n"
            "  help: copy the file again, or export again",
        ),
        (
            state_dict,
            f"is a pickle of something else (torch.save of weights or a module), not a .pt2\n  help: {EXPORT}",
        ),
        (old_pickle, f"is a Python pickle, not a .pt2\n  help: {EXPORT}"),
        (safetensors, f"is a safetensors file: weights without a program, not a .pt2\n  help: {EXPORT}"),
        (nothing, f"is empty\n  help: it is no .pt2: {EXPORT}"),
        (pointer, "is a Git LFS pointer, not the file itself\n  help: get the file with git lfs pull"),
        (noise, f"is not a .pt2 (no zip archive)\n  help: {EXPORT}"),
        (other_zip, f"is a zip archive of something else, not a .pt2\n  help: {EXPORT}"),
        (torchscript, f"is a TorchScript archive (torch.jit.save), not a .pt2\n  help: {EXPORT}"),
        (compiled, f"is an AOTInductor package: compiled code, not a .pt2 with a graph\n  help: {EXPORT}"),
        (
            other_name,
            "holds exported programs named decoder, encoder, and none named 'model'\n"
            "  help: write a file with one program by torch.export.save(exported_program, path)",
        ),
        (
            other_version,
            f"cannot be read by torch {torch.__version__}: Saved archive version 7 does not match our current archive "
            "version 0.\n  help: copy the file again, or export the model again with this version of torch",
        ),
        (
            without_a_weight,
            f"cannot be read by torch {torch.__version__}: PytorchStreamReader failed locating file "
            "data/weights/weight_1: file not found.\n"
            "  help: copy the file again, or export the model again with this version of torch",
        ),
        (
            unknown_op,
            f"calls the op mylib.relu.default, which this torch {torch.__version__} does not have\n"
            "  help: pass --import MODULE with the module that registers the op, or export with this version of torch",
        ),
    ],
)
def test_no_model(make: Callable[[Path, Path], None], expected: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "given.pt2"
    make(path, model)
    with pytest.raises(ArtifactError) as raised:
        read_model(path)
    assert str(raised.value) == f"{path} {expected}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU can read this file")
def test_weights_on_a_device_that_is_not_here(tmp_path: Path) -> None:
    """As torch.export.save writes a model that was exported on a GPU."""
    torch.export.save(export_mlp(), tmp_path / "cpu.pt2")
    path = tmp_path / "cuda.pt2"
    with zipfile.ZipFile(tmp_path / "cpu.pt2") as here, zipfile.ZipFile(path, "w") as there:
        for name in here.namelist():
            content = here.read(name)
            if name.endswith(".json"):
                content = content.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 0')
            there.writestr(name, content)
    with pytest.raises(ArtifactError) as raised:
        read_model(path)
    assert str(raised.value) == (
        f"{path} holds tensors that are on CUDA, which torch does not find here\n"
        "  help: read it on a machine with a GPU, or export the model on the CPU and convert with --device cuda"
    )
