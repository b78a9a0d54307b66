"""Read YAML, and so JSON, from anyone: with limits on size, depth and number of values, and without aliases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tpcompiler.runtime.opened import open_input

MAX_BYTES = 1 << 20
MAX_DEPTH, MAX_NODES = 32, 100_000  # reading more takes a minute
NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.?[0-9])[0-9]*\.[0-9]*([eE][-+][0-9]+)?)")
DIGITS = 40  # of a number; no machine needs more
TAG = "tag:yaml.org,2002:"


class YamlError(ValueError):
    """Text that cannot be read, and the one action to take.

    Attributes:
        line: the line, from 1; None for the whole text.
    """

    def __init__(self, problem: str, help: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.help, self.line = help, line


def read_small_text(name: str) -> str:
    """Return the text of a file, or of a pipe given to this process.

    Raises:
        OSError: it cannot be read, or it is a device or another pipe.
        YamlError: it is larger than `MAX_BYTES`, or not UTF-8.
    """
    with open_input(Path(name)) as file:
        content = file.read(MAX_BYTES + 1) or b""
    if len(content) > MAX_BYTES:
        raise YamlError(f"is larger than {MAX_BYTES} bytes", "write one entry for all layers alike, with '*'")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise YamlError("not UTF-8 text", "save the file as UTF-8", line) from None


class _Loader(yaml.SafeLoader):
    """A loader that rejects anchors and aliases: a few of them can stand for gigabytes."""

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
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text; None for an empty one.

    Raises:
        YamlError: it is not YAML, or exceeds a limit.
    """
    line: int | None
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        if error.context in ("while scanning an alias", "while scanning an anchor"):
            raise YamlError(
                "YAML anchors and aliases (& and *) are not allowed",
                'quote a name that begins with *, such as "*.up": colwise',
                line,
            ) from None
        reason = ", ".join(part for part in (error.context, error.problem) if part)
    except yaml.reader.ReaderError as error:
        line = text.count(chr(10), 0, error.position) + 1
        reason = f"character {chr(error.character)!r} is not allowed"
    except (ValueError, OverflowError) as error:  # an escape or a directive with a number out of range
        line, reason = None, str(error)
    raise YamlError(f"not YAML: {reason}", "correct the quotes, brackets and indentation", line) from None


def entries(mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
    """Yield key, value and line of a mapping's entries.

    Raises:
        YamlError: a key is not text, or appears twice.
    """
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        line = key.start_mark.line + 1
        if key.tag != f"{TAG}str":
            raise YamlError("a key is not text", 'quote the key, such as "0" or "on"', line)
        if key.value in lines:
            raise YamlError(
                f"{key.value!r} is written already in line {lines[key.value]}", "remove one of the two", line
            )
        lines[key.value] = line
        yield key.value, value, line


def plain(node: yaml.Node, *, numbers: bool = False) -> object:
    """Return a node as plain data, with scalars as text; with `numbers`, decimal ones as numbers.

    YAML's other notations of numbers (octal, base 60, `.inf`) stay text, and so do overlong numbers.

    Raises:
        YamlError: as `entries`.
    """
    if isinstance(node, yaml.MappingNode):
        return {key: plain(value, numbers=numbers) for key, value, _ in entries(node)}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item, numbers=numbers) for item in node.value]
    if numbers and node.tag in (f"{TAG}int", f"{TAG}float") and len(node.value) <= DIGITS:
        if NUMBER.fullmatch(node.value):
            return int(node.value) if node.tag == f"{TAG}int" else float(node.value)
    return None if node.tag == f"{TAG}null" else node.value
