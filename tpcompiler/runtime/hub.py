"""Refuse paths that do not exist, and recognise the id or the directory of a Hugging Face model in place of another."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tpcompiler.errors import ArtifactError, option

PART = r"[A-Za-z0-9][\w.-]*"
OWNED = re.compile(rf"({PART}/{PART}?)(/config\.json)?", re.ASCII)
BARE = re.compile(PART, re.ASCII)  # an id without an owner, such as gpt2
DOWNLOAD = "give the directory with the model's *.safetensors files"
FACTORY = "write module:factory, of a function that returns (model, args), (model, args, kwargs) or these and shapes"
WRITE_MODEL = "export the model and write it with torch.export.save(exported_program, path)"
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


def refuse_missing_model(path: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for the path of a .pt2 file that does not exist."""
    otherwise = f"give the path of a .pt2 file; to make one, {WRITE_MODEL}"
    _refuse_missing(path, download_help(path, "then tpcompiler export {} -o model.pt2") or otherwise)


def refuse_missing_artifact(path: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for a directory of an artifact that does not exist."""
    _refuse_missing(path, "make one with tpcompiler convert")


def refuse_missing_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for a directory of weights that does not exist."""
    _refuse_missing(path, download_help(path, "give {}") or DOWNLOAD)


def refuse_missing_config(path: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for a directory of a Hugging Face config that does not exist."""
    _refuse_missing(path, download_help(path, "give {}", bare=True) or f"give a Hugging Face directory, or {FACTORY}")


def _refuse_missing(path: str | os.PathLike[str], help: str) -> None:
    try:
        os.lstat(path)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist", help=help) from error
    except (OSError, ValueError):  # a closed folder, a null character: who reads it says what is wrong
        pass


def refuse_hub_directory(directory: str | os.PathLike[str]) -> None:
    """Raise ArtifactError for a directory with the config of a model of the hub."""
    config = Path(directory) / "config.json"
    if os.path.isfile(config):
        raise ArtifactError(
            f"{directory} is a Hugging Face directory: a config, and maybe weights, and no program",
            help=f"tpcompiler export {directory} -o model.pt2 makes one; {config} is a plan for "
            + option("--plan", "plan="),
        )
