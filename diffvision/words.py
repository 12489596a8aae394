"""The words of a text, for comparing captions, answers and names."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = "#%\N{ARABIC PERCENT SIGN}\N{PER MILLE SIGN}&@\N{SECTION SIGN}"  # that Unicode counts as punctuation
_QUOTES = "`´"  # that Unicode counts as symbols
_JOINERS = "\u200c\u200d"  # in words of some scripts, and in emoji
_MINUS = re.compile(r"(?<![\w.])[-\N{MINUS SIGN}\N{EN DASH}\N{FULLWIDTH HYPHEN-MINUS}](?=\.?\d)")
_FULL_STOP = re.compile(r"\.(?!\d)|(?<=[^\W\d])\.")  # a point that is not a number's


def words(text: str) -> list[str]:
    """Return the words, numbers and symbols of a text.

    Two texts have the same ones if they differ only in case, in composed or decomposed characters (NFC, NFD),
    punctuation, white space and how emoji are presented. Combining marks, emoji and symbols count, as do "#", "%", "&",
    "@", a number's sign and its decimal point: "C++" and "C#" are not "C".
    """
    text = _FULL_STOP.sub(" ", _MINUS.sub("\N{MINUS SIGN}", fold(text)))
    return text.translate(_REPLACEMENTS).split()


def composed(text: str) -> str:
    """Return a text with composed characters (NFC); macOS decomposes those of file names."""
    return unicodedata.normalize("NFC", text)


def fold(text: str) -> str:
    """Return a text without differences of case and of composed or decomposed characters."""
    return composed(unicodedata.normalize("NFD", text).casefold())


def is_punctuation(character: str) -> bool:
    """Return whether a character separates words or quotes them, and means nothing else."""
    kind, plain = unicodedata.category(character), unicodedata.normalize("NFKC", character)
    return plain not in _SYMBOLS if kind[0] == "P" else plain in _QUOTES


class _Replacements(dict[int, str]):
    """A table for `str.translate` that is filled as characters are looked up."""

    def __missing__(self, code: int) -> str:
        self[code] = _replace(chr(code))
        return self[code]


def _replace(character: str) -> str:
    """Return a space for a character that separates words, and spaces around a symbol, which is a word by itself."""
    kind, name = unicodedata.category(character), unicodedata.name(character, "")
    if character in (".", *_JOINERS) or name.startswith("TAG "):  # of flags
        return character
    if character == "\N{ZERO WIDTH SPACE}" or kind[0] == "Z" or kind in ("Cc", "Cs") or is_punctuation(character):
        return " "
    if kind == "Cf" or name.startswith("VARIATION SELECTOR"):
        return ""
    return character if kind[0] in "LMN" else f" {character} "


_REPLACEMENTS = _Replacements()
