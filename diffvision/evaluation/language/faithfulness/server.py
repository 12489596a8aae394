"""Replies of a server with OpenAI's interface (`POST /chat/completions`), asked again after failures, and kept.

Only the standard library: any client of such a server would do, and none is a dependency.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffvision.data.shards.remote import Patience
from diffvision.evaluation.output import write_bytes

_AGAIN = (408, 409, 425, 429)  # and all from 500 on: a server may answer later
_MOST_BYTES = 1 << 24  # of an answer
_KEPT = "with --output or --cache nothing is judged twice"
SYSTEM = "You are a helpful assistant."


class NoReply(ValueError):
    """A server did not answer a request, or refused it."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key must not follow a redirect to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class ChatServer:
    """A server, and how it is asked.

    Attributes:
        url: up to /chat/completions, such as http://localhost:8000/v1.
        model: its name at the server.
        key: sent as a bearer token; None for none. It is never written anywhere.
        patience: `read` is the time for an answer; tries and pauses.
        replies: folder of earlier answers, each under the digest of its request; None keeps none.
        asked: requests that were sent.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    patience: Patience = field(default_factory=Patience)
    replies: Path | None = None
    asked: int = 0

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            raise ValueError(
                f"judge.url is {self.url!r}: give a URL that begins with http:// or https://, such as "
                "http://localhost:8000/v1"
            )
        if self.key is not None:
            self.key = self.key.strip()
            # The key itself must not be in a message, not even in that of the library that refuses it.
            if not (self.key.isascii() and self.key.isprintable()):
                raise ValueError(
                    "the judge's key has characters that a key cannot have: see to the variable judge.key_env"
                )
        self._opener = urllib.request.build_opener(_NoRedirect)

    def reply(self, prompt: str, about: str) -> str:
        """Return the text of the answer to one user message, at temperature 0.

        Args:
            prompt: the message.
            about: what the request is about, for messages, such as "row '17'".

        Raises:
            NoReply: the server refuses the request, or has not answered it after all tries.
        """
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        body = json.dumps({"model": self.model, "messages": messages, "temperature": 0}).encode()
        kept = (
            None
            if self.replies is None
            else self.replies / f"{hashlib.sha256(self.url.encode() + body).hexdigest()}.json"
        )
        if kept is not None and kept.exists():
            try:
                return json.loads(kept.read_bytes())["reply"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{kept} is no reply that was kept ({error}): remove it") from error
        text = self._asked(body, about)
        if kept is not None:
            write_bytes(kept, json.dumps({"model": self.model, "reply": text}).encode())
        return text

    def _asked(self, body: bytes, about: str) -> str:
        failure, wanted = "", 0.0
        for pause in (0.0, *self.patience.pauses()):
            time.sleep(max(pause, wanted))
            try:
                return self._answer(body)
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code}: {_read(error)}"
                wanted = _seconds(error.headers.get("Retry-After"))
                if error.code not in _AGAIN and error.code < 500:
                    raise NoReply(
                        f"the judge {self.model} at {self.url} refuses {about} ({failure}): see to judge.url, "
                        f"judge.llm and the key, or leave the row out; {_KEPT}"
                    ) from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                failure = str(error).strip() or type(error).__name__
        raise NoReply(
            f"the judge {self.model} at {self.url} did not answer about {about} in {self.patience.tries} tries "
            f"({failure}): start the same command again when it does; {_KEPT}"
        )

    def _answer(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", data=body, headers=headers)
        self.asked += 1
        with self._opener.open(request, timeout=self.patience.read) as response:
            content = response.read(_MOST_BYTES)
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            raise ValueError(f"no answer of a chat, but {_excerpt(content)}") from None
        if not isinstance(text, str):
            raise ValueError(f"an answer without text: {_excerpt(content)}")
        return text


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        whole = bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # no number as a port
        return False
    return whole and parts.scheme in ("http", "https") and " " not in text and text.isprintable()


def _seconds(retry_after: str | None) -> float:
    """Return the seconds that a server asks to wait, at most a minute; 0 for none, or a date."""
    return min(60.0, float(retry_after)) if retry_after and retry_after.isdecimal() else 0.0


def _read(answer: urllib.error.HTTPError) -> str:
    """Return what a failure says, or nothing where it breaks off."""
    try:
        return _excerpt(answer.read(2000))
    except (OSError, http.client.HTTPException):
        return "no text"


def _excerpt(content: bytes) -> str:
    text = " ".join(content.decode("utf-8", errors="replace").split())
    return repr(text[:120] + ("..." if len(text) > 120 else ""))
