"""Read a .pt2 without running code from it.

`torch.export.load` unpickles, evaluates and imports parts of a file. Here every entry is read once, with `zipfile`:
tensors are made from their bytes, all texts are checked (`pt2_check.py`), and torch's deserializer gets nothing else.
docs/security.md lists every way in, and the defence against each.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.pt2_archive.constants import ARCHIVE_VERSION_VALUE

from tpcompiler._torch import build_program, build_tensor, quick_files
from tpcompiler.errors import ArtifactError, explaining, option
from tpcompiler.runtime.opened import Opened
from tpcompiler.runtime.pt2_check import Unsafe, check_program, forget_origins

MODEL = "models/model.json"
EXAMPLES = "data/sample_inputs/model.pt"
CONFIGS = {"weight": "data/weights/model_weights_config.json", "tensor": "data/constants/model_constants_config.json"}
TENSORS = re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+")
UNREAD = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)|\.format_version"
    r"|\.storage_alignment|extra/.*"
)
HEADER = 30  # bytes of an entry's header before its name
CHUNK = 1 << 24
# Globals with which torch's safe unpickler builds objects far larger than the pickle: sized by a number in it, or lists
# that share their parts.
WITHOUT_END = re.compile(
    r"(builtins|__builtin__) bytearray|collections Counter|_codecs encode|torch (\w*Tensor|UntypedStorage)"
)


class Pt2:
    """The entries of a .pt2 that is open.

    Attributes:
        trust: the file is read as torch reads it, without a check.
    """

    def __init__(self, file: Opened, trust: bool = False) -> None:
        self.file, self.trust = file, trust
        self._archive = zipfile.ZipFile(file)
        self._entries = {info.filename.partition("/")[2]: info for info in self._archive.infolist()}
        self._read: dict[str, bytes] = {}
        self._parsed: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        return self.file.path

    def names(self) -> list[str]:
        return list(self._entries)

    def text(self, name: str) -> bytes:
        """Return an entry's bytes, empty if it does not exist; they are read from the file once.

        Raises:
            OSError, zipfile.BadZipFile: the file or the entry is damaged.
        """
        if name not in self._read:
            self._read[name] = self._archive.read(self._entries[name]) if name in self._entries else b""
        return self._read[name]

    def check(self, known: Collection[str] = ()) -> None:
        """Check everything that `program` gives to torch, except the entries in `known`, which were checked already.

        Raises:
            ArtifactError: an entry needs a pickle, could run code, or does not belong in an exported program.
            OSError, ValueError, RuntimeError: the file, or an entry, is damaged.
        """
        entry = ""
        try:
            self._check_entries()
            for entry in self._entries:
                if entry in known:
                    continue
                if entry in CONFIGS.values():
                    _check_config(self.json(entry))
                elif entry == EXAMPLES:
                    _check_pickle(self.text(entry))
                elif re.fullmatch(r"models/[^/]+\.json", entry):
                    check_program(self.json(entry))
                elif not (TENSORS.fullmatch(entry) or UNREAD.fullmatch(entry)):
                    raise Unsafe("does not belong in a program without pickles")
        except Unsafe as error:
            trust = f"if you trust who made the file, pass {option('--trust', 'trust=True')}"
            where = f"its entry {entry}" if entry else "it"
            raise ArtifactError(
                f"{self.path} is not read: {where} {error}", help=f"{error.cure}; or, {trust}" if error.cure else trust
            ) from error

    def program(self) -> ExportedProgram:
        """Build the program.

        Raises:
            Exception: of any type, from the layer of torch that fails.
        """
        with quick_files():
            if self.trust:
                self.file.seek(0)
                return torch.export.load(cast(Any, self.file))
            if (version := self.text("archive_version").decode().strip()) != ARCHIVE_VERSION_VALUE:
                raise ValueError(f"its format is version {version}, and this torch reads {ARCHIVE_VERSION_VALUE}")
            data = self.json(MODEL)
            forget_origins(data)
            return build_program(data, self.tensors("weight"), self.tensors("tensor"), self.examples())

    def examples(self) -> Any:
        """Return the example inputs, or None.

        Raises:
            pickle.UnpicklingError, RuntimeError: torch's safe unpickler does not read them.
        """
        content = self.text(EXAMPLES)
        return torch.load(io.BytesIO(content), weights_only=True) if content else None

    def state(self) -> dict[str, Tensor]:
        """Map the parameters, buffers and constants, by name, without the program: they take no memory until used.

        Raises:
            ArtifactError: an entry is missing or damaged.
        """
        again = "copy the artifact again, or convert the model again"
        # of any type, from the JSON or the layer of torch that fails
        with explaining(f"the tensors of {self.path} cannot be read", again, Exception):
            state, constants = (self.tensors(kind, mapped=True) for kind in CONFIGS)
            if both := sorted(state.keys() & constants.keys()):
                raise ValueError(f"{both[0]!r} is in the state and in the constants")
        return {**constants, **state}

    def tensors(self, kind: str, *, mapped: bool = False) -> dict[str, Tensor]:
        """Return the parameters and buffers (`weight`) or the constants (`tensor`), by name.

        Tensors that share memory in the file share it here. If `mapped`, they stay in the file until they are used.

        Raises:
            OSError, ValueError, LookupError, RuntimeError: an entry is missing or damaged.
        """
        made, storages = dict[str, Tensor](), dict[str, torch.UntypedStorage]()
        folder = CONFIGS[kind].rpartition("/")[0]
        for name, row in self.json(CONFIGS[kind])["config"].items():
            entry = f"{folder}/{row['path_name']}"
            if entry not in self._entries:
                raise ValueError(f"it has no entry {entry}")
            if entry not in storages:
                storages[entry] = self._mapped(entry) if mapped else self._storage(entry)
            value = build_tensor(name, row["tensor_meta"], storages[entry])
            is_parameter = kind == "weight" and row["is_param"]
            made[name] = nn.Parameter(value, value.requires_grad) if is_parameter else value
        return made

    def json(self, name: str) -> Any:
        """Return an entry's JSON, parsed once."""
        if name not in self._parsed:
            self._parsed[name] = json.loads(self.text(name))
        return self._parsed[name]

    def _check_entries(self) -> None:
        """Check that each entry is stored as it is and once, so that what is read takes no more than the file."""
        infos = self._archive.infolist()
        names: set[str] = set()
        for info in infos:
            name = info.filename
            if name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable():
                raise Unsafe(f"has an entry {name!r}, which leads out of it")
            if name.partition("/")[2] in names:
                raise Unsafe(f"has two entries {name!r}")
            names.add(name.partition("/")[2])
            if info.flag_bits & 1:
                raise Unsafe(f"has an entry {name!r}, which is encrypted")
            if info.compress_type != zipfile.ZIP_STORED:
                raise Unsafe(f"has an entry {name!r}, which is compressed", "write it with torch.export.save")
        if sum(info.file_size for info in infos) > self.file.size:
            raise Unsafe("has entries that overlap")

    def _storage(self, entry: str) -> torch.UntypedStorage:
        """Read a tensor's bytes, whose CRC `zipfile` compares."""
        info = self._entries[entry]
        content = torch.empty(info.file_size, dtype=torch.uint8)
        into, at = memoryview(cast(Any, content.numpy())), 0
        with self._archive.open(info) as file:
            while piece := file.read(CHUNK):
                into[at : at + len(piece)] = piece
                at += len(piece)
        return content.untyped_storage()

    def _mapped(self, entry: str) -> torch.UntypedStorage:
        info = self._entries[entry]
        self.file.seek(info.header_offset)
        header = (self.file.read(HEADER) or b"").ljust(HEADER, b"\0")
        start = info.header_offset + HEADER + sum(struct.unpack("<HH", header[-4:]))  # of the name and the extra field
        part: Any = self._whole[start : start + info.file_size]
        return cast(torch.UntypedStorage, part)

    @cached_property
    def _whole(self) -> torch.UntypedStorage:
        return cast(torch.UntypedStorage, torch.UntypedStorage.from_file(str(self.path), False, self.file.size))


def why_not_read(path: Path) -> str | None:
    """Return the reason why a file is not read without trust; None if it is read."""
    try:
        with Opened(path) as file:
            Pt2(file).check()
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


def _check_config(data: Any) -> None:
    for name, row in data["config"].items():
        if row["use_pickle"] is not False:
            raise Unsafe(f"has {name!r} as a pickle")
    check_program(data)


def _check_pickle(content: bytes) -> None:
    """Check that torch's safe unpickler reads the example inputs, as objects no larger than the file."""
    if not content:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError
            (pickle,) = (name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
            names = {str(value) for op, value, _ in pickletools.genops(archive.read(pickle)) if op.name == "GLOBAL"}
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unsafe("needs a pickle in a form that torch no longer writes") from error
    if unsafe_names := sorted(filter(WITHOUT_END.fullmatch, names)):
        raise Unsafe(f"needs a pickle that may create an object of any size ({'.'.join(unsafe_names[0].split())})")
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        if "torch.cuda.is_available() is False" in str(error):
            raise  # a damaged or foreign device, not a forbidden pickle
        called = re.search(r"GLOBAL (\S+)", str(error))
        raise Unsafe(f"needs a pickle that may run code{f' ({called[1]})' if called else ''}") from error
