"""Inspect a .pt2 before torch reads it: `torch.export.load` unpickles, evaluates and imports parts of a file.

docs/security.md lists every way in which torch does so, and the defence against each.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.export import ExportedProgram

from tpcompiler._torch import record_reader
from tpcompiler.errors import ArtifactError, option
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.program_text import Unsafe, check_keys, check_program

OLD_FORMAT = "serialized_exported_program.json"  # the format of torch 2.7 and earlier, which torch still reads
HEADER = 30  # bytes of an entry's header before its name
LARGEST_RATIO = 100  # torch does not compress, text shrinks to a tenth, a zip bomb to a thousandth
# Brackets and commas of JSON per stored byte: Python makes an object of about 60 bytes for every value.
LARGEST_DENSITY, FEW = 4, 1 << 18
LARGEST_PACKED = 1 << 25  # bytes of a compressed text; a model of a hundred layers has 5 MB
# Globals with which torch's safe unpickler builds objects far larger than the pickle: sized by a number in it, or lists
# that share their parts.
WITHOUT_END = re.compile(
    r"(builtins|__builtin__) bytearray|collections Counter|_codecs encode|torch (\w*Tensor|UntypedStorage)"
)
TENSORS = re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+")

Entries = tuple[list[str], Callable[[str], bytes]]  # the entries' names, and a function that reads one


def inspect_archive(file: Opened) -> None:
    """Check that torch can read the file without running code from it, and pin the bytes that were checked.

    Raises:
        ArtifactError: an entry needs a pickle, could run code, or does not belong in an exported program.
        OSError, ValueError, RuntimeError: the file, or an entry, is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        loose = _tensor_bytes(file, archive)
    file.keep(loose)
    with zipfile.ZipFile(file) as archive:  # the pinned bytes, which may differ from those on disk a moment ago
        entry = ""
        try:
            _check_sizes(file, archive)
            if _tensor_bytes(file, archive) != loose:
                raise Unsafe("changes while it is read")
            old = OLD_FORMAT in archive.namelist()
            names, read = _old_entries(file, archive) if old else _entries(file, archive)
            stored = {
                info.filename if old else info.filename.partition("/")[2]: info.compress_size
                for info in archive.infolist()
            }
            for entry in names:
                check = next(
                    (check for kind, check in (OLD_KINDS if old else KINDS) if re.fullmatch(kind, entry)), None
                )
                if check is None:
                    raise Unsafe("does not belong in a program without pickles")
                if check is not _inert:
                    content = read(entry)
                    _check_density(content, stored.get(entry, len(content)))
                    check(content)
                    if check is _check_config:
                        _refuse_empty(content, entry.rpartition("/")[0], stored)
        except Unsafe as error:
            trust = f"if you trust who made the file, pass {option('--trust', 'trust=True')}"
            help = f"{error.cure}; or, {trust}" if error.cure else trust
            where = f"its entry {entry}" if entry else "it"
            raise ArtifactError(f"{file.path} is not read: {where} {error}", help=help) from error


def why_not_read(path: Path) -> str | None:
    """Return the reason why a file is not read without trust; None if it is read."""
    try:
        with Opened(path) as file:
            inspect_archive(file)
    except ArtifactError as error:
        return error.message.removeprefix(f"{path} is not read: ")
    return None


def has_pickled_examples(program: ExportedProgram) -> bool:
    """Return True if a file with the program's example inputs could only be read with trust."""
    content = io.BytesIO()
    try:
        torch.save(program.example_inputs, content)
        _check_pickle(content.getvalue())
    except Exception:  # they cannot be pickled, or not read back
        return True
    return False


