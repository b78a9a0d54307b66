"""Rows of the table: what is asked of an artifact's reasons, differences and costs."""

from __future__ import annotations

from tests.bad_input.row import Row

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
]
