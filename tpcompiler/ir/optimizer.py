"""The state that an optimizer holds for the parameters that it steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from tpcompiler.errors import InputsError, option
from tpcompiler.runtime.records import Optimizer

# Bytes of an element: two moments in float32, a momentum in float32.
STATE_BYTES: Mapping[str, int] = {"adamw": 8, "sgd": 4, "none": 0}


def read_optimizer(name: str) -> Optimizer:
    """Return the optimizer of a name.

    Raises:
        InputsError: no optimizer has the name.
    """
    for known in get_args(Optimizer):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise InputsError(
        f"{option('--optimizer', 'optimizer')} is {name!r}", help=f"name one of {', '.join(get_args(Optimizer))}"
    )
