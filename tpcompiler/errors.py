"""One class per cause. Every message says what, where, the numbers, and one action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LINE = frozenset("\n\t")
LONGEST = 2_000  # characters of a part of an error: a name may be as long as a file

_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)


def printable(text: str, kept: frozenset[str] = LINE) -> str:
    """The text with every unseen character escaped that is not `kept`: controls, directions, surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same without line breaks: a name must not write lines of its own."""
    return printable(text, frozenset())


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, without the number and the file of an OSError; or its class."""
    message = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(message).splitlines()[0].partition(" This is an internal miniz error.")[0]  # which torch adds to all


@contextmanager
def naming_options() -> Iterator[None]:
    """Let the errors that are made in the block name options of the command line, not arguments of Python functions."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option(name: str, argument: str) -> str:
    """Return how to give something: by an option on the command line, by an argument in Python."""
    return name if _on_command_line.get() else argument


def _said(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 500]} ... {text[-500:]}"


class TpCompilerError(Exception):
    """Base of every error that this package raises on purpose.

    Printed as the message, then a `help:` line with the one thing to do, then the facts that locate it.

    Attributes:
        follows: whether another rank has failed before, and this rank because of it.
    """

    follows = False

    def __init__(self, message: str, *, help: str = "", **facts: str) -> None:
        self.message = _said(message)
        self.help = _said(help)
        self.facts = {name.replace("_", " "): _said(value) for name, value in facts.items() if value}
        lines = [self.message]
        if help:
            lines.append(f"  help: {self.help}")
        if self.facts:
            lines.append("  " + "      ".join(f"{name}: {value}" for name, value in self.facts.items()))
        super().__init__("\n".join(lines))


class PlanError(TpCompilerError):
    """The plan cannot be read, names nothing, or contradicts itself."""


class MeshError(TpCompilerError):
    """The mesh is malformed, or a rank lies outside it."""


class MachineError(TpCompilerError):
    """The description of a machine cannot be read, or has an impossible number."""


class ShardingError(TpCompilerError):
    """A tensor cannot be cut as asked.

    `leaves` are those that the plan cut and that one op cannot take together, where that is the cause.
    """

    leaves: tuple[str, ...] = ()


class UnsupportedError(TpCompilerError):
    """A recognised request that this version refuses by name."""


class ProgramError(TpCompilerError):
    """The exported program is not one that the compiler can take."""


class RuleError(TpCompilerError):
    """A sharding rule does not describe the op it was registered for."""


class ArtifactError(TpCompilerError):
    """A file or directory is missing, damaged, of another kind, or in the way."""


class BudgetError(TpCompilerError):
    """A program sends or holds more than it may, or what it may is not said in a known form."""


class InputsError(TpCompilerError):
    """Inputs do not match what the program takes."""


class LaunchError(TpCompilerError):
    """The running processes do not fit the program: rank, world size, process groups."""


class InternalError(TpCompilerError):
    """A pass left a program that breaks its own promise: a defect in the compiler."""


class TpCompilerWarning(UserWarning):
    """What this package warns of: a torch that it was not run with, files that are only read on trust."""
