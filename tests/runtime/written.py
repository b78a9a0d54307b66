"""Artifacts of which a test writes the ranks' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tpcompiler.runtime import artifact
from tpcompiler.runtime.artifact import SINGLE, Manifest, Write, Writer, write_program


def write_artifact(
    directory: str | os.PathLike[str], manifest: Manifest, write_rank: Write, *, force: bool = False
) -> None:
    """Write an artifact of one program."""
    artifact.write_artifact(directory, {SINGLE: _program(manifest, write_rank)}, force=force)


def write_set(directory: Path, programs: Mapping[str, tuple[Manifest, Write]], *, force: bool = False) -> None:
    """Write an artifact of several programs."""
    artifact.write_artifact(directory, {name: _program(*each) for name, each in programs.items()}, force=force)


def _program(manifest: Manifest, write_rank: Write) -> Callable[[Path], None]:
    return partial(write_program, writer=Writer(manifest, write_rank))
