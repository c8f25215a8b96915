"""What a person at a terminal sees while a command waits. Always on standard error, and gone when the wait is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` with the seconds that have passed; call what is yielded with a text to show that instead.

    Nothing is shown where standard error is no terminal. Without rich, each new text is a line.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield _lines(what)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(what), total=None)
        yield lambda text: bar.update(task, description=escape(text))


def _lines(first: str) -> Callable[[str], None]:
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            print(text, file=sys.stderr, flush=True)

    show(first)
    return show
