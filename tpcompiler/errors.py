"""One class per cause of errors. Every message gives the cause, the place, the numbers, and one action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LINE = frozenset("\n\t")
LONGEST = 2_000  # characters of a part of an error: a name may be as long as a file

_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)


def printable(text: str, kept: frozenset[str] = LINE) -> str:
    """Escape every invisible character that is not in `kept`: controls, directions, surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Escape invisible characters and line breaks: a name must not write its own lines."""
    return printable(text, frozenset())


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, without the number and the file of an OSError; or its class."""
    message = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(message).splitlines()[0].partition(" This is an internal miniz error.")[0]  # which torch adds to all


@contextmanager
def naming_options() -> Iterator[None]:
    """Make errors in the block name command-line options instead of arguments of Python functions."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option(name: str, argument: str) -> str:
    """Return how to pass a value: an option on the command line, an argument in Python."""
    return name if _on_command_line.get() else argument


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 500]} ... {text[-500:]}"


class _ExplainedError(Exception):
    """An error that prints its message, then a `help:` line with the one action, then the facts that locate it."""

    def __init__(self, message: str, *, help: str = "", **facts: str) -> None:
        self.message = _shortened(message)
        self.help = _shortened(help)
        self.facts = {name.replace("_", " "): _shortened(value) for name, value in facts.items() if value}
        lines = [self.message]
        if help:
            lines.append(f"  help: {self.help}")
        if self.facts:
            lines.append("  " + "      ".join(f"{name}: {value}" for name, value in self.facts.items()))
        super().__init__("\n".join(lines))


class InternalError(_ExplainedError):
    """A defect in the compiler. No `TpCompilerError`, so that nothing which handles bad input hides it."""


class TpCompilerError(_ExplainedError):
    """Base of every error that this package raises for its input or its surroundings.

    Attributes:
        follows: True if this rank fails because another rank has failed.
    """

    follows = False


class PlanError(TpCompilerError):
    """The plan cannot be read, names nothing, or contradicts itself."""


class MeshError(TpCompilerError):
    """The mesh is malformed, or a rank is outside it."""


class MachineError(TpCompilerError):
    """The description of a machine cannot be read, or has an impossible number."""


class ShardingError(TpCompilerError):
    """A tensor cannot be cut as requested.

    `leaves`: those that the plan cuts and that one op cannot take together, if that is the cause.
    """

    leaves: tuple[str, ...] = ()


class UnsupportedError(TpCompilerError):
    """A known request that this version does not support."""


class ProgramError(TpCompilerError):
    """The compiler does not support the exported program."""


class RuleError(TpCompilerError):
    """A sharding rule does not describe the op that it was registered for."""


class ArtifactError(TpCompilerError):
    """A file or directory is missing, damaged, of another kind, or in the way."""


class BudgetError(TpCompilerError):
    """A program exceeds its budget, or the budget has an unknown form."""


class InputsError(TpCompilerError):
    """Inputs do not fit the program."""


class LaunchError(TpCompilerError):
    """The running processes do not fit the program: rank, world size, process groups."""


@contextmanager
def explaining(
    problem: str, help: str, *errors: type[BaseException], raised: type[TpCompilerError] = ArtifactError
) -> Iterator[None]:
    """Raise an error with this problem and the reason for errors of these types in the block, by default OSError."""
    kinds = errors or (OSError,)
    try:
        yield
    except kinds as error:
        raise raised(f"{problem}: {reason(error)}", help=help) from error


class TpCompilerWarning(UserWarning):
    """A warning of this package, such as an untested torch, or files that need trust."""
