"""What a leaf belongs to, by its FQN: parametrizations, subclasses such as torchao's and adapters split weights."""

from __future__ import annotations

import re
from collections.abc import Collection
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


def leaf_of_module(name: str, leaves: Collection[str]) -> str | None:
    """Return the weight of the module of this name, or its only leaf."""
    own = [leaf for leaf in leaves if layer_of(leaf) == name]
    weights = [leaf for leaf in own if weight_of(leaf) == f"{name}.weight" or leaf.endswith(".weight")]
    found = weights or own
    return found[0] if len(found) == 1 else None


def fold_layers(name: str) -> str:
    """Write `*` for the numbers in a name: `layers.*.up` for `layers.0.up`, `key_cache_*` for `key_cache_3`."""
    return re.sub(r"(?<=[._])\d+(?=\.|$)", "*", name)
