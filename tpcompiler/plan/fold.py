"""Group repeated names, such as those of layers, under one pattern."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

DEEPEST = 8  # numbers in a name that become stars


def folded(signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
    """Group names that differ only in numbers under one pattern with `*`, as far as all in a group have one signature.

    `layers.0.up` and `layers.1.up` become `layers.*.up`; if `seq.0` and `seq.2` have different shapes, their numbers
    stay.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in signatures:
        alike.setdefault(_with_stars_except(name, ()), []).append(name)  # equal if the numbers are in the same parts
    place = {name: index for index, name in enumerate(signatures)}
    entries = [entry for names in alike.values() for entry in _split(names, signatures)]
    return sorted(entries, key=lambda entry: place[entry[1][0]])


def times(names: Sequence[str]) -> str:
    """Return `x 6` for six names under one pattern, "" for one."""
    return f"x {len(names)}" if len(names) > 1 else ""


def _split(names: Sequence[str], signatures: Mapping[str, Hashable]) -> list[tuple[str, list[str]]]:
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
