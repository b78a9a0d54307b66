"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from tpcompiler.errors import BudgetError

UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read_bytes(said: int | str) -> int:
    """How many bytes `24GB`, `22.5GiB` or `1000` are; a number alone is bytes.

    Raises:
        BudgetError: a text that says no amount.
    """
    found = re.fullmatch(rf"\s*(\d{{1,18}}(?:\.\d{{1,9}})?)\s*({'|'.join(UNITS)})\s*", str(said), re.ASCII)
    if found is None:
        raise BudgetError(f"{said!r} is no number of bytes", help="write 24GB, 22.5GiB, or bytes")
    return int(float(found[1]) * UNITS[found[2]]) if "." in found[1] else int(found[1]) * UNITS[found[2]]
