"""Recognise the id or the directory of a Hugging Face model given instead of another path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tpcompiler.errors import ArtifactError, option

PART = r"[A-Za-z0-9][\w.-]*"
OWNED = re.compile(rf"({PART}/{PART}?)(/config\.json)?", re.ASCII)
BARE = re.compile(PART, re.ASCII)  # an id without an owner, such as gpt2
FILE = re.compile(r"\.(pt2?|pth|bin|ya?ml|json|safetensors|py)", re.ASCII | re.IGNORECASE)


def download_help(path: str | os.PathLike[str], then: str, *, bare: bool = False) -> str:
    """Return how to download the model that `path` names; empty if it cannot be an id.

    Args:
        path: a path that does not exist.
        then: the command to run afterwards; `{}` in it becomes the directory.
        bare: True if a name without an owner may be an id.
    """
    text = os.fspath(path)
    match = OWNED.fullmatch(text) or (BARE.fullmatch(text) if bare else None)
    if match is None or FILE.search(match[1] if match.re is OWNED else text) or os.path.exists(os.path.dirname(text)):
        return ""
    name = match[1] if match.re is OWNED else text
    directory = name.rpartition("/")[2]
    how = f"hf download {name} --local-dir {directory}"
    return f"download a model of the Hugging Face hub first: {how}; {then.format(directory)}"


def refuse_hub_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for a directory with the config of a model of the hub."""
    config = Path(directory) / "config.json"
    if os.path.isfile(config):
        raise ArtifactError(
            f"{directory} is a Hugging Face directory: a config, and maybe weights, and no program",
            help=f"tpcompiler export {directory} -o model.pt2 makes one; {config} is a plan for "
            + option("--plan", "plan="),
        )
