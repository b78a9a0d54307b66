"""Return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, MIB = -3, 1 << 20


def return_freed_tensors() -> None:
    """Let this process return every block of a MiB or more to the system as soon as it is freed.

    For commands that stream weights. After glibc has freed a block of up to 32 MiB, it takes blocks of that size from
    its heap, where any small object above a block keeps it resident: most of a model that is streamed would stay.
    Commands that run a model are faster without this. Does nothing with other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
