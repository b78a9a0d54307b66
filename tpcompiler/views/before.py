"""What each item is in another artifact of the same model, and which collectives are gone since."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tpcompiler.views.items import Item


def with_before(items: Sequence[Item], first: Iterable[Item]) -> list[Item]:
    """The items, each with the one of the first program that makes the same value; none of them joined yet.

    Collectives are the same where they are of one kind and change one value. Where one of the first is no more, an
    item of kind "gone" stands.
    """
    same: dict[tuple[str, str], deque[Item]] = defaultdict(deque)
    for item in items:
        same[_key(item)].append(item)
    before: dict[str, Item] = {}
    gone: dict[str, list[Item]] = defaultdict(list)  # behind the item that they follow, "" for none
    names: dict[str, str] = {}  # of the first program -> of this one
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
    found = gone[""]
    for item in items:
        found += [replace(item, before=before.get(item.name)), *gone[item.name]]
    return found


def _key(item: Item) -> tuple[str, str]:
    return item.ops[0] if item.kind == "collective" else item.kind, item.origin
