"""FQNs of leaves, the layers they belong to, and one pattern for repeated names.

Parametrizations, torchao and adapters split a weight into leaves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cache

DEEPEST = 8  # numbers in a name that become stars


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


def fold_names(signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Group names that differ only in numbers under one pattern with `*`, as far as all in a group have one signature.

    `layers.0.up` and `layers.1.up` become `layers.*.up`; if `seq.0` and `seq.2` have different shapes, their numbers
    stay.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in signatures:
        alike.setdefault(_with_stars_except(name, ()), []).append(name)  # equal if the numbers are in the same parts
    place = {name: index for index, name in enumerate(signatures)}
    entries = [entry for names in alike.values() for entry in _fold_alike(names, signatures)]
    return sorted(entries, key=lambda entry: place[entry[1][0]])


def times(names: Sequence[str]) -> str:
    """Return `x 6` for six names under one pattern, "" for one."""
    return f"x {len(names)}" if len(names) > 1 else ""


def _fold_alike(names: Sequence[str], signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Replace as many numbers by stars as leave one signature per group, outer numbers first.

    Inner numbers distinguish more names. Each further star makes groups larger, so each number needs only one try.
    """
    numbers = [i for i, part in enumerate(names[0].split(".")) if part.isdigit()]
    exact, groups = set(numbers), {_with_stars_except(name, numbers): [name] for name in names}
    for number in numbers[:DEEPEST]:
        fewer = _group(names, exact - {number})
        if all(len({signatures[name] for name in group}) == 1 for group in fewer.values()):
            exact, groups = exact - {number}, fewer
    return [(".".join(key) if len(group) > 1 else group[0], group) for key, group in groups.items()]


def _group(names: Sequence[str], kept: Iterable[int]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_with_stars_except(name, kept), []).append(name)
    return groups


def _with_stars_except(name: str, kept: Iterable[int]) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() and i not in kept else part for i, part in enumerate(name.split(".")))
