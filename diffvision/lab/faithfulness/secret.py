"""A secret, taken out of texts that could repeat it."""

from __future__ import annotations

import base64
import html
import json
import re
import urllib.parse

_SHORTEST = 6  # characters: shorter keys are placeholders, such as EMPTY, and may be ordinary words
_PART = 8  # characters of the secret in a row that are taken out of a message
_STAND_IN = "***"


class Secret:
    """Takes a secret out of texts, in the ways in which a server or a library may write it.

    Those are as it is, with the escapes of URLs, JSON, Python and HTML, and in hexadecimal or base64, also as a part of
    a longer text in base64.
    """

    def __init__(self, secret: str) -> None:
        self._pattern = None
        if len(secret) >= _SHORTEST:
            forms = sorted(_forms(secret), key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, forms)), re.IGNORECASE)
        parts = [re.escape(secret[start : start + _PART]) for start in range(len(secret) - _PART + 1)]
        self._parts = re.compile(f"(?={'|'.join(parts)})", re.IGNORECASE) if parts else None  # they overlap

    def removed(self, text: str) -> str:
        """Return a text without the secret."""
        return text if self._pattern is None else self._pattern.sub(_STAND_IN, text)

    def removed_in_parts(self, text: str) -> str:
        """Return a text without the secret and its longer parts, which are left where it is cut or escaped twice."""
        text = self.removed(text)
        pieces: list[str] = []
        end = 0
        for part in self._parts.finditer(text) if self._parts else ():
            if part.start() > end or not pieces:
                pieces.append(text[end : part.start()])
            end = part.start() + _PART
        return _STAND_IN.join([*pieces, text[end:]])


def _forms(secret: str) -> set[str]:
    content = secret.encode()
    return {
        secret,
        urllib.parse.quote(secret),
        urllib.parse.quote_plus(secret),
        "".join(f"%{byte:02x}" for byte in content),
        json.dumps(secret)[1:-1],
        "".join(f"\\u{byte:04x}" for byte in content),
        json.dumps(secret)[1:-1].replace("/", "\\/"),
        repr(secret)[1:-1],
        html.escape(secret),
        content.hex(),
        *(form for before in range(3) for form in _in_base64(content, before)),
    }


def _in_base64(content: bytes, before: int) -> list[str]:
    """Return the characters of base64 that only the content decides, where that many bytes are before it."""
    coded = base64.b64encode(bytes(before) + content + bytes(2))
    certain = coded[-(-before * 8 // 6) : (before + len(content)) * 8 // 6].decode()
    return [certain, certain.translate(str.maketrans("+/", "-_"))]
