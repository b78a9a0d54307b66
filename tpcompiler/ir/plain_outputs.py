"""Output pytrees that load with torch alone, and keys that no file preserves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tpcompiler._torch import TreeSpec

PLAIN = (tuple, list, dict, OrderedDict)


def plain_outputs(spec: TreeSpec) -> tuple[TreeSpec, str | None]:
    """Replace every container class that is not plain Python by a dict; return the spec and the first such class."""
    if spec.is_leaf() or spec.type is None:
        return spec, None
    children, replaced = [], None
    for index in range(spec.num_children):
        child, inner = plain_outputs(spec.child(index))
        children.append(child)
        replaced = replaced or inner
    if spec.type in PLAIN:
        return TreeSpec(spec.type, spec.context, children), replaced
    kind = spec.context if isinstance(spec.context, type) else spec.type  # a namedtuple's class is its context
    replaced = f"{kind.__module__}.{kind.__qualname__}"
    keys = _keys(spec, len(children))
    return TreeSpec(dict, keys, children), replaced


def odd_keys(spec: TreeSpec) -> Iterator[object]:
    """Yield dict keys that torch's JSON does not preserve: `(1, 2)` comes back as a list."""
    if spec.type in (dict, OrderedDict):
        yield from (key for key in spec.context if not isinstance(key, str | int | float | None))
    for index in range(spec.num_children):
        yield from odd_keys(spec.child(index))


def _keys(spec: TreeSpec, count: int) -> list[Any]:
    """Return the field names of a registered class if its pytree context has them, else numbers."""
    context = spec.context
    parts = context if isinstance(context, (list, tuple)) else ()
    for candidate in (context, *parts, getattr(context, "_fields", None)):
        if (
            isinstance(candidate, (list, tuple))
            and len(candidate) == count
            and all(isinstance(k, str) for k in candidate)
        ):
            return list(candidate)
    return [str(index) for index in range(count)]
