"""Progress bars on one line: in a terminal, and in a notebook without ipywidgets, which rich would need there.

Where the output is a file or a pipe there are none. The line of a training run is in `training.progress`.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Item = TypeVar("Item")
REDRAWN = 0.25  # seconds between two changes of a notebook's line


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def import_tqdm() -> None:
    """Import tqdm in a notebook, if it is installed, without its advice to install ipywidgets.

    timm and OpenCLIP import it through huggingface_hub; none of our bars are tqdm's.
    """
    if in_notebook():
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.filterwarnings("ignore", "IProgress not found")
            import tqdm.auto  # noqa: F401


class NotebookLine:
    """A line of text in the output of a notebook's cell, which can be replaced."""

    def __init__(self) -> None:
        self._display: Any = None

    @property
    def begun(self) -> bool:
        """Whether there is a text."""
        return self._display is not None

    def write(self, text: str) -> None:
        """Show a text, in place of the former one."""
        from IPython.display import display

        if self._display is None:
            self._display = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._display.update({"text/plain": text}, raw=True)


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield items under a progress bar.

    Args:
        items: what is worked on, one after the other.
        description: of the work, such as "reading".
        total: how many there are; by default the length of the items, if they have one.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(description, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in the context, and yield the function that advances it by a number of items.

    Args:
        description: of the work.
        total: how many items there are, if that is known.
    """
    with _in_notebook(description, total) if in_notebook() else _in_terminal(description, total) as advance:
        yield advance


@contextmanager
def _in_terminal(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _in_notebook(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    line, done, shown = NotebookLine(), 0, time.monotonic()

    def text() -> str:
        return f"{description} {done:,}" + ("" if total is None else f" of {total:,}")

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        if time.monotonic() - shown >= REDRAWN:
            shown = time.monotonic()
            line.write(text())

    yield advance
    if line.begun:  # what takes no time needs no line
        line.write(text())
