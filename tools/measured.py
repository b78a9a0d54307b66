"""The line that a page of measurements carries: the date, the versions, and the command to measure again."""

from __future__ import annotations

import re
from datetime import date

import torch

from tpcompiler import __version__

LINE = re.compile(r"^Measured on \d{4}-\d\d-\d\d.*: `.*`\.$", re.MULTILINE)


def measured_line(command: str) -> str:
    """Return the line of a page that was measured today."""
    own = torch.__version__.partition("+")[0]
    return f"Measured on {date.today()} with tpcompiler {__version__} and torch {own}: `{command}`."
