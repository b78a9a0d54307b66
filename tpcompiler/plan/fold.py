"""Names that repeat, such as those of layers, under one pattern."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

DEEPEST = 8  # numbers in a name that are starred


def folded(signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Names that differ in numbers only, under one pattern with `*`: as far as all under it have one signature.

    `layers.0.up` and `layers.1.up` are `layers.*.up`; in `seq.0` and `seq.2` of two shapes the numbers stay.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in signatures:
        alike.setdefault(_starred(name, ()), []).append(name)  # names of as many parts, numbers in the same places
    place = {name: index for index, name in enumerate(signatures)}
    entries = [entry for names in alike.values() for entry in _split(names, signatures)]
    return sorted(entries, key=lambda entry: place[entry[1][0]])


def times(names: Sequence[str]) -> str:
    """`x 6`, of names under one pattern; nothing of one."""
    return f"x {len(names)}" if len(names) > 1 else ""


def _split(names: Sequence[str], signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Star as many numbers as leave one signature in each group; the outer ones first, as inner ones tell more apart.

    To star one more makes groups larger, so that each number needs to be tried once.
    """
    numbers = [i for i, part in enumerate(names[0].split(".")) if part.isdigit()]
    kept, groups = set(numbers), {_starred(name, numbers): [name] for name in names}
    for number in numbers[:DEEPEST]:
        fewer = _grouped(names, kept - {number})
        if all(len({signatures[name] for name in group}) == 1 for group in fewer.values()):
            kept, groups = kept - {number}, fewer
    return [(".".join(key) if len(group) > 1 else group[0], group) for key, group in groups.items()]


def _grouped(names: Sequence[str], kept: Iterable[int]) -> dict[tuple[str, ...], list[str]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(_starred(name, kept), []).append(name)
    return groups


def _starred(name: str, kept: Iterable[int]) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() and i not in kept else part for i, part in enumerate(name.split(".")))
