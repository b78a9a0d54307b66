"""What is shown of a command while it works."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tpcompiler.printed import one_line
from tpcompiler.progress import listening


class _Amount(ProgressColumn):
    """How much is done, and how fast; nothing of what is not counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        unit, done, total = task.fields["unit"], int(task.completed), int(task.total)
        if unit == "bytes":
            return Text(f"{decimal(done)} of {decimal(total)}  {decimal(int(task.speed or 0))}/s")
        return Text(f"{done:,} of {total:,} {unit}  {task.speed or 0:,.1f}/s")


class _Time(ProgressColumn):
    """The time left; of what is not counted, how long it takes already."""

    left, elapsed = TimeRemainingColumn(), TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        return (self.elapsed if task.total is None else self.left).render(task)


class Steps:
    """A line for the command, and under it one for each step that is counted and under way."""

    def __init__(self, bars: Progress, text: str) -> None:
        self._bars, self._counted = bars, dict[str, TaskID]()
        self._task = bars.add_task(one_line(text), total=None)

    def update(self, text: str) -> None:
        self._bars.reset(self._task, description=one_line(text))

    def show(self, step: str, unit: str, done: int, total: int) -> None:
        """A `progress.Listener`."""
        if done == total:
            if step in self._counted:
                self._bars.remove_task(self._counted.pop(step))
            return
        if step not in self._counted:
            self._counted[step] = self._bars.add_task(one_line(step), total=total, unit=unit)
            self._bars.refresh()
        self._bars.update(self._counted[step], completed=done, total=total)


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[Steps]:
    """Steps on standard error, with their rate and the time left; nothing where that is no terminal, or if `quiet`."""
    # To the terminal itself: bars are made of control characters. No markup: a path may have brackets.
    console = Console(file=sys.__stderr__)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(16), _Amount()
    is_shown = console.is_terminal and not quiet
    with Progress(
        *columns, _Time(), console=console, transient=True, disable=not is_shown, redirect_stdout=False
    ) as bars:
        steps = Steps(bars, text)
        if not is_shown:
            yield steps
            return
        with listening(steps.show):
            yield steps
