"""A model's tokenizer made fit for strangers' captions: what is written is text, and memory does not grow with it.

Two kinds of OpenCLIP's tokenizers are known by what they have, for the data room knows no host: `SimpleTokenizer`
(CLIP's own, byte pairs in Python) and those that wrap one of Hugging Face. Any other callable is left as it is.
"""

from copy import copy
from typing import Any

CACHED_WORDS = 1 << 16
"""Words whose byte pairs are remembered: about 15 MB at most. English captions have some 20,000 of nearly all words."""


class BoundedCache(dict):
    """A dictionary that forgets the older half when it is full.

    Not the least recently used entry: to note each use would make the common case, a word that is known, slower.
    """

    def __init__(self, limit: int = CACHED_WORDS) -> None:
        if limit < 2:
            raise ValueError(f"a cache of {limit} words: it must have room for at least 2")
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: str, value: str) -> None:
        if len(self) >= self._limit:
            for old in list(self)[: self._limit // 2]:
                del self[old]
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple:
        return (BoundedCache, (self._limit,))  # a process that is given one begins its own


def text_only(tokenizer: Any) -> Any:
    """The tokenizer, with its marks as plain text in captions, and a bounded cache; tokens are otherwise the same.

    OpenCLIP's takes a literal `<end_of_text>` for the end of the text, where the model reads its features: whoever
    writes a caption would choose where. And it cleans the text before, which makes such a mark of HTML escapes in any
    number of layers, of full-width letters and of what has control characters between; so it is here, behind all
    cleaning, that a mark has to be taken for text.
    """
    if isinstance(getattr(tokenizer, "cache", None), BoundedCache):
        return tokenizer
    if hasattr(tokenizer, "bpe_ranks") and isinstance(getattr(tokenizer, "cache", None), dict):
        own = copy(tokenizer)
        own.cache = BoundedCache()  # its own has each mark as a word that is whole: without, it is cut up as any other
        return own
    inner = getattr(tokenizer, "tokenizer", None)
    if hasattr(inner, "split_special_tokens"):
        own = copy(tokenizer)
        own.tokenizer = copy(inner)
        own.tokenizer.split_special_tokens = True
        return own
    return tokenizer
