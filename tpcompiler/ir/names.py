"""FQNs of leaves and the layers they belong to; parametrizations, torchao and adapters split a weight into leaves."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache


@cache
def layer_of(fqn: str) -> str:
    """Return the layer of a leaf, also for a part of a parameter or for a layer wrapped by an adapter.

    "up.parametrizations.weight.original0" and "up.base_layer.weight" belong to "up".
    """
    return re.sub(r"(^|\.)(parametrizations\.[^.]+|base_layer)$", "", fqn.rpartition(".")[0])


@cache
def weight_of(fqn: str) -> str:
    """Return the parameter that a leaf is or is part of: "up.weight" for "up.parametrizations.weight.original0"."""
    return re.sub(r"(^|\.)parametrizations\.([^.]+)\.original\d*$", r"\1\2", fqn)


def modules_around(name: str) -> list[str]:
    """Return the modules that contain a module or a leaf: "a.b.c" is in "", "a" and "a.b"."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))]


def leaf_of_module(name: str, leaves: Collection[str]) -> str | None:
    """Return the weight of the module with this name, or its only leaf."""
    own = [leaf for leaf in leaves if layer_of(leaf) == name]
    weights = [leaf for leaf in own if weight_of(leaf) == f"{name}.weight" or leaf.endswith(".weight")]
    candidates = weights or own
    return candidates[0] if len(candidates) == 1 else None


def fold_layers(name: str) -> str:
    """Replace the numbers in a name by `*`: `layers.*.up` for `layers.0.up`, `key_cache_*` for `key_cache_3`."""
    return re.sub(r"(?<=[._])\d+(?=\.|$)", "*", name)


def split_layer(module: str) -> tuple[str, str]:
    """Return (`layers.`, `0`) for `layers.0` and the modules in it, by the first number of the path, or two "".

    The first number is that of the outermost repeated module: (`encoder.`, `2`) for `encoder.2.layers.0`.
    """
    found = re.match(r"(.*?)(?:^|(?<=\.))(\d+)(?=\.|$)", module)
    return (found[1], found[2]) if found else ("", "")


def layer_around(module: str) -> str:
    """Return `layers.0` for the modules in it, or "" for a module in no repeated one."""
    return "".join(split_layer(module))
