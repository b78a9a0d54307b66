"""Why the rules leave out dims that could be cut, in words."""

from __future__ import annotations


def reason_of(line: str, why: str) -> str:
    return why
