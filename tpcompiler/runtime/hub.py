"""Recognise the id of a model on the Hugging Face hub where a path belongs."""

from __future__ import annotations

import os
import re

PART = r"[A-Za-z0-9][\w.-]*"
OWNED = re.compile(rf"({PART}/{PART}?)(/config\.json)?", re.ASCII)
BARE = re.compile(PART, re.ASCII)  # such as gpt2
FILE = re.compile(r"\.(pt2?|pth|bin|ya?ml|json|safetensors|py)", re.ASCII | re.IGNORECASE)


def download_help(path: str | os.PathLike[str], then: str, *, bare: bool = False) -> str:
    """Return how to download the model that a path names in place of a directory; nothing if it cannot be an id.

    Args:
        path: it does not exist.
        then: what to do with the directory, which is put in place of `{}`.
        bare: whether a name without an owner may be an id.
    """
    text = os.fspath(path)
    found = OWNED.fullmatch(text) or (BARE.fullmatch(text) if bare else None)
    if found is None or FILE.search(found[1] if found.re is OWNED else text) or os.path.exists(os.path.dirname(text)):
        return ""
    name = found[1] if found.re is OWNED else text
    directory = name.rpartition("/")[2]
    how = f"hf download {name} --local-dir {directory}"
    return f"download a model of the Hugging Face hub first: {how}; {then.format(directory)}"
