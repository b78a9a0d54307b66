"""Python's collector of cycles rests while graphs are built: they are full of cycles, and none of them is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_rests() -> Iterator[None]:
    """No search for garbage in this block; what is not part of a cycle is freed as ever.

    What is left at its end counts as old, as it would had the collector looked at it in vain all along.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
