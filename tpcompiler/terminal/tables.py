"""Results as lines and tables, which a terminal shows as text and a notebook as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO

from rich.console import Console
from rich.table import Table as RichTable

from tpcompiler.errors import one_line, printable

WIDTH_OF_TEXT = 160  # narrower tables would fold names that programs look for
NUMBERS = ("count", "us", "share", "mean", "largest magnitude")  # columns of numbers, whatever the table


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


def text_of(parts: Iterable[Part], width: int = WIDTH_OF_TEXT) -> str:
    """Return lines and tables as text; cells that a table has no room for are folded."""
    return "".join(f"{one_line(part)}\n" if isinstance(part, str) else _table_text(part, width) for part in parts)


def _table_text(table: Table, width: int) -> str:
    title = one_line(table.title)
    if not table.rows:
        return f"{title}: none\n\n"
    columns, drawn = table.columns(), RichTable(box=None, pad_edge=False)
    for _, header, is_number in columns:
        drawn.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(one_line(row[at]) for at, _, _ in columns))
    text = StringIO()
    # No markup: the brackets of a shape are not a style. No colours, which are control characters.
    Console(file=text, markup=False, highlight=False, emoji=False, width=width, no_color=True).print(drawn)
    return "\n".join([title, *(line.rstrip() for line in text.getvalue().splitlines()), "\n"])


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
