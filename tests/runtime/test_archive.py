"""Archives that are made to be read in two ways, to grow, or to fail: looked into before anything reads them."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import export

from tests.runtime.poisons import (
    EXAMPLES,
    MODEL,
    entries_of,
    refusal,
    save_victim,
    write_entries,
    zipped,
)
from tpcompiler.runtime.model_file import read_model


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clean") / "model.pt2"
    save_victim(path)
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("model/" + MODEL, f"is not read: it has two entries 'model/{MODEL}'\n"),
        ("model/" + MODEL.upper(), f"is not read: its entry {MODEL.upper()} does not belong in a program without"),
        ("other/" + MODEL, f"is not read: it has two entries 'other/{MODEL}'\n"),
        ("/model/x", "is not read: it has an entry '/model/x', which leads out of it\n"),
        ("model/../../x", "is not read: it has an entry 'model/../../x', which leads out of it\n"),
        ("model/extra/\n", "is not read: it has an entry 'model/extra/\\n', which leads out of it\n"),
        ("model/data/x", "is not read: its entry data/x does not belong in a program without pickles\n"),
    ],
)
def test_entries_of_strange_names(more: str, said: str, clean: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    sound = [(f"model/{name}", content) for name, content in entries_of(clean).items()]
    zipped(path, [*sound, ("model/extra/x", b"text")])
    read_model(path)
    zipped(path, [*sound, (more, b"text")])
    assert said in refusal(path)


def test_what_is_compressed_is_refused(clean: Path, tmp_path: Path) -> None:
    """A few bytes could stand for any number of them; torch compresses nothing."""
    path = tmp_path / "model.pt2"
    zipped(path, [(f"model/{name}", content) for name, content in entries_of(clean).items()], zipfile.ZIP_DEFLATED)
    assert re.search(r"it has an entry 'model/[^']+', which is compressed\n  help: write it with torch", refusal(path))
    inner = io.BytesIO(entries_of(clean)[EXAMPLES])
    with zipfile.ZipFile(inner, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(1 << 24))
    write_entries(path, {**entries_of(clean), EXAMPLES: inner.getvalue()})
    assert f"its entry {EXAMPLES} needs a pickle in a form that torch no longer writes\n" in refusal(path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"flag_bits": 1}, "which is encrypted"),
        ({"compress_type": 99}, "which is compressed"),
    ],
)
def test_entries_that_cannot_be_read(damage: dict[str, int], said: str, clean: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    write_entries(path, entries_of(clean))
    with zipfile.ZipFile(path, "a") as archive:
        for name, value in damage.items():
            setattr(archive.getinfo(f"model/{MODEL}"), name, value)
        archive._didModify = True  # type: ignore[attr-defined]
    assert f"it has an entry 'model/{MODEL}', {said}\n" in refusal(path)


def test_a_tensor_of_which_nothing_is_stored(tmp_path: Path) -> None:
    """torch would read zeros; a tensor without elements has no bytes."""
    path, layer = tmp_path / "model.pt2", nn.Linear(8, 4)
    layer.register_buffer("none", torch.empty(0, 4))
    torch.export.save(export(layer, (torch.ones(2, 8),)), path)
    read_model(path)
    entries = entries_of(path)
    for name in ("data/weights/weight_0", "data/weights/weight_1"):
        assert entries[name]
        write_entries(path, {**entries, name: b""})
        assert re.search(r"'(weight|bias)' is \[[48, ]+\] of torch.float32, but it holds 0 bytes\n", refusal(path))


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_tensor_of_which_a_part_of_an_element_is_stored(is_longer: bool, clean: Path, tmp_path: Path) -> None:
    """Bytes that were added or lost in the middle shift the others: the numbers are wrong, whose first ones fit."""
    path, name, entries = tmp_path / "model.pt2", "data/weights/weight_0", entries_of(clean)
    held = entries[name]
    write_entries(path, {**entries, name: held[:5] + b"\0" + held[5:] if is_longer else held[:-1]})
    assert f"of torch.float32, but it holds {len(held) + (1 if is_longer else -1)} bytes\n" in refusal(path)


def test_entries_that_lie_in_one_another(clean: Path, tmp_path: Path) -> None:
    """The directory of a zip may list the same bytes under many names."""
    path = tmp_path / "model.pt2"
    write_entries(path, {**entries_of(clean), "extra/x": bytes(1 << 20)})
    with zipfile.ZipFile(path, "a") as archive:
        (held,) = (info for info in archive.infolist() if info.filename.endswith("extra/x"))
        for number in range(3):
            again = zipfile.ZipInfo(f"model/extra/{number}")
            again.compress_size, again.file_size, again.CRC = held.compress_size, held.file_size, held.CRC
            again.header_offset = held.header_offset
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    assert "is not read: it has entries that overlap\n" in refusal(path)
