"""Amounts of memory and time as people write them."""

from __future__ import annotations

import re

from tpcompiler.errors import BudgetError, option

UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Bytes of an optimizer's state for an element: two moments in float32, a momentum in float32.
STATE_BYTES = {"adamw": 8, "sgd": 4, "none": 0}


def read_bytes(amount: int | str) -> int:
    """Return the number of bytes in `24GB`, `22.5GiB` or `1000`; a number alone is bytes.

    Raises:
        BudgetError: a text that is no amount.
    """
    match = re.fullmatch(rf"\s*(\d{{1,18}}(?:\.\d{{1,9}})?)\s*({'|'.join(UNITS)})\s*", str(amount), re.ASCII)
    if match is None:
        raise BudgetError(f"{amount!r} is no number of bytes", help="write 24GB, 22.5GiB, or bytes")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def read_seconds(time: str) -> float:
    """Return the seconds in `6ms`, `250us` or `1.5s`.

    Raises:
        BudgetError: a text that is no time.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|ms|us)\s*", str(time), re.ASCII)
    if match is None:
        raise BudgetError(f"{time!r} is no time", help="write 6ms, 250us or 1.5s")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2]]


def read_memory(amount: int | str) -> int:
    """Return the bytes of a rank's memory. A bare number below 1000 lacks its unit: no rank has so little.

    Raises:
        BudgetError: a text that is no amount, or one without its unit.
    """
    count, number = read_bytes(amount), str(amount).strip()
    if count < 1000 and number.replace(".", "", 1).isdecimal():
        text = option(f"{number}GB", repr(f"{number}GB"))
        raise BudgetError(f"a rank's memory of {number} is {number} bytes", help=f"did you mean {text}?")
    return count
