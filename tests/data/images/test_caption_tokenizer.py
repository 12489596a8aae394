"""Strangers' captions and the tokenizers that they meet."""

import pickle

import open_clip
import pytest
import tokenizers
import torch
import transformers

from diffvision.data import ImageText
from diffvision.data.images import caption_tokenizer
from diffvision.data.images.caption_tokenizer import text_only
from diffvision.data.images.decode import MAX_CAPTION, clean_caption, is_blank
from diffvision.data.shards.sample import BadSample

MARKS = {
    "literal": "a <end_of_text> b",
    "upper": "a <START_OF_TEXT> b",
    "escaped": "a &lt;end_of_text&gt; b",
    "escaped six times": "a &amp;amp;amp;amp;amp;lt;end_of_text&amp;amp;amp;amp;amp;gt; b",
    "full width": "a ＜end_of_text＞ b",
    "control character": "a <end_\x01of_text> b",
    "terminal escape": "a <end_\x1b[0mof_text> b",
}
SCRIPTS = {
    "NUL": "a\0b",
    "bidi override": "a\u202ecba",
    "zero width": "a\u200bb\ufeff",
    "right to left": "שלום عالم",
    "joined emoji": "👩‍👩‍👧 at home",
    "combining": "e\u0301" + "\u0301" * 200,
    "endless": "x" * 1_000_000,
    "many words": "a red cat " * 100_000,
}


@pytest.fixture(scope="module")
def clip():
    return open_clip.get_tokenizer("ViT-B-32")


def check_row(row, tokenizer):
    """Fixed length, one start, one end, zeros after it."""
    ids = row.tolist()
    assert len(ids) == 77
    assert ids[0] == tokenizer.sot_token_id
    assert ids.count(tokenizer.sot_token_id) == ids.count(tokenizer.eot_token_id) == 1
    assert not any(ids[ids.index(tokenizer.eot_token_id) + 1 :])
    assert max(ids) == tokenizer.eot_token_id  # where OpenCLIP's models read the text's features


@pytest.mark.parametrize("kind", [*MARKS, *SCRIPTS])
def test_captions_of_any_kind_have_one_end_and_a_bounded_length(clip, kind):
    cleaned = clean_caption({**MARKS, **SCRIPTS}[kind])
    assert len(cleaned) <= MAX_CAPTION  # a tokenizer's time grows with the square of a word's letters
    (row,) = text_only(clip)([cleaned])
    check_row(row, clip)
    if kind in MARKS:
        assert "of" in clip.decode([t for t in row.tolist() if t])  # "end of text" is still there


@pytest.mark.parametrize("blank", ["", " \t\n", "\u3000", "&nbsp;", "&nbsp; &#160;", "\x01\x02", "\u200b", "\ufeff"])
def test_what_no_tokenizer_would_keep_is_an_empty_caption(blank):
    assert is_blank(blank)
    with pytest.raises(BadSample, match="empty caption"):
        clean_caption(blank)


def test_what_is_no_text_is_refused():
    with pytest.raises(BadSample, match="caption not UTF-8"):
        clean_caption("a \ud800 cat")  # JSON can hold it
    with pytest.raises(TypeError, match="a caption is bytes"):
        clean_caption(b"a cat")


def test_tokens_are_openclips_and_the_cache_is_bounded(clip, monkeypatch):
    words = [f"{a}{b}ing" for a in "bcdfghklmnprst" for b in ("aver", "oll", "und", "ixel", "ump", "ark")]
    captions = [" ".join(words[i : i + 6]) for i in range(0, len(words), 3)] + ["Tom's CAFÉ & 12 cats", "a_b-c!"]
    safe = text_only(clip)
    assert text_only(safe) is safe
    monkeypatch.setattr(caption_tokenizer, "CACHED_WORDS", 16)
    assert torch.equal(safe(captions), clip(captions))
    assert torch.equal(safe(captions, context_length=9), clip(captions, context_length=9))
    assert 0 < len(safe.cache) <= 16
    assert len(clip.cache) > 84  # it is not changed: it keeps every word
    assert "<end_of_text>" in clip.cache
    copied = pickle.loads(pickle.dumps(safe))
    assert torch.equal(copied(captions), clip(captions))


def test_training_batches_take_marks_for_text_whoever_gives_the_tokenizer(clip):
    kind = ImageText(None, None, clip)
    batch = kind.collate([{"image": torch.zeros(3, 1, 1), "text": MARKS["full width"]}])
    check_row(batch["text"][0], clip)


def test_tokenizers_of_hugging_face(tmp_path):
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=letters)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    bpe.train_from_iterator(["a cat and a dog"], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="</s>")
    wrapped = open_clip.tokenizer.HFTokenizer.__new__(open_clip.tokenizer.HFTokenizer)
    wrapped.__dict__ |= {"tokenizer_mode": "", "context_length": 12, "strip_sep_token": False, "tokenizer": fast}
    wrapped.clean_fn = open_clip.tokenizer.get_clean_fn("whitespace")
    safe, mark = text_only(wrapped), fast.eos_token_id
    assert mark in wrapped(["a </s> b a cat and a dog and"])[0]
    assert mark not in safe(["a </s> b a cat and a dog and"])[0]
    assert torch.equal(safe(["a cat and"]), wrapped(["a cat and"]))


def test_other_tokenizers_are_left_as_they_are(corpus):
    assert text_only(corpus.tokenize) is corpus.tokenize
