"""Synthetic text to be continued from its context."""

import hashlib

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


@pytest.mark.parametrize("settings", [{"documents": 3}, {"words": 11}])
def test_too_few_documents_or_words_are_refused(settings, tmp_path):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        make_recall(tmp_path / "made", **settings)
    assert not (tmp_path / "made").exists()
