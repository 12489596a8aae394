"""`recall`: synthetic text that can only be continued from its context, for the training text of small models.

Facts to retrieve (`needle_documents`) and words with made-up names (`mapping_text`), in documents of a few to a few
hundred words. The synthetic forms of the needle and many-shot evaluations ask for what is learned here.
"""

from collections.abc import Iterator
from pathlib import Path

from diffvision.data.datasets import mapping_text, needle_documents
from diffvision.data.shards.writer import refuse_existing, write_shards

_PER_SHARD = 4000


def make_recall(directory: str | Path, documents: int = 60_000, words: int = 140, seed: int = 0) -> str:
    """Write synthetic text of facts to retrieve and made-up names, to mix into training text.

    There are three documents with needles for each with a mapping; the result is their number of characters.

    Args:
        directory: the folder to write; it must have no shards yet.
        documents: the number of documents.
        words: the most in a document with needles. A tokenizer trained on this text makes about 1.6 tokens of one, and
            a model learns to look back no further than its training text requires.
        seed: other seeds give other documents.

    Raises:
        ValueError: the directory has shards already, fewer than 4 documents, or fewer than 12 words.
    """
    if documents < 4:
        raise ValueError(f"documents must be at least 4, three with needles and one with a mapping, got {documents}")
    refuse_existing(Path(directory))
    texts = list(recall_documents(documents, words, seed))
    write_shards(directory, ({"__key__": f"{n:07d}", "txt": text} for n, text in enumerate(texts)), _PER_SHARD)
    return f"{sum(map(len, texts)):,} characters"


def recall_documents(count: int, words: int = 140, seed: int = 0) -> Iterator[str]:
    """Yield the documents, every fourth with a mapping; arguments as `make_recall`."""
    mappings = mapping_text.training_documents(count // 4, seed=seed)
    needles = needle_documents.training_documents(count - count // 4, words, seed=seed)
    for number in range(count):
        yield next(mappings if number % 4 == 3 else needles)
