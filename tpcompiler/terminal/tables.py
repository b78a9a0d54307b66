"""Results as lines and tables, which a terminal shows as text and a notebook as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tpcompiler.errors import one_line, printable

NUMBERS = ("count", "us", "share", "mean", "largest magnitude")  # columns of numbers


@dataclass(frozen=True)
class Table:
    """A title, headers and rows of texts; columns in `right` are numbers, as are bytes everywhere.

    A column without a header is omitted if no row has a text in it.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = NUMBERS

    def columns(self) -> list[tuple[int, str, bool]]:
        """Return (index in a row, header, True for numbers) for each visible column."""
        used = [at for at, header in enumerate(self.headers) if header or any(row[at] for row in self.rows)]
        return [(at, self.headers[at], "bytes" in self.headers[at] or self.headers[at] in self.right) for at in used]


Part = str | Table


class Shown:
    """A result that a notebook shows like the terminal."""

    def parts(self) -> Iterable[Part]:
        """Return the lines, which may be empty, and tables, in order."""
        return str(self).splitlines()

    def _repr_html_(self) -> str:
        return "".join(_html(self.parts()))


class Report(Shown, str):
    """Text that a notebook shows line by line."""


def _html(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield f'<pre style="margin: 0">{escape(printable(part))}</pre>'
        elif not part.rows:
            yield f"<p>{escape(one_line(part.title))}: none</p>"
        else:
            columns = part.columns()
            yield f'<table><caption style="text-align: left">{escape(one_line(part.title))}</caption><tr>'
            yield from (_cell("th", header, is_number) for _, header, is_number in columns)
            for row in part.rows:
                yield "</tr><tr>"
                yield from (_cell("td", row[at], is_number) for at, _, is_number in columns)
            yield "</tr></table>"


def _cell(tag: str, text: str, is_number: bool) -> str:
    return f'<{tag} style="text-align: {"right" if is_number else "left"}">{escape(one_line(text))}</{tag}>'