def _check_sizes(file: IO[bytes] | io.RawIOBase, archive: zipfile.ZipFile) -> None:
    """Check that names are unambiguous, and that entries are not much larger than the bytes stored for them."""
    infos = archive.infolist()
    names: set[str] = set()
    for info in infos:
        name = info.filename
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable():
            raise Unsafe(f"has an entry {name!r}, which leads out of it")
        if name.lower() in names:  # torch's reader ignores case
            raise Unsafe(f"has two entries {name!r}")
        names.add(name.lower())
        if info.flag_bits & 1:
            raise Unsafe(f"has an entry {name!r}, which is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Unsafe(f"has an entry {name!r}, which is compressed by method {info.compress_type}")
        if info.file_size > LARGEST_RATIO * info.compress_size + 1024:
            sizes = f"{info.file_size:,} bytes and holds {info.compress_size:,}"
            raise Unsafe(f"has an entry {name!r}, which claims to be {sizes}")
    infos.sort(key=lambda info: info.header_offset)
    following = [info.header_offset for info in infos[1:]] + [archive.start_dir]
    for info, end in zip(infos, following, strict=True):
        if _content(file, info)[1] > end:
            raise Unsafe("has entries that overlap")


def _content(file: IO[bytes] | io.RawIOBase, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the first byte and the end of an entry's content, read from its local header.

    The local header may be longer than its copy in the directory.
    """
    file.seek(info.header_offset)
    header = (file.read(HEADER) or b"").ljust(HEADER, b"\0")
    start = info.header_offset + HEADER + sum(struct.unpack("<HH", header[-4:]))  # of the name and the extra field
    return start, start + info.compress_size


def _check_density(content: bytes, stored: int) -> None:
    if stored < len(content) > LARGEST_PACKED:
        raise Unsafe(f"is {len(content):,} bytes, compressed to {stored:,}")
    values = sum(map(content.count, (b"[", b"{", b",")))
    if values > FEW + LARGEST_DENSITY * stored:
        raise Unsafe(f"holds {values:,} values in {stored:,} bytes")


def _tensor_bytes(file: IO[bytes] | io.RawIOBase, archive: zipfile.ZipFile) -> list[tuple[int, int]]:
    """Return the byte ranges of tensors: they may be large, and torch makes nothing but numbers from them."""
    infos = [] if OLD_FORMAT in archive.namelist() else archive.infolist()
    return [_content(file, info) for info in infos if TENSORS.fullmatch(info.filename.partition("/")[2])]


def _entries(file: Opened, archive: zipfile.ZipFile) -> Entries:
    """Return the entries that torch's reader sees, without their common folder; `zipfile` must see the same."""
    reader = record_reader(file)
    inside: list[str] = reader.get_all_records()
    root = archive.namelist()[0].partition("/")[0]
    if sorted(archive.namelist()) != sorted(f"{root}/{name}" for name in inside):
        raise Unsafe("has other entries for torch than for zipfile")
    for info in archive.infolist():
        if reader.get_record_offset(info.filename.partition("/")[2]) != _content(file, info)[0]:
            raise Unsafe(f"has the entry {info.filename!r} at another place for torch than for zipfile")
    return inside, reader.get_record


def _old_entries(file: Opened, archive: zipfile.ZipFile) -> Entries:
    """Return the entries that `zipfile` sees, if torch's reader finds no folder: only then it reads the old format."""
    try:
        record_reader(file)
    except RuntimeError:
        return archive.namelist(), archive.read
    raise Unsafe("has both the old and the new format")


def _inert(content: bytes) -> None:
    """Accept content from which torch makes only tensors or text."""


def _check_json(content: bytes) -> None:
    check_program(json.loads(content))


def _check_config(content: bytes) -> None:
    config: dict[str, Any] = json.loads(content)["config"]
    for name, row in config.items():
        if row["use_pickle"] is not False:
            raise Unsafe(f"has {name!r} as a pickle")
        if not str(row["path_name"]).startswith(("weight_", "tensor_")):
            raise Unsafe(f"has {name!r} as an object of a class, which is a pickle")
    check_program(config)


def _refuse_empty(content: bytes, folder: str, stored: Mapping[str, int]) -> None:
    """Raise ValueError for a tensor with elements but no stored bytes: torch would read zeros."""
    for name, row in json.loads(content)["config"].items():
        sizes = [size["as_int"] for size in row["tensor_meta"]["sizes"]]
        if stored.get(f"{folder}/{row['path_name']}") == 0 and 0 not in sizes:
            raise ValueError(f"{name!r} is {sizes}, but it holds 0 bytes")


def _check_pickle(content: bytes) -> None:
    """Read the pickle with torch's safe unpickler, as torch does first; if that fails, torch unpickles anything."""
    if not content:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_sizes(io.BytesIO(content), archive)
            (pickle,) = (name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
            names = {str(value) for op, value, _ in pickletools.genops(archive.read(pickle)) if op.name == "GLOBAL"}
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unsafe("needs a pickle in a form that torch no longer writes") from error
    if unsafe_names := sorted(filter(WITHOUT_END.fullmatch, names)):
        raise Unsafe(f"needs a pickle that may create an object of any size ({'.'.join(unsafe_names[0].split())})")
    try:
        value = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        if "torch.cuda.is_available() is False" in str(error):
            raise  # a damaged or foreign device, not a forbidden pickle
        called = re.search(r"GLOBAL (\S+)", str(error))
        raise Unsafe(f"needs a pickle that may run code{f' ({called[1]})' if called else ''}") from error
    check_keys(value)


KINDS: tuple[tuple[str, Callable[[bytes], None]], ...] = (
    (r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|\.format_version", _inert),
    (r"\.storage_alignment|extra/.*", _inert),
    (TENSORS.pattern, _inert),
    (r"data/weights/[^/]+_weights_config\.json|data/constants/[^/]+_constants_config\.json", _check_config),
    (r"models/[^/]+\.json", _check_json),
    (r"data/(sample_inputs|weights|constants)/[^/]+\.pt", _check_pickle),  # torch 2.8 wrote the last two
)
OLD_KINDS: tuple[tuple[str, Callable[[bytes], None]], ...] = (
    (r"version|extra_files/.*", _inert),
    (re.escape(OLD_FORMAT), _check_json),
    (r"serialized_(state_dict|constants)\.(pt|json)|serialized_example_inputs\.pt", _check_pickle),
)
