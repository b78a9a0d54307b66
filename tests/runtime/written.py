"""Artifacts of which a test writes the ranks' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tpcompiler.runtime import artifact
from tpcompiler.runtime.artifact import MODEL, SINGLE, Manifest, rank_file, sha256, write_record
from tpcompiler.runtime.target import MANIFEST

Write = Callable[[int, Path], str | None]  # writes a rank's file; may return its SHA-256


def write_artifact(
    directory: str | os.PathLike[str], manifest: Manifest, write_rank: Write, *, force: bool = False
) -> None:
    """Write an artifact of one program."""
    artifact.write_artifact(directory, {SINGLE: partial(_write, manifest, write_rank)}, force=force)


def write_set(directory: Path, programs: Mapping[str, tuple[Manifest, Write]], *, force: bool = False) -> None:
    """Write an artifact of several programs."""
    artifact.write_artifact(directory, {name: partial(_write, *each) for name, each in programs.items()}, force=force)


def _write(manifest: Manifest, write_rank: Write, directory: Path) -> None:
    """Write a program's files; all but those of ranks are like that of rank 0."""
    ranks = [*range(manifest.world_size)]
    work = {"program.pt2": 0, **{rank_file(rank): rank for rank in ranks}, MODEL: 0}
    files = {name: write_rank(rank, directory / name) or sha256(directory / name) for name, rank in work.items()}
    write_record(directory / MANIFEST, replace(manifest, programs={"program.pt2": ranks}, files=files))
