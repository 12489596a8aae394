"""Text to packed sequences: exact against a concatenation by hand, in a reproducible order, with an account of all."""

import io
import json
from collections import Counter

import numpy as np
import pytest

from diffvision.data import BadDataError, Limits, ShardLoader, ShardSet
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.writer import write_manifest, write_shards, write_tar
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenize import documents_of, tokenize_shards
from diffvision.data.text.tokenizers import END, train_tokenizer
from diffvision.data.text.tokens import TokenSequence, TokenShards

LENIENT = Limits(max_bad_fraction=1.0)
DOCUMENTS = [f"document {n}: " + " ".join(f"word{n * k % 17}" for k in range(3 + n % 9)) for n in range(60)]
DOCUMENTS[7] = f"the mark {END} written out, {END}"
DOCUMENTS[11] = "one that is longer than any sequence, " * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 300)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The documents in four shards. Not to be changed."""
    directory = tmp_path_factory.mktemp("text") / "shards"
    write_shards(directory, ({"__key__": f"{n:03d}", "txt": d} for n, d in enumerate(DOCUMENTS)), per_shard=16)
    return directory


@pytest.fixture(scope="module")
def made(text, tokenizer, tmp_path_factory):
    """Token shards of 300 tokens each, five of them. Not to be changed."""
    directory = tmp_path_factory.mktemp("made") / "tokens"
    tokenize_shards(ShardSet(text), directory, tokenizer, tokens_per_shard=300, num_workers=0)
    return directory


def stream_of(tokenizer, documents=DOCUMENTS):
    return [number for document in documents for number in [*tokenizer.encode(document), tokenizer.eos_id]]


def sequences_of(stream, length, per_shard=300):
    """By hand: shards cut from the stream, sequences of length + 1 that share a token."""
    shards = [stream[start : start + per_shard] for start in range(0, len(stream), per_shard)]
    return [
        shard[start : start + length + 1]
        for shard in shards
        for start in range(0, len(shard), length)
        if start + length + 1 <= len(shard)
    ]


def in_order(source, length, **settings):
    shards = TokenShards(source, length)
    loader = EvaluationLoader(shards, TokenSequence(shards.account, **settings), batch_size=7)
    return list(loader), shards


def rows(batches, name="tokens"):
    return [row for batch in batches for row in batch[name].tolist()]


@pytest.mark.parametrize("length", [1, 8, 50, 299])
def test_sequences_are_those_of_the_documents_one_after_another(made, tokenizer, length):
    stream = stream_of(tokenizer)
    batches, shards = in_order(made, length)
    expected = sequences_of(stream, length)
    assert rows(batches) == expected
    assert batches[0]["tokens"].dtype.is_signed
    assert batches[0]["tokens"].shape == (min(7, len(expected)), length + 1)
    assert len(shards) == len(expected)
    in_shard = [len(stream[start : start + 300]) for start in range(0, len(stream), 300)]
    left = [tokens - ((tokens - 1) // length * length + 1) if tokens > length else tokens for tokens in in_shard]
    assert shards.extra_counts["tail_tokens"] == sum(left)


def test_a_document_longer_than_a_sequence_goes_on_in_the_next(tokenizer, tmp_path):
    write_shards(tmp_path / "s", [{"__key__": "a", "txt": DOCUMENTS[11]}])
    tokenize_shards(ShardSet(tmp_path / "s"), tmp_path / "t", tokenizer, num_workers=0)
    batches, _ = in_order(tmp_path / "t", 8, documents=True)
    assert len(batches) > 1
    read = [number for row in rows(batches) for number in row[:-1]]
    assert DOCUMENTS[11].startswith(tokenizer.decode(read))
    assert not any(number for row in rows(batches, "documents") for number in row)


def test_documents_are_numbered_by_row_and_own_their_ends(made, tokenizer):
    batches, _ = in_order(made, 40, documents=True)
    numbers, tokens = rows(batches, "documents"), rows(batches)
    for row, given in zip(tokens, numbers, strict=True):
        expected, document = [], 0
        for token in row:
            expected.append(document)
            document += token == tokenizer.eos_id
        assert given == expected
    assert max(map(max, numbers)) > 1
    assert "documents" not in in_order(made, 40)[0][0]


def test_the_written_mark_ends_no_document(made, tokenizer):
    stream = [row[0] for row in rows(in_order(made, 1)[0])]
    assert 0 < stream.count(tokenizer.eos_id) <= len(DOCUMENTS)
    assert stream_of(tokenizer).count(tokenizer.eos_id) == len(DOCUMENTS)


def loader_of(source, batch_size=4, length=16, **settings):
    shards = TokenShards(source, length)
    return ShardLoader(shards, TokenSequence(shards.account), batch_size, **{"num_workers": 0, "window": 2, **settings})


def read(loader):
    return [batch["tokens"].tolist() for batch in loader]


def test_an_epoch_has_each_sequence_once_in_an_order_of_seed_and_epoch(made, tokenizer):
    loader = loader_of(made, seed=3)
    first, second = read(loader), read(loader)
    expected = Counter(map(tuple, sequences_of(stream_of(tokenizer), 16)))
    for epoch in (first, second):
        sequences = Counter(tuple(row) for batch in epoch for row in batch)
        assert not sequences - expected
        assert sum(expected.values()) - sum(sequences.values()) == loader.report.tail == len(loader.shards) % 4
        assert len(epoch) == len(loader)
    assert first != second != read(loader_of(made, seed=4))
    assert read(loader_of(made, seed=3)) == first
    assert loader.report.as_dict()["tail_tokens"] == loader.shards.extra_counts["tail_tokens"] > 0
    assert "tail tokens:" in loader.report.summary()


def test_workers_and_ranks_give_the_same_batches(made):
    alone = read(loader_of(made, seed=3))
    assert read(loader_of(made, seed=3, num_workers=2)) == alone
    parts = [read(loader_of(made, seed=3, rank=r, world_size=2)) for r in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == alone


def test_a_run_goes_on_where_it_was_and_not_with_another_length(made):
    whole, half = read(loader_of(made)), loader_of(made)
    iterator = iter(half)
    for _ in range(3):
        next(iterator)
    state = half.state_dict()
    resumed = loader_of(made)
    resumed.load_state_dict(state)
    assert read(resumed) == whole[3:]
    with pytest.raises(ValueError, match="cannot resume: length was"):
        loader_of(made, length=15).load_state_dict(state)
    del state["length"]  # of an earlier version
    loader_of(made).load_state_dict(state)
    with pytest.raises(ValueError, match="cannot resume: samples was"):
        loader_of(made, length=15).load_state_dict(state)


def test_the_same_shards_whatever_the_workers(text, made, tokenizer, tmp_path):
    account = tokenize_shards(ShardSet(text), tmp_path / "t", tokenizer, tokens_per_shard=300, num_workers=2)
    names = sorted(p.name for p in made.iterdir() if p.is_file())
    assert names == sorted(p.name for p in (tmp_path / "t").iterdir())
    assert {"manifest.json", "tokens.json", "tokenizer.json", "000000.tar"} <= set(names)
    for name in names:
        assert (tmp_path / "t" / name).read_bytes() == (made / name).read_bytes()
    assert list(account.shards.values())[:-1] == [300] * (len(account.shards) - 1)
    assert not list(tmp_path.glob("*.part"))


def test_shards_of_several_places_are_one_set(made, tmp_path, text, tokenizer):
    tokenize_shards(ShardSet(text), tmp_path / "again", tokenizer, num_workers=0)
    both = TokenShards([str(made), str(tmp_path / "again")], 16)
    assert len(both) == len(TokenShards(made, 16)) + len(TokenShards(tmp_path / "again", 16))
    assert both.account.documents == 2 * len(DOCUMENTS)


def test_large_vocabularies_take_four_bytes(text, tokenizer, tmp_path):
    wide = train_tokenizer(DOCUMENTS, 300)
    wide.vocab_size = 70_000
    tokenize_shards(ShardSet(text), tmp_path / "wide", wide, num_workers=0)
    assert TokenShards(tmp_path / "wide", 16).account.dtype == np.dtype("<u4")
    assert rows(in_order(tmp_path / "wide", 16)[0]) == sequences_of(stream_of(tokenizer), 16, 10**9)


# ---------------------------------------------------------------------------------------------------------------------
# Documents that cannot be used


LINES = b'{"t": "a\\nb"}\n\n{"t": ""}\r\n{"u": 1}\n\xff\n'


@pytest.mark.parametrize(
    ("key", "member", "content", "expected"),
    [
        ("txt", "txt", "\ufeffa\r\nb\x00".encode(), ["a\r\nb\x00"]),
        ("page.txt", "page.txt", b"a", ["a"]),
        ("txt", "txt", b"\xff\xfe", ["text not UTF-8"]),
        ("txt", "json", b"{}", ["missing text member 'txt'"]),
        ("json:body", "json", b'{"body": "a"}', ["a"]),
        ("json:body", "json", b'{"body": 3}', ["no text in JSON field 'body'"]),
        ("json:body", "json", b"[]", ["no text in JSON field 'body'"]),
        ("json:body", "json", b"{", ["damaged JSON"]),
        ("jsonl:t", "jsonl", LINES, ["a\nb", "", "no text in JSON field 't'", "text not UTF-8"]),
    ],
)
def test_documents_of_members(tmp_path, key, member, content, expected):
    write_shards(tmp_path / "s", [{"__key__": "a", member: content}])
    documents = TextMember(key).documents(ShardSet(tmp_path / "s").members((0, 0)))
    assert [str(document) for document in documents] == expected


def test_keys_that_hold_no_text_are_refused():
    for key in ("jpg", "txt:field", "json", "jsonl", "npy"):
        with pytest.raises(ValueError, match="is of a type that is not read here"):
            TextMember(key)


@pytest.fixture
def spoiled(tmp_path):
    samples = [{"__key__": f"{n:03d}", "txt": d} for n, d in enumerate(DOCUMENTS)]
    samples[3]["txt"] = b"\xff\xff"
    samples[20]["txt"] = b"abc\xe4"
    samples[5]["txt"] = " \n"
    samples[6]["txt"] = ""
    samples[40] = {"__key__": "040", "cls": "1"}
    write_shards(tmp_path / "spoiled", samples, per_shard=16)
    return tmp_path / "spoiled"


def test_bad_documents_are_counted_by_reason_and_empty_ones_apart(spoiled, tokenizer, tmp_path):
    account = tokenize_shards(ShardSet(spoiled), tmp_path / "t", tokenizer, num_workers=0, limits=LENIENT)
    assert account.skipped == {"text not UTF-8": 2, "missing text member 'txt'": 1}
    assert account.examples["text not UTF-8"] == ["000000.tar: 003", "000001.tar: 020"]
    assert (account.documents, account.empty) == (55, 2)
    good = [d for n, d in enumerate(DOCUMENTS) if n not in (3, 5, 6, 20, 40)]
    assert rows(in_order(tmp_path / "t", 16)[0]) == sequences_of(stream_of(tokenizer, good), 16, 10**9)
    read = DocumentAccount()
    documents = documents_of(ShardSet(spoiled), limits=LENIENT, account=read)
    assert list(documents) == [*good[:4], " \n", "", *good[4:]]
    assert (read.documents, read.empty, read.skipped) == (55, 2, account.skipped)
    assert "55 documents, 2 empty, 3 skipped\n  2 x text not UTF-8: 000000.tar: 003, 000001.tar: 020" in read.summary()
    report = loader_of(tmp_path / "t").report.as_dict()
    assert (report["skipped_documents"], report["empty_documents"]) == (3, 2)


def test_too_many_of_them_stop_it_and_leave_nothing(spoiled, tokenizer, tmp_path):
    with pytest.raises(BadDataError, match="documents cannot be used"):
        tokenize_shards(ShardSet(spoiled), tmp_path / "t", tokenizer, num_workers=0)
    with pytest.raises(BadDataError, match="1 documents cannot be used"):
        list(documents_of(ShardSet(spoiled)))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "user-cache") == ["spoiled"]


def test_half_a_character_in_json_is_a_bad_document(tokenizer, tmp_path):
    write_shards(tmp_path / "s", [{"__key__": "a", "jsonl": '{"t": "\\ud800"}\n{"t": "good"}'}])
    account = tokenize_shards(
        ShardSet(tmp_path / "s"), tmp_path / "t", tokenizer, TextMember("jsonl:t"), num_workers=0, limits=LENIENT
    )
    assert (account.documents, account.skipped) == (1, {"text not UTF-8": 1})
    assert list(documents_of(ShardSet(tmp_path / "s"), TextMember("jsonl:t"), limits=LENIENT)) == ["good"]


def test_the_limit_is_of_the_documents_that_there_seem_to_be(tmp_path):
    lines = '{"t": "good"}\n' * 149 + "{\n"
    write_shards(tmp_path / "s", [{"__key__": str(n), "jsonl": lines if n < 2 else lines[:-3]} for n in range(4)])
    account = DocumentAccount()
    documents = documents_of(ShardSet(tmp_path / "s"), TextMember("jsonl:t"), account=account)
    assert (len(list(documents)), account.bad) == (596, 2)


def test_documents_come_back_whole_from_token_shards(made, tokenizer, tmp_path):
    documents = [tokenizer.decode(document) for document in TokenShards(made, 1).documents()]
    assert documents == DOCUMENTS
    damaged = copied(made, tmp_path / "damaged")
    write_tar(damaged / "000001.tar", [{"__key__": "a", "npy": array(np.full(300, 300, dtype="<u2"))}])
    write_manifest(damaged)
    with pytest.raises(ValueError, match=r"000001\.tar: token outside of"):
        list(TokenShards(damaged, 1).documents())
    write_tar(damaged / "000001.tar", [{"__key__": "a", "npy": b"none"}])
    write_manifest(damaged)
    with pytest.raises(ValueError, match=r"000001\.tar: damaged token array"):
        list(TokenShards(damaged, 1).documents())


def test_directories_and_sources_that_will_not_do(text, made, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="is not empty: remove"):
        tokenize_shards(ShardSet(text), made, tokenizer)
    with pytest.raises(ValueError, match="tokens_per_shard is 1"):
        tokenize_shards(ShardSet(text), tmp_path / "t", tokenizer, tokens_per_shard=1)
    write_shards(tmp_path / "empty", [{"__key__": "a", "txt": ""}])
    with pytest.raises(ValueError, match="no documents to tokenise"):
        tokenize_shards(ShardSet(tmp_path / "empty"), tmp_path / "t", tokenizer, num_workers=0)
    with pytest.raises(ValueError, match=r"has no tokens.json"):
        TokenShards(text, 16)
    with pytest.raises(ValueError, match="length is 0 tokens"):
        TokenShards(made, 0)
    with pytest.raises(ValueError, match="too few for one sequence of length"):
        TokenShards(made, 300)


# ---------------------------------------------------------------------------------------------------------------------
# Token shards that are damaged


def copied(made, directory):
    directory.mkdir()
    for path in made.iterdir():
        if path.is_file():
            (directory / path.name).write_bytes(path.read_bytes())
    return directory


def array(tokens):
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: array(np.zeros(300, dtype=np.int64)), "token array not as tokens.json says"),
        (lambda: array(np.zeros(299, dtype="<u2")), "token array not as tokens.json says"),
        (lambda: array(np.full(300, 300, dtype="<u2")), "token outside of the vocabulary"),
        (lambda: array(np.zeros(300, dtype="<u2"))[:-2], "token array not as tokens.json says"),
        (lambda: b"\x80\x04pickled", "damaged token array"),
        (lambda: b"", "damaged token array"),
        (None, "shard without tokens"),
    ],
)
def test_a_damaged_shard_is_skipped_and_counted(made, tmp_path, content, reason):
    damaged = copied(made, tmp_path / "damaged")
    sample = {"__key__": "a", "npy": content()} if content else {"__key__": "a", "cls": "1"}
    write_tar(damaged / "000001.tar", [sample])
    write_manifest(damaged)
    loader = loader_of(damaged, seed=3, limits=LENIENT)
    batches = read(loader)
    assert {len(batch) for batch in batches} == {4}
    assert list(loader.report.skipped) == [reason]
    assert loader.report.examples[reason][0].startswith("000001.tar: sequence ")


def test_a_flipped_bit_in_a_token_shard_costs_that_shard(made, tmp_path):
    damaged = copied(made, tmp_path / "damaged")
    data = bytearray((damaged / "000001.tar").read_bytes())
    data[1024 + 200] ^= 1  # a token, still of the vocabulary
    (damaged / "000001.tar").write_bytes(data)
    loader = loader_of(damaged, seed=3, limits=LENIENT)
    read(loader)
    assert list(loader.report.skipped) == ["shard not as its manifest says (sha256)"]
    assert loader.report.seen + loader.report.bad + loader.report.tail == loader.report.total


@pytest.mark.parametrize("text_of_it", ["{", "[]", '{"format": "other"}', '{"format": "diffvision-tokens-1"}'])
def test_a_damaged_tokens_json_is_named(made, tmp_path, text_of_it):
    damaged = copied(made, tmp_path / "damaged")
    (damaged / "tokens.json").write_text(text_of_it)
    with pytest.raises(ValueError, match=r"damaged/tokens.json is not of"):
        TokenShards(damaged, 16)


def test_shards_that_tokens_json_does_not_know(made, tmp_path):
    damaged = copied(made, tmp_path / "damaged")
    fields = json.loads((damaged / "tokens.json").read_text())
    del fields["shards"]["000001.tar"]
    (damaged / "tokens.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"tokens.json does not list"):
        TokenShards(damaged, 16)
