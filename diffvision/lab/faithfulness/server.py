"""Replies of a server with OpenAI's interface (`POST /chat/completions`), asked again after failures, and kept.

aiohttp has one time limit for a request in all, whatever pace its answer arrives at. `secret` keeps the key out of
messages and files.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diffvision.data.shards.remote import Patience
from diffvision.evaluation.output import write_bytes
from diffvision.lab.faithfulness.secret import Secret

if TYPE_CHECKING:
    import aiohttp

_AGAIN = (408, 409, 425, 429)  # and all from 500 on: a server may answer later
_MOST_BYTES = 1 << 24  # of an answer
_KEPT = "with --output or --cache nothing is judged twice"
SYSTEM = "You are a helpful assistant."


class NoReply(ValueError):
    """A server did not answer a request, or refused it."""


class _Failure(Exception):
    """A request without a reply: why, without the key, and how a server wants to be asked again.

    Attributes:
        may_pass: whether asking again could help.
        wait: seconds before that, as the server says.
    """

    def __init__(self, why: str, *, may_pass: bool = True, wait: float = 0.0) -> None:
        super().__init__(why)
        self.may_pass, self.wait = may_pass, wait


@dataclass
class ChatServer:
    """A server, and how it is asked.

    Attributes:
        url: up to /chat/completions, such as http://localhost:8000/v1.
        model: its name at the server.
        key: sent as a bearer token; None for none. It is in no message and no file, also where a server repeats it.
        patience: `read` is the time for a request in all, from the connection to the last byte of the reply; `total`
            for all tries and pauses.
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
        if self.key is not None:
            self.key = self.key.strip()
            # The key itself must not be in a message, not even in that of the library that refuses it.
            if not (self.key.isascii() and self.key.isprintable()):
                raise ValueError(
                    "the judge's key has characters that a key cannot have: see to the variable judge.key_env"
                )
        self._secret = Secret(self.key or "")
        if not _is_url(self.url):
            shown = re.sub(r"(?<=//).*@|\?.*", "***", self._secret.removed(self.url))
            raise ValueError(
                f"judge.url is {shown!r}: give a URL that begins with http:// or https://, without user and query, "
                "such as http://localhost:8000/v1"
            )

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
                if not kept.is_file():
                    raise ValueError("not a file")  # a pipe would be waited for
                return json.loads(kept.read_bytes())["reply"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{kept} is no reply that was kept ({error}): remove it") from error
        text = self._secret.removed(self._asked(body, about))
        if kept is not None:
            write_bytes(kept, json.dumps({"model": self.model, "reply": text}).encode())
        return text

    def _asked(self, body: bytes, about: str) -> str:
        deadline = time.monotonic() + self.patience.total
        failure = _Failure("no time")
        tries = 0
        for pause in (0.0, *self.patience.pauses()):
            pause = max(pause, failure.wait)
            if (left := deadline - time.monotonic() - pause) <= 0:
                break
            time.sleep(pause)
            tries += 1
            answer = asyncio.run(self._answer(body, min(left, self.patience.read)))
            if isinstance(answer, str):
                return answer
            failure = answer
            if not failure.may_pass:
                raise NoReply(
                    f"the judge {self.model} at {self.url} refuses {about} ({failure}): see to judge.url, "
                    f"judge.llm and the key, or leave the row out; {_KEPT}"
                )
        raise NoReply(
            f"the judge {self.model} at {self.url} did not answer about {about} in {tries} tries "
            f"({failure}): start the same command again when it does; {_KEPT}"
        )

    async def _answer(self, body: bytes, seconds: float) -> str | _Failure:
        """Return the reply to one request, or a failure; a raised one could show the API key in its traceback."""
        import aiohttp

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        self.asked += 1
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=seconds), auto_decompress=False, trust_env=True
                ) as session,
                # A key must not follow a redirect to another server.
                session.post(
                    f"{self.url.rstrip('/')}/chat/completions", data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                status, wait = response.status, _seconds(response.headers.get("Retry-After"))
                content = await _content(response.content)
        except TimeoutError:
            return _Failure(f"no whole reply within {seconds:.4g} s")
        except OSError as error:
            return _Failure(self._secret.removed(str(error).strip()) or type(error).__name__)
        except (aiohttp.ClientError, ValueError) as error:
            # Its words can be the server's, cut anywhere.
            return _Failure(f"no whole answer in HTTP: {type(error).__name__}")
        if content is None:
            return _Failure(f"a reply of more than {_MOST_BYTES:,} bytes", may_pass=False)
        if status >= 300:
            may_pass = status in _AGAIN or status >= 500
            return _Failure(f"HTTP {status}: {self._excerpt(content)}", may_pass=may_pass, wait=wait)
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return _Failure(f"no answer of a chat, but {self._excerpt(content)}")
        return text if isinstance(text, str) else _Failure(f"an answer without text: {self._excerpt(content)}")

    def _excerpt(self, content: bytes) -> str:
        # The key goes before the text is cut, which could leave a part of it.
        text = " ".join(self._secret.removed_in_parts(content.decode("utf-8", errors="replace")).split())
        return repr(text[:120] + ("..." if len(text) > 120 else ""))


async def _content(stream: aiohttp.StreamReader) -> bytes | None:
    """Return what a server sends; None if that is too much."""
    content = bytearray()
    async for part in stream.iter_any():
        content += part
        if len(content) > _MOST_BYTES:
            return None
    return bytes(content)


def _is_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        whole = bool(parts.hostname) and parts.port != 0 and not parts.query and parts.username is None
    except ValueError:  # no number as a port
        return False
    return whole and parts.scheme in ("http", "https") and " " not in text and text.isprintable()


def _seconds(retry_after: str | None) -> float:
    """Return the seconds that a server asks to wait, at most a minute; 0 for none, or a date."""
    return min(60.0, float(retry_after)) if retry_after and retry_after.isdecimal() else 0.0
