"""Rows of the table: what is asked of an artifact's reasons, differences and costs."""

from __future__ import annotations

import pytest

from tests.bad_input.row import Row
from tests.runtime.models import export_conv
from tpcompiler import parallelize


def convert_other(patch: pytest.MonkeyPatch) -> None:
    parallelize(export_conv(), 2, {}).save("other")


REASONS = [
    Row(
        "a name that is not there",
        "tpcompiler explain out layers.0.down.wieght",
        "out has no node, parameter or collective 'layers.0.down.wieght'",
        "did you mean layers.0.down.weight, layers.1.down.weight, layers.0.up.weight? tpcompiler show out shows all",
    ),
    Row(
        "prices on an unknown machine",
        "tpcompiler explain out linear --machine h1000",
        "machine 'h1000' cannot be read: No such file or directory",
        "give h100, or the path of a YAML file",
    ),
    Row(
        "artifacts of two models",
        "tpcompiler diff out other",
        "two models: tensor 'layers.0.up.weight' is f32[16, 8] in out and none in other",
        "compare artifacts that are made of one model",
        spoil=convert_other,
    ),
]
