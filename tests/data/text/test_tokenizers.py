"""Tokenizers: exact round trips, text that stays text, files that say where the end of a document is."""

import json
import pickle

import pytest
import tokenizers

from diffvision.data import Tokenizer, load_tokenizer, train_tokenizer
from diffvision.data.text.tokenizers import END

TEXTS = [
    "def add(first, second):\n    return first + second\n",
    "the end of the text, and the text of the end\n",
    "Größe 東京 \U0001f600 \x00 \r\n\t tabs",
]
MERGED = [" t", "nd", "he", " the", "co", "ex", "end", "eco", "fi", "of"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, 300)


@pytest.mark.parametrize("text", [*TEXTS, "", "never seen: ßß\u2028 \ufeff", f"a{END}b", END])
def test_any_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= number < tokenizer.vocab_size for number in ids)


def test_training_gives_the_same_in_every_process_and_as_many_tokens_as_there_are(tokenizer):
    assert [tokenizer.decode([number]) for number in range(257, 267)] == MERGED
    assert train_tokenizer(TEXTS * 3, 300).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(TEXTS, 300).fingerprint != tokenizer.fingerprint
    assert (tokenizer.vocab_size, train_tokenizer(["ab"], 5000).vocab_size) == (300, 257)


def test_saved_and_loaded_or_in_a_worker_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    tokenizer.save(tmp_path / "deep" / "other.json")
    paths = (tmp_path, tmp_path / "tokenizer.json", str(tmp_path / "deep" / "other.json"))
    for copy in (*map(load_tokenizer, paths), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.fingerprint == tokenizer.fingerprint
        for name in ("eos_id", "start_id", "vocab_size"):
            assert getattr(copy, name) == getattr(tokenizer, name)
        assert copy.encode(f"a{END}b") == tokenizer.encode(f"a{END}b")
    assert not list(tmp_path.glob("*.part"))


def words(tokens, special=()):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(special))
    return backend


def test_padding_and_cutting_in_a_file_are_not_followed():
    backend = words({"?": 0, "a": 1, "</s>": 2})
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("a a a a") == [1, 1, 1, 1]
    assert tokenizer.eos == "</s>"


@pytest.mark.parametrize("backend", [{"?": 0, "a": 1, END: 2}, {"?": 0, "a": 1}], ids=["a word", "added, not special"])
def test_the_end_written_out_is_text_even_where_it_is_a_word(backend):
    backend = words(backend)
    backend.add_tokens([END])
    tokenizer = Tokenizer(backend)
    assert backend.encode(END).ids == [2]
    assert tokenizer.encode(f"a {END} a") == [1, 0, 0, 1]


def test_the_end_is_found_where_hugging_face_tells_it(tmp_path):
    words({"?": 0, "a": 1}, ["<stop>", END]).save(str(tmp_path / "tokenizer.json"))
    for eos in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(tmp_path).eos_id == 2
    load_tokenizer(tmp_path).save(tmp_path / "again" / "tokenizer.json")
    assert load_tokenizer(tmp_path / "again").eos_id == 2


def test_ids_may_leave_gaps():
    assert Tokenizer(words({"?": 0, "a": 7, END: 3})).vocab_size == 8


def test_what_cannot_be_used_is_said(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for act, message in (
        (lambda: load_tokenizer(tmp_path), r"tokenizer\.json is not a file"),
        (lambda: load_tokenizer(tmp_path / "absent"), r"no tokenizer at .*absent"),
        (lambda: Tokenizer(words({"?": 0})), "eos of the tokenizer must be"),
        (lambda: Tokenizer(words({"?": 0, END: 1}), bos="<s>"), "bos of the tokenizer must be"),
        (lambda: train_tokenizer(TEXTS, 256), "vocab_size .* got 256"),
        (lambda: train_tokenizer(["", ""], 300), "no text to train"),
        (lambda: tokenizer.decode([5, 300]), "got 300"),
        (lambda: tokenizer.encode("half a pair: \ud800"), "not UTF-8: character 14"),
        (lambda: train_tokenizer(["good", "ab\ud800c"], 300), "not UTF-8: character 3"),
    ):
        with pytest.raises(ValueError, match=message):
            act()
