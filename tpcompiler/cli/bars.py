"""What is shown of a command while it works: bars on a terminal, and elsewhere a line for a step that lasts."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from rich.console import Console
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

from tpcompiler.errors import one_line
from tpcompiler.terminal.printed import format_bytes
from tpcompiler.terminal.progress import listening

# Seconds until a step has a line, and until it has another one. Who compares standard error may want none.
PATIENCE, AGAIN = float(os.environ.get("TPCOMPILER_PATIENCE", "2")), 30.0


class Status(Protocol):
    """Takes what a command does next."""

    def update(self, text: str) -> None: ...


class _Amount(ProgressColumn):
    """How much is done, and how fast; nothing of what is not counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        unit, done, total = task.fields["unit"], int(task.completed), int(task.total)
        if unit == "bytes":
            return Text(f"{format_bytes(done)} of {format_bytes(total)}  {format_bytes(int(task.speed or 0))}/s")
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


class Lines:
    """A line on standard error for each step that lasts, as a log can hold it."""

    def __init__(self, text: str) -> None:
        self._ended = threading.Event()
        self._next: dict[str, float] = {}  # step -> when it has its next line
        self._under_way: dict[str, str] = {}  # step -> how far it is
        self.update(text)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def update(self, text: str) -> None:
        self._under_way = {text: ""}
        self._next[text] = time.monotonic() + PATIENCE

    def show(self, step: str, unit: str, done: int, total: int) -> None:
        """A `progress.Listener`."""
        if done == total:
            self._under_way.pop(step, None)
            return
        if step not in self._under_way:
            # One that begins again and again, such as a search, has its next line when it is due.
            self._next[step] = max(self._next.get(step, 0.0), time.monotonic() + PATIENCE)
        self._under_way[step] = f": {format_bytes(done) if unit == 'bytes' else f'{done:,}'} of " + (
            format_bytes(total) if unit == "bytes" else f"{total:,} {unit}"
        )

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(PATIENCE / 4):
            for step, far in list(self._under_way.items()):
                if time.monotonic() >= self._next[step]:
                    self._next[step] = time.monotonic() + AGAIN
                    with suppress(OSError, ValueError, AttributeError):  # nobody reads it, or there is no such stream
                        print(one_line(step + far), file=sys.__stderr__, flush=True)


class _Nothing:
    def update(self, text: str) -> None:
        pass


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[Status]:
    """Steps on standard error: on a terminal with their rate and the time left, elsewhere a line for each that lasts.

    `quiet`: show nothing.
    """
    if quiet:
        yield _Nothing()
        return
    # To the terminal itself: bars are made of control characters. No markup: a path may have brackets.
    console = Console(file=sys.__stderr__)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(16), _Amount()
    if not console.is_terminal:
        lines = Lines(text)
        try:
            with listening(lines.show):
                yield lines
        finally:
            lines.stop()
        return
    with Progress(*columns, _Time(), console=console, transient=True, redirect_stdout=False) as bars:
        steps = Steps(bars, text)
        with listening(steps.show):
            yield steps
