"""How much freed memory a command keeps."""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, MIB = -3, 1 << 20


def return_freed_tensors() -> None:
    """Let this process return every block of a MiB or more to the system as soon as it is freed.

    Once glibc has freed a block of up to 32 MiB it takes all of that size from its heap, where any small object above
    them keeps them resident: of a model whose weights pass one by one, most of its size. For commands that stream
    weights; what runs a model is faster with blocks that are kept. Other C libraries do nothing of this.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
