"""Rows of the table: checkpoints, and artifacts whose weights are still to be cut from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.row import Row, Spoil, text
from tpcompiler.checkpoint.files import INDEX
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.handover import read_handover

CUT = "tpcompiler cut uncut --checkpoint checkpoint"
SAME = "give the checkpoint of the same model"
FILES = "give the directory with the model's *.safetensors files"
FIRST, SECOND = (Path("checkpoint") / f"model-0000{at}-of-00002.safetensors" for at in (1, 2))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """The first file of the checkpoint, changed."""

    def write(patch: pytest.MonkeyPatch) -> None:
        held = load_file(FIRST)
        change(held)
        save_file(held, FIRST)

    return write


def all_wrong(held: dict[str, torch.Tensor]) -> None:
    held["layers.0.down.bias"] = held.pop("layers.0.up.bias").half()
    held["more"] = torch.ones(1)


def only_a_pickle(patch: pytest.MonkeyPatch) -> None:
    for path in Path("checkpoint").iterdir():
        path.unlink()
    Path("checkpoint/pytorch_model.bin").touch()


def misplaced(patch: pytest.MonkeyPatch) -> None:
    index = Path("checkpoint") / INDEX
    index.write_text(json.dumps({"weight_map": {"layers.0.down.bias": SECOND.name, "layers.0.up.bias": FIRST.name}}))


CHECKPOINTS = [
    Row(
        "a checkpoint lacks a weight",
        CUT,
        "checkpoint does not fit the program: it has no 'layers.0.up.bias' (it has 'layers.1.up.bias')",
        SAME,
        spoil=weights(lambda held: held.pop("layers.0.up.bias")),
    ),
    Row(
        "it has another shape",
        CUT,
        "checkpoint does not fit the program: 'layers.0.up.bias' is [3], the program takes [16]",
        SAME,
        spoil=weights(lambda held: held.update({"layers.0.up.bias": torch.ones(3)})),
    ),
    Row(
        "it has another dtype",
        CUT,
        "checkpoint does not fit the program: 'layers.0.up.bias' is of torch.float16, the program takes torch.float32",
        SAME,
        spoil=weights(lambda held: held.update({"layers.0.up.bias": torch.ones(16).half()})),
    ),
    Row(
        "it has one under another prefix than the rest",
        CUT,
        "checkpoint does not fit the program: it has no 'layers.0.up.bias' (it has 'model.layers.0.up.bias'); it has "
        "'model.layers.0.up.bias', which the program does not take",
        SAME,
        spoil=weights(lambda held: held.update({"model.layers.0.up.bias": held.pop("layers.0.up.bias")})),
    ),
    Row(
        "its index places a tensor where it is not",
        CUT,
        "checkpoint: 'layers.0.down.bias' is in model-00001-of-00002.safetensors, model.safetensors.index.json says "
        "model-00002-of-00002.safetensors",
        FILES,
        spoil=misplaced,
    ),
    Row(
        "it has more",
        CUT,
        "checkpoint does not fit the program: it has 'more', which the program does not take",
        "ignore the other tensors with --ignore-unused",
        spoil=weights(lambda held: held.update(more=torch.ones(1))),
    ),
    Row(
        "several of these at once",
        CUT,
        "checkpoint does not fit the program: it has no 'layers.0.up.bias' (it has 'layers.1.up.bias'); "
        "'layers.0.down.bias' is [16], the program takes [8]; it has 'more', which the program does not take",
        SAME,
        spoil=weights(all_wrong),
    ),
    Row(
        "a file of it is cut off",
        CUT,
        "checkpoint/model-00001-of-00002.safetensors cannot be read: Error while deserializing header: incomplete "
        "metadata, file not fully covered",
        "copy the file again",
        spoil=lambda patch: FIRST.write_bytes(FIRST.read_bytes()[:-1]),
    ),
    Row(
        "a file of it is missing",
        CUT,
        "checkpoint lacks 1 of its 2 files, such as model-00002-of-00002.safetensors",
        FILES,
        spoil=lambda patch: SECOND.unlink(),
    ),
    Row(
        "it is a pickle",
        CUT,
        "checkpoint has no safetensors files, but pytorch_model.bin, a pickle",
        FILES,
        spoil=only_a_pickle,
    ),
    Row("no checkpoint", "tpcompiler cut uncut --checkpoint none", "none does not exist", FILES),
    Row(
        "a rank outside the world",
        f"{CUT} --ranks 0,7",
        "rank 7 is outside the artifact's world of 2",
        "give ranks from 0 to 1",
    ),
    Row(
        "ranks that are no numbers",
        f"{CUT} --ranks first",
        "Invalid value for --ranks: give numbers, such as 0,1",
        "tpcompiler cut --help lists the options",
    ),
    Row(
        "a cut was interrupted, and the checkpoint has changed since",
        CUT,
        "uncut has an interrupted cut of other ranks, or the checkpoint was changed since",
        "start again with --force",
        spoil=text("uncut/.cut.json", json.dumps({"sources": {}})),
    ),
    Row(
        "an artifact that has its weights",
        "tpcompiler cut out --checkpoint checkpoint",
        "out has its weights",
        "cut an artifact of a model that was exported without weights",
    ),
    Row(
        "a checkpoint for a model that has its weights",
        "tpcompiler convert model.pt2 --tp 2 --plan plan.yaml --checkpoint checkpoint -o new",
        "checkpoint is not needed: the model has its weights",
        "leave --checkpoint out",
    ),
    Row(
        "a checkpoint of another model, as it is converted",
        "tpcompiler convert out/model.pt2 --tp 2 --plan plan.yaml --checkpoint checkpoint -o new",
        "checkpoint does not fit the program: it has no 'layers.0.up.bias' (it has 'layers.1.up.bias')",
        SAME,
        spoil=weights(lambda held: held.pop("layers.0.up.bias")),
    ),
    Row(
        "weights are not cut yet",
        "tpcompiler verify uncut --against model.pt2",
        "uncut has no weights of rank 0: its model was exported without",
        "cut them: tpcompiler cut uncut --checkpoint DIR",
    ),
    Row(
        "the same, for other ranks",
        "tpcompiler reshard uncut --tp 4 -o new",
        "uncut has no weights of rank 0: its model was exported without",
        "cut them: tpcompiler cut uncut --checkpoint DIR",
    ),
    Row(
        "other ranks of what is no artifact",
        "tpcompiler reshard checkpoint --tp 4 -o new",
        "checkpoint is not an artifact: it has no manifest.json",
        "make one with tpcompiler convert",
    ),
    Row(
        "a handover of a model without a cache",
        "tpcompiler handover out one",
        "out writes no buffer: there is nothing to hand over",
        "export the model with a static cache (tpcompiler export --prefill-decode)",
    ),
    Row(
        "a plan in place of a handover",
        lambda _: read_handover("plan.yaml"),
        "plan.yaml is not a handover",
        "make it with tpcompiler handover SOURCE TARGET -o handover.json",
        code=ArtifactError,
    ),
    Row(
        "other ranks into a directory that is there",
        "tpcompiler reshard out --tp 4 -o one",
        "one exists already",
        "choose another directory, or pass --force",
    ),
    Row(
        "an artifact has lost its model",
        "tpcompiler reshard --single-device out -o new.pt2",
        "out/model.pt2 is missing",
        "copy the artifact again, or convert the model again",
        spoil=lambda patch: Path("out/model.pt2").unlink(),
    ),
    Row(
        "a model that is put together into no directory",
        "tpcompiler reshard --single-device out -o none/new.pt2",
        "cannot write none/new.pt2: No such file or directory",
        "check the path and the free space",
    ),
]
