"""Plan files in YAML (and so JSON), with the line of every entry."""

from __future__ import annotations

import difflib
import os

import yaml

from tpcompiler.errors import PlanError
from tpcompiler.runtime.hub import download_help
from tpcompiler.yaml_file import YamlError, compose, entries, plain, read_small_text

CONFIG = "config.json"
SEARCHES = ("auto", "auto:free")  # names of plans that the search finds


def read_plan_file(name: str) -> list[tuple[str, object, int]]:
    """Return the entries of the plan file at the path `name`, in order: pattern, style as plain data, line.

    Raises:
        PlanError: the file cannot be read, is not a YAML mapping of text to styles, or has no entry.
    """
    try:
        root = compose(_read_text(name))
        if root is None or (isinstance(root, yaml.MappingNode) and not root.value):
            raise YamlError("is empty", 'write at least one entry, such as "*.up": colwise')
        if not isinstance(root, yaml.MappingNode):
            raise YamlError(
                "the plan is not a mapping",
                'write one "name": style on each line, such as "*.up": colwise',
                root.start_mark.line + 1,
            )
        # 7 and true are read as text, because no style is a number or a bool
        return [(pattern, plain(value), line) for pattern, value, line in entries(root)]
    except YamlError as error:
        where = f" line {error.line}:" if error.line else ":" if str(error).startswith("not YAML") else ""
        raise PlanError(f"plan file {name}{where} {error}", help=error.help) from None


def _help(name: str) -> str:
    """Return advice for a file that does not exist: its name may be misspelt, or the id of a model."""
    if near := difflib.get_close_matches(name, SEARCHES, n=1):
        return f"did you mean {near[0]}? or give the path of a YAML or JSON file"
    then = "its {}/config.json is a plan"
    return download_help(name, then) or "give the path of a YAML or JSON file"


def _read_text(name: str) -> str:
    try:
        text = read_small_text(name)
    except YamlError:
        raise
    except FileNotFoundError:
        raise PlanError(f"plan file {name} does not exist", help=_help(name)) from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if os.path.isdir(name):
            raise PlanError(f"plan file {name} is a directory", help="give the path of a YAML or JSON file") from None
        reason = getattr(error, "strerror", None) or error
        raise PlanError(
            f"plan file {name!r} cannot be read: {reason}", help="give the path of a YAML or JSON file"
        ) from None
    # JSON may be indented with tabs, YAML may not; a JSON string never contains a raw tab.
    return text.replace("\t", " ") if name.endswith(".json") else text
