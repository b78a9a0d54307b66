"""Why the rules leave out dims that can be cut, in words."""

from __future__ import annotations

import re

# What an op without a rule is, by its name; the first that matches.
KINDS = {
    r"linalg_check_errors": "a check of every matrix, which has no result",
    r"linalg": "linear algebra; its batch dims are gathered",
    r"masked_select|nonzero|unique|repeat_interleave\.Tensor|segment_reduce": "its size depends on the data",
    r"as_strided|set_|resize": "it speaks of memory and not of dims",
    r"sparse": "sparse tensors are refused",
    r"_backward": "a backward pass",
}


def reason_of(why: str) -> str:
    """The section of the list for what the rules said: no rule for an op, or a refusal of its rule."""
    op, _, said = why.partition(": ")
    if op == "no rule":
        kind = next((text for pattern, text in KINDS.items() if re.search(pattern, said)), "a rare op")
        return f"no rule: {kind}"
    if "inner part" in said or "splits into" in said:
        return "an inner part of a merged dim, which would be cut in strides"
    if "whole" in said:
        return f"kept whole by the rule of {op}"
    return f"{op}: {said}" if said else op
