"""Needle texts and retrieval: an oracle finds all, a blind model what chance gives."""

import dataclasses
import itertools
import re

import pytest
from language_fixtures import Copier

from diffvision.data.datasets.needle_text import FORMS, compose_to_length
from diffvision.evaluation.language.needle import needle, needle_samples


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(("needles", "queries"), [(1, 1), (6, 2)])
def test_places_are_where_the_needles_are(form, needles, queries, draw):
    settings = {"length": 900, "needles": needles, "queries": queries, "depth": 0.25}
    written = compose_to_length(FORMS[form], draw, len, **settings)
    assert 800 < len(written.text) <= 900
    assert written.text[slice(*written.answers[0])] in written.text[slice(*written.needle)].strip()
    assert written.text[written.question] == "\n"
    assert len(written.answers) == queries
    for start, stop in written.answers:
        assert written.text[: written.question].count(written.text[start:stop]) == 1
        assert start > written.question


@pytest.mark.parametrize(("needles", "queries"), [(1, 1), (6, 2)])
@pytest.mark.parametrize("depth", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_needles_start_at_the_border_nearest_to_their_depth_in_tokens(needles, queries, depth, words):
    """Sentences of 3 tokens and then of 62, between which a count of sentences is far from one of tokens."""
    sentences = [f"Go {number}." for number in range(40)] + [f"{'word ' * 60}{number}." for number in range(40)]
    form = dataclasses.replace(FORMS["text"], haystack=lambda draw: iter(sentences))
    settings = {"length": 450, "depth": depth, "needles": needles, "queries": queries, "samples": 3, "form": form}
    for sample in needle_samples(words, **settings):
        assert 380 < len(sample.tokens) <= 450
        assert sample.tokens[0] == words.eos_id
        context = words.decode(sample.tokens[1 : sample.question])
        number = words.decode(sample.tokens[slice(*sample.needle)]).rpartition("is ")[2]
        pieces = [len(words.encode(piece)) for piece in re.split(r"(?<=\.)", context)]
        asked = context[: context.index(number)].count(".")
        others = pieces[:asked] + pieces[asked + queries :]  # the needles that are asked for do not count
        borders = [0, *itertools.accumulate(others)]
        assert sample.needle[0] == 1 + borders[asked]
        assert abs(borders[asked] - depth * borders[-1]) == min(abs(end - depth * borders[-1]) for end in borders)


def test_an_oracle_finds_every_needle(words):
    for form in FORMS:
        settings = {"lengths": (150, 250), "needles": 4, "queries": 2, "samples": 4, "form": form}
        metrics = needle(Copier(4096), words, **settings)
        assert metrics["accuracy"] == metrics["all_right"] == 1
        assert len(metrics) == 2 + 2 * 5
        assert metrics["accuracy/250/0.25"] == 1


def test_a_blind_model_has_chance(words):
    """One number of 90 said always: right in 1 of 90 (300 samples: a mean of 3.3)."""
    blind = Copier(1024, blind=words.encode(" 42")[0])
    metrics = needle(blind, words, lengths=(40,), depths=(0.0, 0.5), samples=150, form="synthetic", batch_size=50)
    assert 0 < metrics["accuracy"] < 8 / 300
    assert metrics["accuracy"] == (metrics["accuracy/40/0"] + metrics["accuracy/40/0.5"]) / 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"length": 25, "needles": 6, "queries": 2}, "context of 24"),
        ({"needles": 2, "queries": 3}, "queries"),
        ({"depth": 1.5}, "depth"),
    ],
)
def test_needles_that_do_not_fit_are_refused(settings, named, words):
    with pytest.raises(ValueError, match=named):
        list(needle_samples(words, **{"length": 100, "depth": 0, "form": "synthetic"} | settings))


def test_a_tokenizer_without_borders_is_refused():
    class Pairs:
        def encode(self, text):
            return [hash(text[place : place + 2]) for place in range(0, len(text), 2)]

    with pytest.raises(ValueError, match="into one token"):
        list(needle_samples(Pairs(), length=60, depth=0.5, samples=4, form="synthetic"))
