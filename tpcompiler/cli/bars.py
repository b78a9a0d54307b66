"""Show progress: bars on a terminal, elsewhere one line for each long step."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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

ShowStep = Callable[[str], None]  # shows the name of the current step
# Seconds until the first line of a step, and between its lines. Tests that compare standard error want none.
PATIENCE, AGAIN = float(os.environ.get("TPCOMPILER_PATIENCE", "2")), 30.0


class _Amount(ProgressColumn):
    """Amount and rate; empty for a step that is not counted."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        unit, done, total = task.fields["unit"], int(task.completed), int(task.total)
        if unit == "bytes":
            return Text(f"{format_bytes(done)} of {format_bytes(total)}  {format_bytes(int(task.speed or 0))}/s")
        return Text(f"{done:,} of {total:,} {unit}  {task.speed or 0:,.1f}/s")


class _Time(ProgressColumn):
    """The time left; for a step that is not counted, the time elapsed."""

    left, elapsed = TimeRemainingColumn(), TimeElapsedColumn()

    def render(self, task: Task) -> Text:
        return (self.elapsed if task.total is None else self.left).render(task)


class Steps:
    """A line for the command, and one below it for each counted step."""

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
    """A line on standard error for each long step, for logs: its name and total once, then how far it is."""

    def __init__(self, text: str) -> None:
        self._ended = threading.Event()
        self._next: dict[str, float] = {}  # step -> time of its next line
        self._named: dict[str, None] = {}  # steps that have a line, in order
        self._under_way: dict[str, tuple[str, str]] = {}  # step -> its total and its progress, if it is counted
        self.update(text)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def update(self, text: str) -> None:
        self._under_way = {text: ("", "")}
        self._next[text] = time.monotonic() + PATIENCE

    def show(self, step: str, unit: str, done: int, total: int) -> None:
        """A `progress.Listener`."""
        if done == total:
            self._under_way.pop(step, None)
            return
        if step not in self._under_way:
            # A step that starts again and again, such as a search, keeps the time of its next line.
            self._next[step] = max(self._next.get(step, 0.0), time.monotonic() + PATIENCE)
        is_bytes = unit == "bytes"
        whole = format_bytes(total) if is_bytes else f"{total:,} {unit}"
        self._under_way[step] = f": {whole}", f"{format_bytes(done) if is_bytes else f'{done:,}'} of {whole}"

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(PATIENCE / 4):
            for step, (total, far) in list(self._under_way.items()):
                is_told = step in self._named and (not far or step != list(self._named)[-1])
                if time.monotonic() >= self._next[step] and not is_told:
                    self._next[step] = time.monotonic() + AGAIN
                    line = f"  {far}" if step in self._named else one_line(step + total)
                    self._named[step] = None
                    with suppress(OSError, ValueError, AttributeError):  # closed, or no such stream
                        print(line, file=sys.__stderr__, flush=True)


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[ShowStep]:
    """Show steps on standard error in the block: bars on a terminal, elsewhere lines. `quiet` shows nothing.

    Yields a function that shows the name of the next step.
    """
    if quiet:
        yield lambda text: None
        return
    # The terminal itself: the filter on sys.stderr escapes control characters. No markup: a path may have brackets.
    console = Console(file=sys.__stderr__)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(16), _Amount()
    if not console.is_terminal:
        lines = Lines(text)
        try:
            with listening(lines.show):
                yield lines.update
        finally:
            lines.stop()
        return
    with Progress(*columns, _Time(), console=console, transient=True, redirect_stdout=False) as bars:
        steps = Steps(bars, text)
        with listening(steps.show):
            yield steps.update
