"""What a leaf belongs to, by its FQN: parametrizations, subclasses such as torchao's and adapters split weights."""

from __future__ import annotations

import re
from functools import cache


@cache
def layer_of(fqn: str) -> str:
    """The layer of a leaf, also of a part of a parameter, or of one that an adapter wraps.

    "up.parametrizations.weight.original0" and "up.base_layer.weight" belong to "up".
    """
    return re.sub(r"(^|\.)(parametrizations\.[^.]+|base_layer)$", "", fqn.rpartition(".")[0])


@cache
def weight_of(fqn: str) -> str:
    """The parameter that a leaf is, or is a part of: "up.parametrizations.weight.original0" is of "up.weight"."""
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\.original\d*$", r"\1\2", fqn)
