"""A model's tokenizer made safe for captions from the internet: no special tokens in text, and bounded memory.

Two kinds of OpenCLIP's tokenizers are recognised by their attributes, because `data` does not import OpenCLIP:
`SimpleTokenizer` (CLIP's, byte pairs in Python) and those that wrap one of Hugging Face. Any other callable is left as
it is.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

LARGE_CUT = 0.05  # share of captions; where more are cut, training and evaluation warn
CACHED_WORDS = 1 << 16
"""Words whose byte pairs are remembered: about 15 MB at most. English captions have some 20,000 of nearly all words."""


class BoundedCache(dict):
    """A dictionary that is emptied when it is full: noting each use would slow down the common case, a known word."""

    def __setitem__(self, key: str, value: str) -> None:
        if len(self) >= CACHED_WORDS:
            self.clear()
        super().__setitem__(key, value)


def text_only(tokenizer: Any) -> Any:
    """Return the tokenizer with special tokens in captions as plain text, and a bounded cache.

    All other tokens stay the same. OpenCLIP's tokenizer takes a literal `<end_of_text>` for the end of the text, where
    the model reads its features: the writer of a caption would choose where. It cleans the text before, and that makes
    special tokens of HTML escapes in any number of layers, of full-width letters, and of text with control characters
    in between; so special tokens have to become text here, after all cleaning.
    """
    if isinstance(getattr(tokenizer, "cache", None), BoundedCache):
        return tokenizer
    if hasattr(tokenizer, "bpe_ranks") and isinstance(getattr(tokenizer, "cache", None), dict):
        safe = copy(tokenizer)
        # The tokenizer's cache has each special token as a whole word; without it they are split as any other word.
        safe.cache = BoundedCache()
        return safe
    inner = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "split_special_tokens"):
        safe = copy(tokenizer)
        safe.tokenizer = copy(inner)
        safe.tokenizer.split_special_tokens = True
        return safe
    return tokenizer


def are_cut(tokenizer: Any, captions: Sequence[str], tokens: Any) -> list[bool]:
    """Return which captions have more tokens than a tokenizer keeps; False where its kind is not known.

    Only captions that could be too long are tokenised again: by their last token, or by their bytes.

    Args:
        tokenizer: one of `text_only`.
        captions: B texts.
        tokens: what the tokenizer made of them, [B, L].
    """
    inner, length = getattr(tokenizer, "tokenizer", None), tokens.shape[-1]
    if hasattr(tokenizer, "bpe_ranks"):
        full = (tokens[:, -1] != 0).tolist()
        return [of_row and len(tokenizer.encode(one)) + 2 > length for one, of_row in zip(captions, full, strict=True)]
    if inner is not None and hasattr(inner, "split_special_tokens"):
        long = [len(one.encode(errors="replace")) + 2 > length for one in captions]
        clean = getattr(tokenizer, "clean_fn", str)
        return [
            may and len(inner(clean(one), verbose=False).input_ids) > length
            for one, may in zip(captions, long, strict=True)
        ]
    return [False] * len(captions)
