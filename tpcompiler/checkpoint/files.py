"""Find the tensors of a checkpoint without reading them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpcompiler.errors import ArtifactError, explaining
from tpcompiler.runtime.hub import DOWNLOAD, refuse_missing_checkpoint
from tpcompiler.runtime.opened import Opened, read_object
from tpcompiler.runtime.weights import NAMES, TensorEntry

INDEX = "model.safetensors.index.json"
AGAIN = "copy the file again"
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Checkpoint:
    """A safetensors file, or a directory of them with or without an index, as Hugging Face writes it.

    Attributes:
        tensors: tensors by name.
        config: the content of config.json in the same folder; empty without one.

    Raises:
        ArtifactError: it does not exist, a file is missing or damaged, one name is in two files, or the index
            names the wrong file for a tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors: dict[str, TensorEntry] = {}
        self.places: dict[str, Path] = {}
        self.index: Mapping[str, str] = {}
        self.files = [self.path] if os.path.isfile(self.path) else self._listed()
        for file in self.files:
            for name, entry in _read_header(file).items():
                if name in self.tensors:
                    both = f"{self.places[name].name} and {file.name}"
                    raise ArtifactError(f"{self.path}: {name!r} is in both {both}", help="give one checkpoint")
                self.tensors[name], self.places[name] = entry, file
        for name, place in self.index.items():
            if name in self.tensors and (actual := self.places[name].name) != place:
                raise ArtifactError(f"{self.path}: {name!r} is in {actual}, {INDEX} says {place}", help=DOWNLOAD)
        config = (self.path if os.path.isdir(self.path) else self.path.parent) / "config.json"
        self.config: Mapping[str, Any] = _read_json(config) if config.is_file() else {}

    def read(self, name: str) -> torch.Tensor:
        """Map a tensor: unused parts are never read, and its pages are freed with it."""
        path = self.places[name]
        # it may have changed since its header was read
        with explaining(f"{path} cannot be read", AGAIN, SafetensorError, OSError), safe_open(path, "pt") as file:
            value: torch.Tensor = file.get_tensor(name)
        return value

    def fingerprint(self) -> dict[str, list[int]]:
        """Return the size and times of every file, to detect a change."""
        return {file.name: state_of(file) for file in self.files}

    def _listed(self) -> list[Path]:
        refuse_missing_checkpoint(self.path)
        if not os.path.isdir(self.path):
            raise ArtifactError(f"{self.path} is no directory", help=DOWNLOAD)
        if not (self.path / INDEX).is_file():
            if files := sorted(self.path.glob("*.safetensors")):
                return files
            others = sorted(p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            there = f"no safetensors files, but {others[0]}, a pickle" if others else "no safetensors files"
            raise ArtifactError(f"{self.path} has {there}", help=DOWNLOAD)
        index = _read_json(self.path / INDEX).get("weight_map")
        names = set(index.values()) if isinstance(index, dict) else set()
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ArtifactError(f"{self.path / INDEX} is damaged: it names no files next to it", help=DOWNLOAD)
        if missing := sorted(name for name in names if not (self.path / name).is_file()):
            raise ArtifactError(
                f"{self.path} lacks {len(missing)} of its {len(names)} files, such as {missing[0]}", help=DOWNLOAD
            )
        self.index = dict(index or {})
        return [self.path / name for name in sorted(names)]


def state_of(file: Path) -> list[int]:
    """Return a file's size, its modification time, and its inode's change time, which nobody can set."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_header(file: Path) -> dict[str, TensorEntry]:
    found = dict[str, TensorEntry]()
    with explaining(f"{file} cannot be read", AGAIN, SafetensorError, OSError, ValueError):
        Opened(file).close()  # reject pipes
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                part = opened.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ArtifactError(f"{file}: {name!r} is of {part.get_dtype()}, which torch lacks", help=AGAIN)
                found[name] = TensorEntry(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


def _read_json(path: Path) -> dict[str, Any]:
    with explaining(f"{path} cannot be read", DOWNLOAD, OSError, ValueError):
        return read_object(path)
