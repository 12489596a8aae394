"""The words of texts: which texts count as equal."""

import unicodedata

import pytest

from diffvision.words import fold, words


@pytest.mark.parametrize(
    "texts",
    [
        ("C", "C++", "C#", "C+", "C&C", "C@C"),
        ("लड़का", "लड़की", "लड़के", "लड़क"),  # boy, girl, boys
        ("שָׁלוֹם", "שלום"),  # with and without vowels
        ("my 🐶", "my 🐱", "my 🐶🐱", "my"),
        ("👩‍🚀", "👩🚀", "👩🏽‍🚀"),  # an astronaut, a woman and a rocket
        ("🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "🇩🇪", "🇪🇩", "1️⃣", "1"),
        ("5%", "5‰", "٥%", "٥٪", "٥", "§ 5", "5"),
        ("\U0001fae9", "\U0001fac6"),  # younger than Python's table of characters
    ],
)
def test_texts_that_differ_in_marks_emoji_or_symbols(texts):
    assert len({" ".join(words(text)) for text in texts}) == len(texts)


@pytest.mark.parametrize(
    "texts",
    [
        ("A dog, running!", "a  dog running", " “A DOG” - (running).\n", "a_dog\u00a0running", "a `dog` running…"),
        ("Straße", "STRASSE", "strasse"),
        ("ΟΔΟΣ", "οδος", "οδός".replace("ό", "ο")),  # a sigma at the end
        ("❤ it", "❤️ it", "❤︎ it"),
        ("-5", "−5", "–5", "－5"),
        ("C++", "c + +"),
        ("日本。語", "日本 語"),
        ("co\u00adop", "coop", "\ufeffcoop"),
    ],
)
def test_texts_that_differ_in_case_punctuation_and_space(texts):
    assert len({" ".join(words(text)) for text in texts}) == 1


@pytest.mark.parametrize("text", ["Crème brûlée", "क़लम", "한국어", "Việt Nam", "Ångström", "שָׁלוֹם"])
def test_composed_and_decomposed_texts_are_equal(text):
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    assert len({" ".join(words(form)) for form in forms}) == len({fold(form) for form in forms}) == 1


def test_points_stay_in_numbers_alone():
    assert words("U.S. dogs. 3.5 m, .5. v1.5") == ["u", "s", "dogs", "3.5", "m", ".5", "v1.5"]
    assert words("...") == []
