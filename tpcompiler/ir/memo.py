"""A memo of results by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo(dict[Any, Any]):
    """A memo of results by key. Keys are long, so each is looked up once."""

    def once(self, key: Any, find: Callable[[], T]) -> T:
        """Return the known result for a key, or find it."""
        if (found := self.get(key, Memo)) is Memo:
            found = self[key] = find()
        return found  # type: ignore[no-any-return]
