"""Plan files: YAML, and so JSON, with the line of every entry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from tpcompiler.errors import PlanError
from tpcompiler.runtime.opened import open_input

MAX_BYTES = 1 << 20
MAX_DEPTH, MAX_NODES = 32, 100_000  # beyond which reading takes a minute


def read_plan_file(name: str) -> list[tuple[str, object, int]]:
    """The entries of the plan file at the path `name`, in order: pattern, style as plain data, line.

    Raises:
        PlanError: the file cannot be read, is not a YAML mapping of text to styles, or has no entry.
    """
    root = _compose(_read_text(name), name)
    if root is None or (isinstance(root, yaml.MappingNode) and not root.value):
        raise PlanError(f"plan file {name} is empty", help='write at least one entry, such as "*.up": colwise')
    if not isinstance(root, yaml.MappingNode):
        raise PlanError(
            f"plan file {name} line {root.start_mark.line + 1}: the plan is not a mapping",
            help='write one "name": style on each line, such as "*.up": colwise',
        )
    return [(pattern, _plain(value, name), line) for pattern, value, line in _entries(root, name)]


def _read_text(name: str) -> str:
    try:
        with open_input(Path(name)) as file:
            content = file.read(MAX_BYTES + 1) or b""
    except FileNotFoundError:
        raise PlanError(f"plan file {name} does not exist", help="give the path of a YAML or JSON file") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        if os.path.isdir(name):
            raise PlanError(f"plan file {name} is a directory", help="give the path of a YAML or JSON file") from None
        reason = getattr(error, "strerror", None) or error
        raise PlanError(
            f"plan file {name!r} cannot be read: {reason}", help="give the path of a YAML or JSON file"
        ) from None
    if len(content) > MAX_BYTES:
        raise PlanError(
            f"plan file {name} is larger than {MAX_BYTES} bytes", help="write one entry for all layers alike, with '*'"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PlanError(f"plan file {name} line {line}: not UTF-8 text", help="save the file as UTF-8") from None
    # JSON may be indented with tabs, YAML may not; in JSON a tab is never part of a string.
    return text.replace("\t", " ") if name.endswith(".json") else text


class _Loader(yaml.SafeLoader):
    """Refuses anchors and aliases: a plan needs none, and a few of them can stand for gigabytes."""

    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            raise yaml.composer.ComposerError("while scanning an alias", event.start_mark)
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(problem="it is nested too deeply", problem_mark=event.start_mark)
        if self.nodes > MAX_NODES:
            raise yaml.composer.ComposerError(
                problem=f"it has more than {MAX_NODES} values", problem_mark=event.start_mark
            )
        made = super().compose_node(parent, index)
        self.depth -= 1
        return made


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"plan file {name} line {mark.line + 1}" if mark else f"plan file {name}"
        if error.context in ("while scanning an alias", "while scanning an anchor"):
            raise PlanError(
                f"{where}: YAML anchors and aliases (& and *) are not allowed in a plan",
                help='quote a name that begins with *, such as "*.up": colwise',
            ) from None
        reason = ", ".join(part for part in (error.context, error.problem) if part)
    except yaml.reader.ReaderError as error:
        where = f"plan file {name} line {text.count(chr(10), 0, error.position) + 1}"
        reason = f"character {chr(error.character)!r} is not allowed"
    except (ValueError, OverflowError) as error:  # an escape or a directive with a number out of range
        where, reason = f"plan file {name}", str(error)
    raise PlanError(f"{where}: not YAML: {reason}", help="correct the quotes, brackets and indentation") from None


def _entries(mapping: yaml.MappingNode, name: str) -> Iterator[tuple[str, yaml.Node, int]]:
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            raise PlanError(
                f"plan file {name} line {line}: a key is not text", help='quote the key, such as "0" or "on"'
            )
        if key.value in lines:
            raise PlanError(
                f"plan file {name} line {line}: {key.value!r} is written already in line {lines[key.value]}",
                help="remove one of the two",
            )
        lines[key.value] = line
        yield key.value, value, line


def _plain(node: yaml.Node, name: str) -> object:
    if isinstance(node, yaml.MappingNode):
        return {key: _plain(value, name) for key, value, _ in _entries(node, name)}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, name) for item in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value  # 7 and true are read as text: no style is one
