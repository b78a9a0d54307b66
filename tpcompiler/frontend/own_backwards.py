"""Refuse models with custom backwards where no values show whether these matter."""

from __future__ import annotations

from collections.abc import Collection

from tpcompiler.errors import UnsupportedError

WRITE = (
    "write it in the forward, such as x + (f(x) - x).detach() for a step with the gradient of x, or as a custom op "
    "with torch.library.register_autograd"
)


def refuse_own_backwards(names: Collection[str], why: str) -> None:
    """Raise UnsupportedError if there are backwards that torch.export leaves out."""
    if names:
        raise UnsupportedError(
            f"the model has its own backward, which torch.export leaves out: {list_backwards(names)}; {why}",
            help=WRITE,
        )


def list_backwards(names: Collection[str]) -> str:
    first, more = list(names)[:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
