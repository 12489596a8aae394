"""Progress bars of tqdm, in a terminal or a notebook; where the output is a file or a pipe there are none.

The line of a training run is in `training.progress`.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield items under a progress bar; `total` is by default their length, if they have one."""
    yield from _tqdm(items, description, total)


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in the context, and yield the function that advances it by a number of items."""
    with _tqdm(None, description, total) as shown:
        yield lambda count: shown.update(count)


def _tqdm(items: Iterable[Any] | None, description: str, total: int | None) -> Any:
    tqdm = import_tqdm()
    # None: no bar where standard error is no terminal, as in a notebook, which shows one nevertheless.
    return tqdm(items, desc=description, total=total, leave=False, disable=False if in_notebook() else None)


def import_tqdm() -> Any:
    """Return tqdm's bar, imported without its advice to install ipywidgets in a notebook."""
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.auto import tqdm
    return tqdm
