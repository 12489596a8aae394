"""Dictionaries in the formats of dictd and WordNet."""

import gzip

import pytest

DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LICENCE = "  1 This software and database is being provided to you\n"
NOUNS = """\
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 ~ 00002137 n 0000 | that which is  
00002137 03 n 02 Physical_entity 0 thing 1 001 @ 00001740 n 0000 | a thing; "it | was a thing!"
00002138 03 n 01 entity 1 000 | another.
"""  # noqa: W291  as WordNet has it
ADJECTIVES = "00001741 00 s 01 able(p) 0 000 | having power  \n"


def _number(value):
    digits = DIGITS[value % 64]
    return digits if value < 64 else _number(value // 64) + digits


def _dictd(folder, entries, compress=True):
    """Write x.dict.dz and x.index as dictd has them: lines of word, offset and length in base 64."""
    data, lines = b"", []
    for words, text in entries:
        lines += [f"{word}\t{_number(len(data))}\t{_number(len(text.encode()))}" for word in words]
        data += text.encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "x.index").write_text("\n".join(sorted(lines)) + "\n")
    path = folder / ("x.dict.dz" if compress else "x.dict")
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def _wordnet(folder):
    """Write WordNet's four data files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("noun", NOUNS), ("verb", ""), ("adj", ADJECTIVES), ("adv", "")):
        (folder / f"data.{name}").write_text(LICENCE + lines)
    return folder


@pytest.fixture(scope="session")
def write_dictd():
    """Return the function that writes a dictionary of dictd."""
    return _dictd


@pytest.fixture(scope="session")
def write_wordnet():
    """Return the function that writes WordNet's data files."""
    return _wordnet
