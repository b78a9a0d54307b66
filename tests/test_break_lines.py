"""What `tools/break_lines.py` does to a file."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.break_lines import ROOT, breaks

TEXT = """
def few(items, most=3):
    if len(items) <= most and items:
        print("few")
        return "one" if len(items) == 1 else f"{len(items) + 1}"
    return not most
"""
MADE = [
    "def few(items, most=4):",
    "    if (len(items) <= most or items):",
    "    if (len(items) < most) and items:",
    "        pass",
    "        return (f'{len(items) + 1}' if len(items) == 1 else 'one')",
    '        return "one" if (len(items) != 1) else f"{len(items) + 1}"',
    '        return "one" if len(items) == 2 else f"{len(items) + 1}"',
    "    return (most)",
]


def test_each_change_is_of_one_line() -> None:
    made = []
    for change in breaks(Path("few.py"), TEXT):
        lines = change.applied(TEXT).splitlines()
        (line,) = (new for new, old in zip(lines, TEXT.splitlines(), strict=True) if new != old)
        made.append(line)
    assert sorted(made) == sorted(MADE)


def test_all_files_stay_readable() -> None:
    for path in sorted((ROOT / "passes").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        changes = list(breaks(path, text))
        for change in changes[:: max(1, len(changes) // 20)]:
            ast.parse(change.applied(text))
