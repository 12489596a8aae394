"""Dictionaries -> entries as plain text: the format of dictd, and WordNet's. Where they come from is in `text`."""

import gzip
import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from diffvision.files import decoded

__all__ = ["dictd_entries", "wordnet_entries"]

_DIGITS = {c: n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
_ORIGIN = re.compile(r"\s*\[(?:1913 Webster|Webster|WordNet|PJC|AS|Century|Wiktionary|RDH|MW10|RHUD)\b[^\]\[]{0,40}\]")
_SYLLABLES = re.compile(r"\s*\\[^\\]{1,80}\\(?:\s*\((?:[^()]*[\[?;=\"`*][^()]*)\))?")
_ACCENTED = re.compile(r"\[(?:(['`^\"~,=.-])([A-Za-z]|ae|AE|oe|OE|oo)|([A-Za-z])([\^]))\]")
_MARKS = dict(zip("'`^\"~,=.-", "\u0301\u0300\u0302\u0308\u0303\u0327\u0304\u0307\u0304", strict=True))
_LETTERS = {
    "ae": "æ",
    "AE": "Æ",
    "oe": "œ",
    "OE": "Œ",
    "eth": "ð",
    "thorn": "þ",
    "yogh": "ȝ",
    "deg": "°",
    "root": "√",
    "aum": "ä",
    "oum": "ö",
    "uum": "ü",
    "imac": "ī",
    "frac12": "½",
    "frac14": "¼",
    "frac34": "¾",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "pi": "π",
    "pound": "£",
    "sect": "§",
    "prime": "′",
    "times": "×",
    "divide": "÷",
    "asper": "‘",
    "add": "ạ",
    "udd": "ụ",
    "ng": "ŋ",
}
_NAMED = re.compile(r"\[(" + "|".join(_LETTERS) + r")\]")
_SENSE = re.compile(r"(?:\d+\. |\([a-z]\) |Syn: |Note: |Usage: )")
_PARTS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_WORDNET_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")


def dictd_entries(dictionary: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (word in lower case, text) for each word of a dictionary of dictd, in the order of its file.

    Args:
        dictionary: x.dict.dz or x.dict, with x.index next to it: lines of word, offset and length in base 64.

    Raises:
        ValueError: the index is missing, or one of the files is damaged.
    """
    dictionary = Path(dictionary)
    index = dictionary.with_name(dictionary.name.removesuffix(".dz").removesuffix(".dict") + ".index")
    if not index.is_file():
        raise ValueError(f"{dictionary} has no index next to it: copy {index.name} of the same package")
    words: dict[tuple[int, int], str] = {}
    try:
        data = (gzip.decompress if dictionary.suffix == ".dz" else bytes)(dictionary.read_bytes())
        for line in decoded(index.read_bytes(), index).splitlines():
            word, *position = line.split("\t")
            # Words with 00 are about the database; one entry is listed under each of its words.
            if not word.startswith("00"):
                words.setdefault((_number(position[0]), _number(position[1])), word)
    except (EOFError, gzip.BadGzipFile, zlib.error, LookupError) as error:
        raise ValueError(f"{dictionary} or its index is damaged ({error}): get its package again") from None
    entries: dict[str, list[str]] = defaultdict(list)
    for (offset, length), word in sorted(words.items()):
        text = data[offset : offset + length].decode("utf-8", errors="replace")
        entries[(_headword(text) or word).lower()].append(_entry(text))
    for word, texts in entries.items():
        yield word, "\n\n".join(dict.fromkeys(text for text in texts if text))


def wordnet_entries(directory: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (word in lower case, text) for the words of WordNet's files; each meaning is under the first of its words.

    The format is that of wndb(5): offset, file, part of speech, words, pointers, then the gloss behind a bar.
    """
    entries: dict[str, list[str]] = defaultdict(list)
    for path in (Path(directory) / name for name in _WORDNET_FILES):
        with open(path, encoding="utf-8") as file:
            for line in file:
                # The licence stands at the head, indented.
                if not line.startswith(" "):
                    word, meaning = _meaning(line)
                    entries[word.lower()].append(meaning)
    for word, meanings in entries.items():
        yield word, "\n".join(meanings)


def _meaning(line: str) -> tuple[str, str]:
    """Return the first word of a line of WordNet, and its meaning as a sentence."""
    fields, _, gloss = line.partition(" | ")
    _, _, part, count, *rest = fields.split(" ")
    words = [re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in rest[: 2 * int(count, 16) : 2]]
    also = f" Also: {', '.join(words[1:])}." if len(words) > 1 else ""
    gloss = gloss.strip()
    return words[0], f"{words[0]} ({_PARTS[part]}): {gloss}{'' if gloss.endswith(('.', '!', '?')) else '.'}{also}"


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * 64 + _DIGITS[digit]
    return number


def _headword(text: str) -> str:
    """Return what stands before the syllables, or in the first line alone."""
    line = text.lstrip("\n").partition("\n")[0]
    word = re.split(r"\s+\\|, |\s{2,}", line)[0].strip()
    return "" if not word or len(word) > 60 else word


def _entry(text: str) -> str:
    """Return an entry without marks of origin, syllables and links; a line for each paragraph and numbered sense."""
    paragraphs: list[str] = []
    for number, block in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        lines: list[str] = []
        if number == 0 and not re.search(r"^\s", block, re.MULTILINE):
            # FOLDOC gives an entry's other words a line each.
            block = block.replace("\n", ", ")
        for line in block.splitlines():
            if lines and not _SENSE.match(line.strip()):
                lines[-1] += " " + line.strip()
            else:
                lines.append(line.strip())
        paragraphs.extend(cleaned for line in lines if (cleaned := _plain(line)))
    return "\n".join(paragraphs)


def _plain(text: str) -> str:
    text = _SYLLABLES.sub("", text)
    text = _ACCENTED.sub(_add_accent, _NAMED.sub(lambda m: _LETTERS[m[1]], text))
    text = _ORIGIN.sub("", text)
    # FOLDOC's subject, its origin and the date of a change.
    text = re.sub(r"^<([^<>]+)>", r"(\1)", text.strip())
    text = "" if re.fullmatch(r"\(\d{4}-\d{2}-\d{2}\)|\[\{?[^\]]{1,60}\]", text) else text
    return re.sub(r"\s+", " ", text.replace("{", "").replace("}", "").replace(" . . .", " ...")).strip()


def _add_accent(match: re.Match[str]) -> str:
    mark, letters = (match[1], match[2]) if match[1] else ("breve", match[3])
    letters = _LETTERS.get(letters, letters)
    return unicodedata.normalize("NFC", letters[0] + _MARKS.get(mark, "\u0306") + letters[1:])
