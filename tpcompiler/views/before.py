"""Match items with those of another artifact of the same model, and list the collectives that are gone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpcompiler.views.items import Item


def with_before(items: Sequence[Item], first: Iterable[Item]) -> list[Item]:
    """Return the items with `before` set to the first program's item with the same value; call before joining.

    Collectives match if they are of one kind and change one value. A collective of the first program without a match
    becomes an item of kind "gone".
    """
    same: dict[tuple[str, str], deque[Item]] = defaultdict(deque)
    for item in items:
        same[_key(item)].append(item)
    before: dict[str, Item] = {}
    gone: dict[str, list[Item]] = defaultdict(list)  # after the item that they follow, "" for the start
    names: dict[str, str] = {}  # name in the first program -> name in this one
    last = ""
    for old in first:
        if now := same[_key(old)]:
            last = names[old.name] = now.popleft().name
            before[last] = old
        elif old.kind == "collective":
            names[old.name] = f"gone {old.name}"  # no node has a space in its name
            sources = tuple(names[source] for source in old.sources if source in names)
            gone[last].append(
                replace(
                    old,
                    name=names[old.name],
                    kind="gone",
                    record=None,
                    sources=sources,
                    leaves=(),
                    writes=(),
                    before=old,
                )
            )
    merged = gone[""]
    for item in items:
        merged += [replace(item, before=before.get(item.name)), *gone[item.name]]
    return merged


def _key(item: Item) -> tuple[str, str]:
    return item.ops[0] if item.kind == "collective" else item.kind, item.origin
