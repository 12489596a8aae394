"""Documents, their shards and their tokens."""

import pytest

from diffvision.data import ShardSet, train_tokenizer
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.tokenize import tokenize_shards
from diffvision.data.text.tokenizers import END

DOCUMENTS = [f"document {n}: " + " ".join(f"word{n * k % 17}" for k in range(3 + n % 9)) for n in range(60)]
DOCUMENTS[7] = f"the mark {END} written out, {END}"
DOCUMENTS[11] = "one that is longer than any window, " * 20


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 300)


@pytest.fixture(scope="session")
def places(tokenizer, tmp_path_factory):
    """The documents in four shards (text), tokenizer.json, and the tokens of both (tokens). Not to be changed."""
    root = tmp_path_factory.mktemp("places")
    write_shards(root / "text", ({"__key__": f"{n:03d}", "txt": d} for n, d in enumerate(DOCUMENTS)), per_shard=16)
    tokenizer.save(root / "tokenizer.json")
    tokenize_shards(ShardSet(root / "text"), root / "tokens", tokenizer, num_workers=0)
    return root


@pytest.fixture(scope="session")
def text(places):
    return places / "text"


@pytest.fixture(scope="session")
def made(places):
    return places / "tokens"
