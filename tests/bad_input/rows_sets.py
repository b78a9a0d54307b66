"""Rows of the table: programs of several models, and stages."""

from __future__ import annotations

import pytest

from tests.bad_input.row import Row, loaded
from tests.runtime.models import PLAN
from tpcompiler import parallelize
from tpcompiler.errors import ArtifactError
from tpcompiler.runtime.model_file import read_model

CONVERT = "tpcompiler convert model.pt2 other.pt2 --tp 4 --plan auto --dry-run"


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
        "several programs and a model to compare with",
        "tpcompiler verify set --against model.pt2",
        "Invalid value for --against: it is for one program: give OUT/NAME",
        "tpcompiler verify --help lists the options",
        spoil=two_models,
    ),
]
