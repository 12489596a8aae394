"""Synthetic text to be continued from its context."""

import pytest

from diffvision.cli import main
from diffvision.data import ShardSet
from diffvision.data.check import check_shards
from diffvision.data.text.documents import TextMember
from diffvision.data.text.tokenize import documents_of
from diffvision.lab.datasets.recall import make_recall, recall_documents


def read(directory):
    return list(documents_of(ShardSet(directory), TextMember("txt")))


def test_the_documents_are_written_as_they_are_made(tmp_path):
    made = make_recall(tmp_path / "a", documents=40, seed=3)
    documents = read(tmp_path / "a")
    assert documents == list(recall_documents(40, seed=3))
    assert made == f"{sum(map(len, documents)):,} characters"
    assert [n for n, text in enumerate(documents) if "#" not in text] == list(range(3, 40, 4))
    assert documents != list(recall_documents(40, seed=4))
    assert all(result.ok for result in check_shards(tmp_path))


def test_words_bound_the_documents_with_needles(tmp_path, capsys):
    assert main(["data", "make", "recall", str(tmp_path), "--documents", "30", "--words", "30"]) == 0
    assert "characters" in capsys.readouterr().out
    assert all(len(text.split()) <= 36 for text in read(tmp_path) if "#" in text)


def test_bad_settings_are_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="documents is 3: it must be at least"):
        make_recall(tmp_path, documents=3)
    with pytest.raises(ValueError, match="words is 5: it must be at least 12"):
        make_recall(tmp_path, words=5)
    assert main(["data", "make", "recall", str(tmp_path), "--copies", "2"]) == 2
    assert "unrecognized arguments: --copies 2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
