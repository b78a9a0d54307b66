"""Artifacts of which a test writes the ranks' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tpcompiler.runtime import artifact
from tpcompiler.runtime.artifact import SINGLE, Manifest, Write, Writer, rank_file, write_program


def write_artifact(
    directory: str | os.PathLike[str], manifest: Manifest, write_rank: Write, *, force: bool = False
) -> None:
    """Write an artifact of one program."""
    artifact.write_artifact(directory, {SINGLE: _program(manifest, write_rank)}, force=force)


def write_set(directory: Path, programs: Mapping[str, tuple[Manifest, Write]], *, force: bool = False) -> None:
    """Write an artifact of several programs."""
    artifact.write_artifact(directory, {name: _program(*each) for name, each in programs.items()}, force=force)


def _program(manifest: Manifest, write_rank: Write) -> Callable[[Path], None]:
    """All files but those of ranks are what a rank 0 would have."""
    manifest = replace(manifest, programs={"program.pt2": [*range(manifest.world_size)]})
    return partial(
        write_program,
        writer=Writer(manifest, write_rank, write_rank, rank_file, model=lambda path: write_rank(0, path)),
    )
