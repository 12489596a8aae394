"""Synthetic text to be continued from its context."""

import hashlib
import re

import pytest

from diffvision.data import ShardSet
from diffvision.data.check import check_shards
from diffvision.data.datasets.recall import make_recall, recall_documents
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import documents_of


def read(directory):
    return list(documents_of(ShardSet(directory), TextMember("txt")))


def test_the_documents_are_written_as_they_are_made(tmp_path):
    made = make_recall(tmp_path / "a", documents=40, seed=3)
    documents = read(tmp_path / "a")
    assert documents == list(recall_documents(40, seed=3))
    assert hashlib.sha256("\n".join(documents).encode()).hexdigest()[:16] == "1dc7cdbf2a9b94fd"  # as ever
    assert made == f"{sum(map(len, documents)):,} characters"
    assert [n for n, text in enumerate(documents) if "#" not in text] == list(range(3, 40, 4))
    assert documents != list(recall_documents(40, seed=4))
    assert all(result.ok for result in check_shards(tmp_path))


def test_training_documents_are_of_the_same_kind():
    documents = [text for text in recall_documents(40, 120) if "#" in text]
    assert len(set(documents)) == 30
    for number, document in enumerate(documents):
        facts = dict(re.findall(r"# (\w+) (\d+);", document))
        asked = re.findall(r"\? (\w+) (\d+);", document)
        assert 1 <= len(facts) <= 16
        assert all(facts[city] == value for city, value in asked)
        if number % 3:  # told and asked in turn: no question before its fact
            assert all(document.index(f"# {city} ") < document.index(f"? {city} ") for city, _ in asked)
        else:  # hidden: all the questions at the end, one for each
            assert sorted(city for city, _ in asked) == sorted(facts)
            assert "#" not in document.partition("\n")[2]
        assert len(document.split()) <= 120 + 6


@pytest.mark.parametrize("settings", [{"documents": 3}, {"words": 11}])
def test_too_few_documents_or_words_are_refused(settings, tmp_path):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        make_recall(tmp_path / "made", **settings)
    assert not (tmp_path / "made").exists()
