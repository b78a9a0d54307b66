"""Refuse models with custom backwards, which torch.export leaves out of the program."""

from __future__ import annotations

from collections.abc import Collection

from tpcompiler.errors import UnsupportedError


def refuse_own_backwards(names: Collection[str]) -> None:
    """Raise UnsupportedError if there are any: they may agree with torch's on an example alone."""
    if names:
        raise UnsupportedError(
            f"the model has its own backward, which torch.export leaves out: {_list(names)}",
            help="write it in the forward, such as x + (f(x) - x).detach() for a step with the gradient of x, or as a "
            "custom op with torch.library.register_autograd; remove hooks that only observe",
        )


def _list(names: Collection[str]) -> str:
    first, more = list(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
