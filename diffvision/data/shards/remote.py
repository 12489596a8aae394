"""Files at URLs, through fsspec: read within time limits, and again after failures, for a limited time.

`cache` keeps whole shards on disk.
"""

import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

_log = logging.getLogger(__name__)
_MAX_SMALL_FILE = 1 << 30  # bytes of a manifest; one of ten million shards is as large
_LOG_EVERY = 30.0  # seconds, of a transfer that takes long
_VERSION_FIELDS = ("ETag", "Last-Modified", "LastModified", "generation", "size")  # in the answers of http, s3 and gs
_AGAIN = (408, 425, 429)  # HTTP's ways to say: later; and all from 500 on


class Refused(OSError):
    """A failure after which trying again cannot help."""


class TooLarge(Refused):
    """A file with more bytes than there is room for."""


class GivenUp(OSError):
    """A server did not give a file within the patience with it."""


@dataclass(frozen=True)
class Patience:
    """How long a remote file is waited for; all in seconds.

    Attributes:
        connect: for a connection.
        read: for the next bytes of one that was made.
        tries: how often a file is asked for before it counts as unreadable.
        pause: before the second try; doubled before each later one, at most a minute, and drawn at random from its
            upper half, so that a thousand readers do not come back together.
        total: for one file, with all tries and pauses.
    """

    connect: float = 20.0
    read: float = 60.0
    tries: int = 5
    pause: float = 1.0
    total: float = 1800.0

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value <= 0:
                raise ValueError(f"{name} is {value}: it must be above 0")

    def pauses(self) -> Iterator[float]:
        """Yield the seconds between the tries."""
        for number in range(self.tries - 1):
            yield min(60.0, self.pause * 2**number) * random.Random().uniform(0.5, 1.0)


def read(location: str, patience: Patience = Patience()) -> bytes | None:
    """Return the content of a small file, or None where there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: the URL's kind needs a package that is not installed.
    """
    files, path = _files(location, patience)
    try:
        with tempfile.NamedTemporaryFile() as file:

            def attempt(deadline: float) -> None:
                # Not cat_file: it takes whatever a server sends, or unpacks what it sends compressed, into memory.
                progress = Progress(location, _MAX_SMALL_FILE, deadline, lambda: None)
                files.get_file(path, file.name, callback=progress)

            patiently(attempt, location, patience)
            return Path(file.name).read_bytes()
    except FileNotFoundError:
        return None


def download(location: str, to: str, progress: Callback, patience: Patience) -> None:
    """Try once to copy a file to this machine; `progress` is called with each piece, and may raise to end it."""
    files, path = _files(location, patience)
    files.get_file(path, to, callback=progress)


def stamp(location: str, patience: Patience = Patience()) -> tuple[str, int | None]:
    """Return a file's version (such as its ETag) and size in bytes from its server; "" and None where unknown.

    Raises:
        OSError: the server does not answer, or has no such file.
    """
    files, path = _files(location, patience)

    def attempt(deadline: float) -> dict[str, Any]:
        files.invalidate_cache(path)  # of what an earlier request said
        try:
            return files.info(path)
        except FileNotFoundError as error:
            missing = error
        # fsspec raises this for any failure over HTTP.
        raise (missing.__cause__ if _is_http(location) else None) or missing

    info = patiently(attempt, location, patience)
    fields = {name: str(info[name]).removeprefix("W/") for name in _VERSION_FIELDS if info.get(name) is not None}
    size = info.get("size")
    return " ".join(f"{name}={value}" for name, value in fields.items()), size if isinstance(size, int) else None


def patiently(attempt: Callable[[float], Any], location: str, patience: Patience) -> Any:
    """Return what `attempt` returns, which is called with the time (`time.monotonic`) at which it has to give up.

    Raises:
        FileNotFoundError, Refused, OSError: at once, where trying again cannot help.
        GivenUp: after the last try, or when the time is over.
    """
    deadline = time.monotonic() + patience.total
    pauses = patience.pauses()
    while True:
        try:
            return attempt(deadline)
        except Exception as error:
            pause = next(pauses, None)
            if not _may_pass(error):
                raise _as_os_error(error) from error
            if pause is None or time.monotonic() + pause > deadline:
                spent = time.monotonic() - deadline + patience.total
                raise GivenUp(f"given up after {spent:.1f} s: {_message(error)}") from error
            _log.warning("%s: %s; again in %.1f s", location, _message(error), pause)
            time.sleep(pause)


class Progress(Callback):
    """Ends a transfer that grows too large or takes too long, and logs one that takes a while."""

    def __init__(self, location: str, limit: int, deadline: float, beat: Callable[[], None]) -> None:
        super().__init__()
        self._location, self._limit, self._deadline, self._beat = location, limit, deadline, beat
        self._logged = time.monotonic()

    def call(self, *args: Any, **kwargs: Any) -> None:
        self._beat()
        now = time.monotonic()
        if max(self.size or 0, self.value) > self._limit:
            raise TooLarge(f"it is larger than the {self._limit:,} bytes that there is room for")
        if now > self._deadline:
            raise TimeoutError(f"only {self.value:,} of {self.size or 0:,} bytes arrived within the time limit")
        if now - self._logged > _LOG_EVERY:
            self._logged = now
            _log.warning("%s: %s of %s bytes so far", self._location, f"{self.value:,}", f"{self.size or 0:,}")


def _files(location: str, patience: Patience) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(location, **_settings(location.partition("://")[0], patience))
    except ImportError as error:
        raise ValueError(f"{location} needs a package that is not installed: {error}") from error


def _settings(scheme: str, patience: Patience) -> dict[str, Any]:
    """Return the limits as each scheme's package takes them, without its retries."""
    if _is_http(scheme):
        from aiohttp import ClientTimeout

        # total: cat_file has no callback that could end it.
        limits = ClientTimeout(total=patience.total, sock_connect=patience.connect, sock_read=patience.read)
        return {"client_kwargs": {"timeout": limits}}
    if scheme == "s3":
        once = {"total_max_attempts": 1}
        return {"config_kwargs": {"connect_timeout": patience.connect, "read_timeout": patience.read, "retries": once}}
    return {"requests_timeout": patience.read} if scheme == "gs" else {}


def _is_http(location: str) -> bool:
    return location.partition("://")[0] in ("http", "https")


def _may_pass(error: Exception) -> bool:
    """Return whether trying again could help: not where a file is missing, not allowed, or too large."""
    if isinstance(error, (FileNotFoundError, PermissionError, Refused, GivenUp, ValueError, TypeError, AttributeError)):
        return False
    status = getattr(error, "status", None)
    return not isinstance(status, int) or status >= 500 or status in _AGAIN


def _as_os_error(error: Exception) -> Exception:
    return error if isinstance(error, OSError) else OSError(_message(error))


def _message(error: Exception) -> str:
    status = getattr(error, "status", None)
    if status == 0:  # without an answer: too many redirects
        return type(error).__name__
    if isinstance(status, int):
        return f"the server answers {status} {getattr(error, 'message', '')}".strip()
    return str(error) or type(error).__name__
