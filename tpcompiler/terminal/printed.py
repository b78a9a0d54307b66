"""Make text safe for terminals: files choose their own names, and a terminal obeys control characters."""

from __future__ import annotations

import decimal
import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from tpcompiler.errors import printable

UNITS = ("B", "kB", "MB", "GB", "TB")
DIGITS = 3


def format_bytes(count: int, digits: int = DIGITS) -> str:
    """Write an amount of memory in decimal units, rounded to so many digits: `384 B`, `1.15 kB`.

    The page has the same function (`report/page/graph.js`).
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_HALF_UP)
    for power, unit in enumerate(UNITS):
        amount = context.create_decimal_from_float(count / 1000**power)
        if abs(amount) < 1000 or unit == UNITS[-1]:
            break
    return f"{amount.normalize():f} {unit}"


def format_microseconds(seconds: float) -> str:
    """Return a column's text of a time, without its unit."""
    return f"{seconds * 1e6:,.3f}"


def format_unequal_bytes(*counts: int) -> list[str]:
    """Write amounts with enough digits to distinguish unequal ones."""
    written = ([format_bytes(count, digits) for count in counts] for digits in range(DIGITS, 20))
    return next(texts for texts in written if len(set(texts)) == len(set(counts)))


def mute_logs() -> None:
    """Keep libraries' logs below errors off the terminal, in this process.

    torch adds its handlers when it is imported, which is later: so their class is changed.
    """
    emit = logging.StreamHandler.emit

    def emit_errors(self: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or isinstance(self, logging.FileHandler):
            emit(self, record)

    logging.StreamHandler.emit = emit_errors  # type: ignore[assignment]


def nearest_names(name: str, known: Sequence[str]) -> str:
    """Return up to three known names that resemble an unknown one; first those with it among their parts."""
    inside = [each for each in known if f".{name}." in f".{each}."]
    return ", ".join((inside or difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known)[:3])


class Printed:
    """A text stream that escapes invisible characters and those outside its encoding."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.encoding = stream, stream.encoding or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._unless_closed():
            self._stream.write(printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._unless_closed():
            self._stream.flush()

    @contextmanager
    def _unless_closed(self) -> Iterator[None]:
        """Discard further output if the reader has closed the pipe, so that the command ends normally."""
        try:
            yield
        except BrokenPipeError:
            print_nowhere(self._stream)


def print_nowhere(stream: TextIO) -> None:
    """Discard the buffered and all further output of a stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def printed_streams(out: TextIO | None, error: TextIO | None) -> Iterator[None]:
    """Filter everything that the block prints; a closed stream discards it.

    Raises:
        OSError: standard output cannot be written.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        output, errors = (cast(TextIO, Printed(stream or nowhere)) for stream in (out, error))
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                yield
            finally:
                output.flush()
