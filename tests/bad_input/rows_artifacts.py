"""Rows of the table: artifacts that are damaged, mixed up or of another version."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.bad_input.row import Row, Spoil, exchanged, text

AGAIN = "copy the artifact again, or convert the model again"
CONVERT = "convert the model again"
MAKE = "make one with tpcompiler convert"
VERIFY = "tpcompiler verify out --against model.pt2"


def flip(patch: pytest.MonkeyPatch) -> None:
    found = bytearray(Path("out/rank_1.pt2").read_bytes())
    found[len(found) // 2] ^= 1
    Path("out/rank_1.pt2").write_bytes(found)


def pipe(patch: pytest.MonkeyPatch) -> None:
    Path("out/model.pt2").unlink()
    os.mkfifo("out/model.pt2")


def swap_names(patch: pytest.MonkeyPatch) -> None:
    for old, new in (("rank_0", "kept"), ("rank_1", "rank_0"), ("kept", "rank_1")):
        Path(f"out/{old}.pt2").rename(f"out/{new}.pt2")


def programs(*names: str) -> Spoil:
    return text("programs.json", json.dumps({"format": 2, "programs": names}))


ARTIFACTS = [
    Row(
        "a directory that does not exist",
        "tpcompiler check none",
        "none does not exist",
        MAKE,
    ),
    Row(
        "a directory of something else",
        "tpcompiler inspect .",
        ". is not an artifact: it has no manifest.json",
        MAKE,
    ),
    Row(
        "the same, to be verified",
        "tpcompiler verify . --against model.pt2",
        ". is not an artifact: it has no manifest.json",
        MAKE,
    ),
    Row(
        "the same, to be run",
        "tpcompiler run . --inputs in.safetensors",
        ". is not an artifact: it has no manifest.json",
        MAKE,
    ),
    Row(
        "a model where an artifact belongs",
        "tpcompiler inspect model.pt2 --rank 0",
        "model.pt2 is a file, not the directory of an artifact",
        MAKE,
    ),
    Row(
        "the model in it exchanged for a pipe",
        "tpcompiler check out",
        "out/model.pt2 cannot be read: it is a pipe or a device",
        AGAIN,
        spoil=pipe,
    ),
    Row(
        "a bit that is another",
        VERIFY,
        "out/rank_1.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        AGAIN,
        spoil=flip,
    ),
    Row(
        "half a copy: the file of a rank is missing",
        VERIFY,
        "out/rank_1.pt2 is missing",
        AGAIN,
        spoil=lambda patch: Path("out/rank_1.pt2").unlink(),
    ),
    Row(
        "half a copy: the file of a rank is cut off",
        "tpcompiler check out",
        "out/rank_1.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        AGAIN,
        spoil=lambda patch: Path("out/rank_1.pt2").write_bytes(Path("out/rank_1.pt2").read_bytes()[:5000]),
    ),
    Row(
        "half a copy: the manifest is missing",
        "tpcompiler check out",
        "out is not an artifact: it has no manifest.json",
        MAKE,
        spoil=lambda patch: Path("out/manifest.json").unlink(),
    ),
    Row(
        "a directory where the file of a rank belongs",
        "tpcompiler check out",
        "out/rank_1.pt2 cannot be read: Is a directory",
        AGAIN,
        spoil=lambda patch: (Path("out/rank_1.pt2").unlink(), Path("out/rank_1.pt2").mkdir()),
    ),
    Row(
        "a link to a file elsewhere",
        "tpcompiler check out",
        "out/rank_1.pt2 leads out of out",
        "copy the files themselves, not links",
        spoil=lambda patch: (
            Path("out/rank_1.pt2").rename("r.pt2"),
            Path("out/rank_1.pt2").symlink_to(Path("r.pt2").resolve()),
        ),
    ),
    Row(
        "the file of a rank too many",
        "tpcompiler check out",
        "out/rank_2.pt2 is of another artifact: the manifest names 2 files",
        "copy the artifact again, into an empty directory",
        spoil=lambda patch: shutil.copy("out/rank_1.pt2", "out/rank_2.pt2"),
    ),
    Row(
        "files of two ranks that changed places",
        "tpcompiler check out",
        "out/rank_0.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        AGAIN,
        spoil=swap_names,
    ),
    Row(
        "the same, with hashes that fit",
        "tpcompiler check out",
        "out/rank_0.pt2 was written as rank_1.pt2",
        AGAIN,
        spoil=exchanged("out/rank_0.pt2", "out/rank_1.pt2"),
    ),
    Row(
        "the manifest of another artifact",
        "tpcompiler check one",
        "one/program.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        AGAIN,
        spoil=lambda patch: shutil.copy("out/manifest.json", "one/manifest.json"),
    ),
    Row(
        "the file of another artifact",
        "tpcompiler check one",
        "one/rank_0.pt2 has SHA-256 <hash>.., the manifest says <hash>..",
        AGAIN,
        spoil=lambda patch: shutil.copy("out/rank_0.pt2", "one/rank_0.pt2"),
    ),
    Row(
        "a rank that it does not have",
        "tpcompiler inspect out --rank 2",
        "rank 2 is outside the artifact's world of 2",
        "use a rank from 0 to 1",
    ),
    Row(
        "a rank below zero",
        "tpcompiler inspect out --rank -1",
        "rank -1 is outside the artifact's world of 2",
        "use a rank from 0 to 1",
    ),
    Row(
        "several programs where one is asked for",
        "tpcompiler inspect .",
        ". holds the programs out, one",
        "give one of them: out",
        spoil=programs("out", "one"),
    ),
    Row(
        "a list of programs with a path in it",
        "tpcompiler check .",
        "programs.json is damaged at $.programs[0]: expected str matching regex '^[^\\W\\d]\\w*$'",
        "convert the models again",
        spoil=programs("../out"),
    ),
    Row(
        "a list of programs that is cut off",
        "tpcompiler check .",
        "programs.json cannot be read: Expecting value: line 1 column 12 (char 11)",
        "convert the models again",
        spoil=text("programs.json", '{"format": '),
    ),
    Row(
        "a list of programs one of which is missing",
        "tpcompiler check .",
        "none does not exist",
        MAKE,
        spoil=programs("out", "none"),
    ),
    Row(
        "a model that is not there, to be checked against",
        "tpcompiler check out --against none.pt2",
        "none.pt2 does not exist",
        "give the path of a .pt2 file; to make one, export the model and write it with torch.export.save(exported_program, path)",
    ),
]
