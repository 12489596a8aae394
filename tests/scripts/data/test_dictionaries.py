"""Dictionaries in the formats of dictd and WordNet become words with their meanings."""

import pytest

from dictionaries import dictd_entries, wordnet_entries

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
def test_a_word_of_dictd_with_all_its_meanings(tmp_path, compress, write_dictd):
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


def test_wordnet_has_each_meaning_once(tmp_path, write_wordnet):
    assert dict(wordnet_entries(write_wordnet(tmp_path))) == {
        "entity": "entity (noun): that which is.\nentity (noun): another.",
        "physical entity": 'Physical entity (noun): a thing; "it | was a thing!". Also: thing.',
        "able": "able (adjective): having power.",
    }
