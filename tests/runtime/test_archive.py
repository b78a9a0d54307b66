"""Archives that are made to be read in two ways, to grow, or to fail: looked into before anything reads them."""

from __future__ import annotations

import io
import random
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
    OLD,
    Fire,
    entries_of,
    old_entries,
    refusal,
    save_victim,
    saved,
    write_entries,
    zipped,
)
from tpcompiler.runtime.model_file import read_model

TRUST = "if you trust who made the file, pass trust=True"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clean") / "model.pt2"
    save_victim(path)
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("model/" + MODEL, f"is not read: it has two entries 'model/{MODEL}'\n"),
        ("model/" + MODEL.upper(), f"is not read: it has two entries 'model/{MODEL.upper()}'\n"),
        ("/model/x", "is not read: it has an entry '/model/x', which leads out of it\n"),
        ("model/../../x", "is not read: it has an entry 'model/../../x', which leads out of it\n"),
        ("model/extra/\n", "is not read: it has an entry 'model/extra/\\n', which leads out of it\n"),
        ("model/data/x", "is not read: its entry data/x does not belong in a program without pickles\n"),
        ("other/extra/x", f"cannot be read by torch {torch.__version__}: "),
    ],
)
def test_entries_of_strange_names(more: str, said: str, clean: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    sound = [(f"model/{name}", content) for name, content in entries_of(clean).items()]
    zipped(path, [*sound, ("model/extra/x", b"text")])
    read_model(path)
    zipped(path, [*sound, (more, b"text")])
    assert said in refusal(path)


def test_a_bomb(clean: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    sound = [(f"model/{name}", content) for name, content in entries_of(clean).items()]
    zipped(path, sound, zipfile.ZIP_DEFLATED)
    read_model(path)
    zipped(path, [*sound, ("model/extra/zeros", bytes(1 << 24))], zipfile.ZIP_DEFLATED)
    assert "it has an entry 'model/extra/zeros', which claims to be 16,777,216 bytes and holds 16," in refusal(path)
    inner = io.BytesIO(dict(entries_of(clean))[EXAMPLES])
    with zipfile.ZipFile(inner, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(1 << 24))
    write_entries(path, {**entries_of(clean), EXAMPLES: inner.getvalue()})
    assert f"its entry {EXAMPLES} has an entry 'archive/data/9', which claims to be 16,777,216 bytes and" in refusal(
        path
    )


def test_values_that_take_much_memory(clean: Path, tmp_path: Path) -> None:
    """A few bytes of a compressed text can stand for millions of values."""
    entries, path = entries_of(clean), tmp_path / "model.pt2"
    drawn = random.Random(0)
    entries[MODEL] = entries[MODEL][:-1] + b', "x": [' + b"".join(drawn.choices((b"[],", b"{},"), k=1 << 20)) + b"[]]}"
    zipped(path, [(f"model/{name}", content) for name, content in entries.items()], zipfile.ZIP_DEFLATED)
    assert re.search(rf"its entry {MODEL} holds 2,\d\d\d,\d\d\d values in \d\d\d,\d\d\d bytes\n", refusal(path))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"flag_bits": 1}, "which is encrypted"),
        ({"compress_type": 99}, "which is compressed by method 99"),
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
        assert re.search(r"'(weight|bias)' is \[[48, ]+\], but it holds 0 bytes\n", refusal(path))


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


def test_two_archives_in_one_file(clean: Path, tmp_path: Path) -> None:
    """torch's reader and zipfile need not take the same one: neither is read."""
    path, old = tmp_path / "model.pt2", tmp_path / "old.pt2"
    zipped(old, list({**old_entries(), OLD["state_dict"]: saved({"w": Fire(tmp_path / "marker")})}.items()))
    for first, second in ((clean, old), (old, clean)):
        path.write_bytes(first.read_bytes() + second.read_bytes())
        refusal(path)
        assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("clean.pt2", "has other entries for torch than for zipfile"), ("old.pt2", "has both the old and the new format")],
)
def test_readers_that_differ(
    name: str, said: str, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is known of which torch's reader and zipfile see different entries: here torch's sees one more."""

    class Reader:
        def __init__(self, file: object) -> None:
            self.entries = entries_of(clean)

        def get_all_records(self) -> list[str]:
            return [*self.entries, "data/weights/more.pt"]

        def get_record(self, name: str) -> bytes:
            return self.entries[name]

    (tmp_path / "clean.pt2").write_bytes(clean.read_bytes())
    zipped(tmp_path / "old.pt2", list(old_entries().items()))
    read_model(tmp_path / name)
    monkeypatch.setattr("tpcompiler.runtime.archive.record_reader", Reader)
    assert refusal(tmp_path / name).startswith(f"{tmp_path / name} is not read: it {said}\n")
