"""Rows of the table: programs of several models, and scenarios."""

from __future__ import annotations

import pytest

from tests.bad_input.row import Row, Spoil, loaded, text
from tests.runtime.models import PLAN
from tpcompiler import parallelize
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.model_file import read_model

CONVERT = "tpcompiler convert model.pt2 other.pt2 --tp 4 --plan auto --dry-run"
VERIFY = "tpcompiler verify out --scenario calls.yaml"


def calls(*lines: str) -> Spoil:
    return text("calls.yaml", "\n".join(["calls:", *lines]))


def two_models(patch: pytest.MonkeyPatch) -> None:
    models = {name: read_model(f"{name}.pt2") for name in ("model", "other")}
    parallelize(models, 2, PLAN).save("set", layout="shared")


def stages(patch: pytest.MonkeyPatch) -> None:
    parallelize(read_model("model.pt2"), {"pp": 2, "tp": 1}, {}).save("pipeline")


SETS = [
    Row(
        "a degree that does not divide the ranks",
        f"{CONVERT} --degree other=3",
        "the degree of 'other' is 3, which does not divide the 4 ranks",
        "give a divisor of 4",
    ),
    Row(
        "a degree for no program",
        f"{CONVERT} --degree draft=1",
        "--degree names 'draft', and the programs are model, other",
        "give a degree to one of several programs: draft=1",
    ),
    Row(
        "a degree without a number",
        f"{CONVERT} --degree other",
        "Invalid value for --degree: 'other' does not give programs ranks, as draft=1 does",
        "tpcompiler convert --help lists the options",
    ),
    Row(
        "one checkpoint for the weights of two models",
        "tpcompiler cut set --checkpoint checkpoint",
        "set holds programs of 2 models: model; other",
        "cut each from its own checkpoint: tpcompiler cut set/other --checkpoint DIR",
        spoil=two_models,
    ),
    Row(
        "stages behind another axis",
        "tpcompiler convert model.pt2 --mesh tp=2,pp=2 --plan auto --dry-run",
        "the axis 'pp' is not the first of the mesh tp=2,pp=2",
        "write pp=2,tp=4",
    ),
    Row(
        "more stages than places for a cut",
        "tpcompiler convert model.pt2 --mesh pp=64,tp=2 --plan auto --dry-run",
        "model cannot be cut into 64 stages: there are 3 places for a cut",
        "write pp=4",
    ),
    Row(
        "a stage without the others",
        lambda _: loaded("pipeline/stage_1"),
        "the programs of pipeline/stage_1 do not belong together: stages [1] of 'model' are not all of 2, in order",
        "convert them together",
        spoil=stages,
        code=ArtifactError,
    ),
    Row(
        "a package of stages",
        "tpcompiler package pipeline",
        "a package runs no stages",
        "run the programs uncompiled",
        spoil=stages,
    ),
    Row(
        "stages for another mesh",
        "tpcompiler reshard pipeline --tp 2 -o again",
        "stages are not cut again for another mesh",
        "convert the model for the mesh",
        spoil=stages,
    ),
    Row(
        "a scenario that does not exist",
        VERIFY,
        "scenario calls.yaml cannot be read: No such file or directory",
        "check the path",
    ),
    Row(
        "a scenario without calls",
        VERIFY,
        "scenario calls.yaml cannot be read: object missing required field calls",
        'write "calls: [{program: NAME, inputs: {NAME: SOURCE}}]"',
        spoil=text("calls.yaml", "{}"),
    ),
    Row(
        "a scenario calls no program of the artifact",
        VERIFY,
        "scenario calls.yaml, call 1: there is no program 'draft'",
        "call one of model",
        spoil=calls("- {program: draft, inputs: {x: 1}}"),
    ),
    Row(
        "an input from a call that was not made",
        VERIFY,
        "scenario calls.yaml, call 1 (model), x: there is no 'model.output'",
        "call the program before that makes it",
        spoil=calls("- {program: model, inputs: {x: model.output}}"),
    ),
    Row(
        "an input from a function",
        VERIFY,
        "scenario calls.yaml, call 1 (model), x: 'sum(model.output)' is no source",
        "write a tensor of the file, or vision.output, prefill.logits[:, -1:], argmax(decode.logits)",
        spoil=calls("- {program: model, inputs: {x: sum(model.output)}}"),
    ),
    Row(
        "a list that is no tensor",
        VERIFY,
        "scenario calls.yaml, call 1 (model), x: [[1], [2, 3]] is no tensor",
        "write a number, or lists of equal length",
        spoil=calls("- {program: model, inputs: {x: [[1], [2, 3]]}}"),
    ),
    Row(
        "a scenario and a model to compare with",
        f"{VERIFY} --against model.pt2",
        "Invalid value for --against: it is for one program: give OUT/NAME, without --scenario",
        "tpcompiler verify --help lists the options",
    ),
]
