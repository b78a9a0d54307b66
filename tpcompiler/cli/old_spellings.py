"""Old spellings of commands and options: they work for one release, with a warning that gives the new one."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer

LAST = "0.1"  # the release that still takes them
NEW_SPELLINGS = {  # of a command, or of an option of a command; {} is the option's value
    "calibrate --ranks": "--processes",
    "check --max-memory": '--budget "{} held"',
    "check --max-wire-bytes": '--budget "{} sent"',
    "check --original": "--against",
    "convert --device-type": "--device",
    "convert --max-memory": '--budget "{} held"',
    "convert --max-wire-bytes": '--budget "{} sent"',
    "convert --partial": "--ignore-unused",
    "cost": "explain",
    "cut --partial": "--ignore-unused",
    "doctor": "plan",
    "doctor --mesh": "--other-axes",
    "generate": "run --tokens 16",
    "merge": "reshard --single-device",
    "plan --partial": "--plan",
    "show": "inspect --rank 0",
}


def replace_old_spellings(words: Sequence[str]) -> list[str]:
    """Return a command and its arguments in today's spelling."""
    command, values = words[0], iter(words[1:])
    replaced = _new_spelling(command, command).split() or [command]
    for word in values:
        option, is_joined, value = word.partition("=")
        new = _new_spelling(f"{command} {option}", option)
        name, _, template = new.partition(" ")
        if new == option:
            replaced.append(word)
        elif template:
            replaced += [name, template.strip('"').format(value if is_joined else next(values, ""))]
        else:
            replaced.append(name + is_joined + value)
    return replaced


def _new_spelling(old: str, name: str) -> str:
    new = NEW_SPELLINGS.get(old, name)
    if new != name and os.environ.get("RANK", "0") == "0":  # under torchrun once, not from each rank
        typer.echo(f"warning: {name} is now {new.format('N')}; {LAST} is the last release with {name}", err=True)
    return new
