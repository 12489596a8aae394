"""English from packages: dictionaries of dictd and WordNet with their meanings, and which packages are found."""

import gzip

import pytest

import text
from dictionaries import dictd_entries, wordnet_entries

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


def write_dictd(folder, entries, compress=True, name="x"):
    """Write NAME.dict.dz and NAME.index as dictd has them: lines of word, offset and length in base 64."""
    data, lines = b"", []
    for words, meaning in entries:
        lines += [f"{word}\t{_number(len(data))}\t{_number(len(meaning.encode()))}" for word in words]
        data += meaning.encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.index").write_text("\n".join(sorted(lines)) + "\n")
    path = folder / f"{name}.dict{'.dz' if compress else ''}"
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def write_wordnet(folder):
    """Write WordNet's four data files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("noun", NOUNS), ("verb", ""), ("adj", ADJECTIVES), ("adv", "")):
        (folder / f"data.{name}").write_text(LICENCE + lines)
    return folder


HEAD = "00-database-short\n   A dictionary\n\n"
COAK = """\
Coak \\Coak\\ (k[=o]k), n.
   See {Coke}, n. [Obs.] --Shak.
   [1913 Webster]

   1. (Carp.) A kind of tenon, {caf['e]} or [ae]on [Also spelt
      {coag}.]
      [1913 Webster +PJC]

   2. Another . . . of
      two lines.
      [WordNet 1.5]
"""
VERB = "coak \\Coak\\, v. t.\n   To unite. [R.]\n   [1913 Webster]\n"
JARGON = "box set\nBS\n\n   <jargon> A {set}\nof boxes.\n\n   [{Jargon File}]\n\n   (1999-07-10)\n"


@pytest.mark.parametrize("compress", [True, False])
def test_a_word_of_dictd_with_all_its_meanings(tmp_path, compress):
    entries = [(["00-database-short"], HEAD), (["Coak", "coag"], COAK), (["coak"], VERB), (["box set", "BS"], JARGON)]
    words = dict(dictd_entries(write_dictd(tmp_path, entries, compress)))
    assert words == {
        "coak": (
            "Coak, n. See Coke, n. [Obs.] --Shak.\n"
            "1. (Carp.) A kind of tenon, café or æon [Also spelt coag.]\n"
            "2. Another ... of two lines.\n\n"
            "coak, v. t. To unite. [R.]"
        ),
        "box set": "box set, BS\n(jargon) A set of boxes.",
    }


def test_wordnet_has_each_meaning_once(tmp_path):
    assert dict(wordnet_entries(write_wordnet(tmp_path))) == {
        "entity": "entity (noun): that which is.\nentity (noun): another.",
        "physical entity": 'Physical entity (noun): a thing; "it | was a thing!". Also: thing.',
        "able": "able (adjective): having power.",
    }


def test_a_folder_is_searched_for_all_that_is_known(tmp_path):
    share = tmp_path / "usr/share"
    write_dictd(share / "dictd", [(["word"], "Word \\Word\\, n.\n   Meaning.\n")], name="gcide")
    write_wordnet(share / "wordnet")
    files = {
        "doc/python3.9/html/_sources/old.rst.txt": "old\n",
        "doc/python3.11/html/_sources/library/cats.rst.txt": "Cats\n====\n\nA *cat*.\n",
        "doc/python3.11/html/_sources/library/copy.rst.txt": "Cats\n----\n\nA cat.\n",
        "doc/python3.11/html/_sources/library/empty.rst.txt": ".. toctree::\n",
        "doc/linux-doc-6.1/html/_sources/mm/pages.rst.txt": "Pages\n",
        "doc/linux-doc-6.1/html/_sources/translations/zh/pages.rst.txt": "left out\n",
        "perl/5.36.0/pod/perlcat.pod": "=head1 CAT\n",
        "perl/5.36.0/pod/perltoc.pod": "=head1 left out\n",
        "doc/rust-doc/html/book/cats.html": "<html><nav>x</nav><main><p>Rust</p></main></html>",
        "doc/rust-doc/html/book/first-edition/cats.html": "<p>left out</p>",
        "doc/rust-doc/html/book/print.html": "<p>left out</p>",
        "doc/rust-doc/html/std/cats.html": "<p>left out</p>",
    }
    for name, content in files.items():
        (share / name).parent.mkdir(parents=True, exist_ok=True)
        (share / name).write_text(content)
    found = {name: dict(text.SOURCES[name].read(path)) for name, path in text.resolve(str(tmp_path)).items()}
    assert list(found) == ["gcide", "wordnet", "python-doc", "linux-doc", "perl-doc", "rust-doc"]
    assert found["gcide"] == {"word": "Word, n. Meaning."}
    copied = "Cats\n\nA cat."
    assert found["python-doc"] == {"library/cats": copied, "library/copy": copied, "library/empty": ""}
    assert [*found["linux-doc"], *found["perl-doc"], *found["rust-doc"]] == ["mm/pages", "perlcat", "book/cats"]
    assert found["rust-doc"]["book/cats"] == "Rust"
