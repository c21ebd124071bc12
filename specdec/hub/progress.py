"""What the terminal shows while something long runs: a bar on a TTY, one line a step elsewhere, or nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Update = Callable[[int], None]


class Steps:
    """Reports the steps of one job on stderr.

    Args:
        show: False keeps the steps silent.
    """

    def __init__(self, show: bool = True) -> None:
        # The stream is fixed here, so that what runs inside a step may redirect stderr.
        self._console = Console(file=sys.stderr, quiet=not show, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Print a text that the user must see, also where the steps are silent."""
        Console(file=self._console.file, highlight=False, markup=False, soft_wrap=True).print(text)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Update]:
        """Show one step while the block runs; yields a function that takes the bytes done so far.

        Args:
            label: what happens, as a short phrase.
            total: bytes to do, None where that can't be known (a spinner then).
        """
        if not self._console.is_terminal or self._console.quiet:
            self._console.print(label)
            yield lambda done: None
            return
        amount = [BarColumn(), DownloadColumn()] if total else [SpinnerColumn()]
        columns = [TextColumn("{task.description}", markup=False), *amount, TimeElapsedColumn()]
        with Progress(*columns, console=self._console, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)
            bar.update(task, total=total or 1, completed=total or 1)
