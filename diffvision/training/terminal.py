"""The last line of a terminal, kept in place while other output appears above it; in a notebook, a line of the cell.

What the line says is in `progress`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from diffvision.progress import NotebookLine, in_notebook

CLEAR = "\r\x1b[K"  # back to the beginning of the line, and clear it


class Screen:
    """The last line of a terminal, which stays there while other output appears above it."""

    def __init__(self, console: Console) -> None:
        """Replace stdout, stderr and the streams of log handlers by ones that write above the line, until `close`."""
        self.console = console
        self.bar = ("=", "-") if console.options.ascii_only else ("━", "─")
        self._drawn = ""
        self._terminal = sys.stdout
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr") if getattr(sys, name).isatty()}
        above = {stream: StreamAbove(stream, self) for stream in self._streams.values()}
        for name, stream in self._streams.items():
            setattr(sys, name, above[stream])
        self._handlers = {handler: handler.stream for handler in stream_handlers() if handler.stream in above}
        for handler, stream in self._handlers.items():
            handler.stream = above[stream]

    @classmethod
    def opened(cls) -> Screen | None:
        """Return a screen, or None where standard output is no terminal or one that cannot redraw a line."""
        console = Console()
        return cls(console) if sys.stdout.isatty() and not console.is_dumb_terminal else None

    @property
    def width(self) -> int:
        """Columns for the line, without two for a ^C and the last one, at which some terminals wrap."""
        return self.console.width - 3

    def draw(self, text: Text) -> None:
        with self.console.capture() as captured:
            self.console.print(text, end="", soft_wrap=True)
        self._drawn = captured.get()
        self._write(CLEAR + self._drawn)

    def above(self, stream: Any, text: str) -> None:
        """Write other output above the line."""
        self._write(CLEAR)
        stream.write(text)
        stream.flush()
        self._write(self._drawn)

    def close(self) -> None:
        """Clear the line, and restore the streams."""
        self._drawn = ""
        self._write(CLEAR)
        for name, stream in self._streams.items():
            getattr(sys, name).finish()
            setattr(sys, name, stream)
        for handler, stream in self._handlers.items():
            handler.stream = stream

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


class CellScreen:
    """A line in the output of a notebook's cell; what is printed later appears below it, and it stays at the end."""

    width, bar = 100, ("━", "─")

    def __init__(self) -> None:
        self._line = NotebookLine()

    @classmethod
    def opened(cls) -> CellScreen | None:
        """Return a line, or None outside of notebooks."""
        return cls() if in_notebook() else None

    def draw(self, text: Text) -> None:
        self._line.write(text.plain)

    def close(self) -> None:
        """Leave the line as it is."""


class StreamAbove:
    """A stream that writes complete lines above a screen's last line."""

    def __init__(self, stream: Any, screen: Screen) -> None:
        self._stream, self._screen, self._rest = stream, screen, ""

    def write(self, text: str) -> int:
        """Write the complete lines, and keep the rest."""
        lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._screen.above(self._stream, lines + end)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def finish(self) -> None:
        """Write the rest that has no end of line."""
        self._stream.write(self._rest)
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stream_handlers() -> list[Any]:
    """Return the handlers of all loggers that write to a stream; each keeps the stream it was made with."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    return [handler for handler in handlers if hasattr(handler, "stream")]
