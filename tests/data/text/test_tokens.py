"""Text to windows of tokens: exact against a concatenation by hand, in a reproducible order, with an account of all."""

import json
import os
import shutil

import numpy as np
import pytest

from diffvision.data import BadDataError, Limits, ShardLoader, ShardSet, TokenSequence, TokenWindows, train_tokenizer
from diffvision.data.shards.loader import EvaluationLoader
from diffvision.data.shards.order import ShuffledOrder
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.documents import DocumentAccount, TextMember
from diffvision.data.text.tokenize import documents_of, tokenize_shards
from diffvision.data.text.tokens import TokenFiles, find_token_folders, read_account
from diffvision.files import sha256
from tests.data.text.conftest import DOCUMENTS

BLOCK = 300  # tokens, of which there are five blocks
LENIENT = Limits(max_bad_fraction=1.0)


def stream_of(tokenizer, documents=DOCUMENTS):
    return [number for document in documents for number in [*tokenizer.encode(document), tokenizer.eos_id]]


def windows_of(stream, length, block=BLOCK):
    """By hand: blocks cut from the stream, windows of length + 1 that share a token."""
    blocks = [stream[start : start + block] for start in range(0, len(stream), block)]
    return [
        block[start : start + length + 1]
        for block in blocks
        for start in range(0, len(block), length)
        if start + length + 1 <= len(block)
    ]


def in_order(source, length, **settings):
    windows = TokenWindows(source, length, block=BLOCK)
    loader = EvaluationLoader(windows, TokenSequence(windows.account, **settings), batch_size=7)
    return list(loader), windows


def rows(batches, name="tokens"):
    return [row for batch in batches for row in batch[name].tolist()]


@pytest.mark.parametrize("length", [1, 50, 299])
def test_windows_are_those_of_the_documents_one_after_another(made, tokenizer, length):
    stream = stream_of(tokenizer)
    batches, windows = in_order(made, length)
    expected = windows_of(stream, length)
    assert rows(batches) == expected
    assert batches[0]["tokens"].dtype.is_signed
    assert batches[0]["tokens"].shape == (min(7, len(expected)), length + 1)
    assert len(windows) == len(expected)
    in_block = [len(stream[start : start + BLOCK]) for start in range(0, len(stream), BLOCK)]
    left = [tokens - ((tokens - 1) // length * length + 1) if tokens > length else tokens for tokens in in_block]
    assert windows.extra_counts["tail_tokens"] == sum(left)


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


def loader_of(source, batch_size=4, length=16, **settings):
    windows = TokenWindows(source, length, block=BLOCK)
    kind = TokenSequence(windows.account)
    return ShardLoader(windows, kind, batch_size, **{"num_workers": 0, "window": 2, **settings})


def read(loader):
    return [batch["tokens"].tolist() for batch in loader]


def test_an_epoch_has_each_window_once_in_an_order_of_seed_and_epoch(made, tokenizer):
    loader = loader_of(made, seed=3)
    epochs = [read(loader), read(loader)]
    stream = stream_of(tokenizer)
    for number, epoch in enumerate(epochs):
        order = ShuffledOrder(loader.shards.counts, 3, number, window=2)
        starts = [block * BLOCK + row * 16 for block, row in order.samples(0, 4 * len(epoch))]
        assert [row for batch in epoch for row in batch] == [stream[start : start + 17] for start in starts]
        assert len(set(starts)) == loader.report.seen == loader.report.total - loader.report.tail
        assert len(epoch) == len(loader)
    assert epochs[0] != epochs[1] != read(loader_of(made, seed=4))
    assert loader.report.extra_counts["tail_tokens"] == loader.shards.extra_counts["tail_tokens"] > 0
    assert " tail tokens" in loader.report.summary()
    assert loader.shards.describe((0, 0)) == "tokens/tokens.bin: from token 0"


def test_a_run_with_workers_resumes_on_the_same_windows_alone(made):
    loader = loader_of(made, seed=3)
    batches = read(loader)
    resumed, state = loader_of(made, seed=3, num_workers=2), loader.state_dict() | {"epoch": 0, "batches_consumed": 3}
    assert state["shards"] == "57892ffb834c607a-16-7acf101f2efbfbba"  # as of the tar shards of earlier versions
    resumed.load_state_dict(state)
    assert read(resumed) == batches[3:]
    with pytest.raises(ValueError, match="cannot resume: length was"):
        loader_of(made, seed=3, length=15).load_state_dict(state)
    with pytest.raises(ValueError, match="other content"):
        loader_of(made, seed=3).load_state_dict(state | {"content": "token files:0123456789abcdef"})


def test_the_same_files_whatever_the_workers(text, made, tokenizer, tmp_path):
    tokenize_shards(ShardSet(text), tmp_path / "t", tokenizer, num_workers=2)
    names = {"tokens.bin", "tokens.json", "tokenizer.json"}
    assert names == {p.name for p in (tmp_path / "t").iterdir()}
    for name in names:
        assert (tmp_path / "t" / name).read_bytes() == (made / name).read_bytes()
    assert not list(tmp_path.glob("*.part"))
    assert [tokenizer.decode(document) for document in TokenFiles(made).documents()] == DOCUMENTS


def test_folders_of_several_places_are_one_set_and_splits_are_found(made, tmp_path):
    both = TokenWindows([str(made), str(copied(made, tmp_path / "sets" / "train"))], 16)
    assert len(both) == 2 * len(TokenWindows(made, 16))
    assert both.account.documents == 2 * len(DOCUMENTS)
    assert len(TokenWindows(tmp_path / "sets", 16)) == len(TokenWindows(made, 16))
    with pytest.raises(ValueError, match="no token files of test"):
        find_token_folders(tmp_path / "sets", "test")
    assert find_token_folders(made / "tokens.bin") == []


def test_large_vocabularies_take_four_bytes(text, tokenizer, tmp_path):
    wide = train_tokenizer(DOCUMENTS, 300)
    wide.vocab_size = 70_000
    tokenize_shards(ShardSet(text), tmp_path / "wide", wide, num_workers=0)
    assert np.fromfile(tmp_path / "wide" / "tokens.bin", "<u4").tolist() == stream_of(tokenizer)
    assert rows(in_order(tmp_path / "wide", 16)[0]) == windows_of(stream_of(tokenizer), 16)


# ---- Documents that cannot be used ----------------------------------------------------------------------------------


LINES = b'{"t": "a\\nb"}\n\n{"t": ""}\r\n{"u": 1}\n\xff\n'


@pytest.mark.parametrize(
    ("key", "member", "content", "expected"),
    [
        ("txt", "txt", "\ufeffa\r\nb\x00".encode(), ["a\r\nb\x00"]),
        ("page.txt", "page.txt", b"a", ["a"]),
        ("json:body", "json", b'{"body": "a"}', ["a"]),
        ("json:body", "json", b'{"body": 3}', ["no text in JSON field 'body'"]),
        ("json:body", "json", b'{"body": "\\ud800"}', ["text not UTF-8"]),
        ("json:body", "json", b"[]", ["no text in JSON field 'body'"]),
        ("json:body", "json", b"{", ["damaged JSON"]),
        ("jsonl:t", "jsonl", LINES, ["a\nb", "", "no text in JSON field 't'", "text not UTF-8"]),
    ],
)
def test_documents_of_members(tmp_path, key, member, content, expected):
    write_shards(tmp_path / "s", [{"__key__": "a", member: content}])
    documents = TextMember(key).documents(ShardSet(tmp_path / "s").members((0, 0)))
    assert [str(document) for document in documents] == expected


@pytest.mark.parametrize("key", ["jpg", "txt:field", "json", "jsonl", "npy"])
def test_keys_that_hold_no_text_are_refused(key):
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
    assert rows(in_order(tmp_path / "t", 16)[0]) == windows_of(stream_of(tokenizer, good), 16)
    read = DocumentAccount()
    documents = documents_of(ShardSet(spoiled), limits=LENIENT, account=read)
    assert list(documents) == [*good[:4], " \n", "", *good[4:]]
    assert (read.documents, read.empty, read.skipped) == (55, 2, account.skipped)
    assert "55 documents, 2 empty, 3 skipped\n  2 x text not UTF-8: 000000.tar: 003, 000001.tar: 020" in read.summary()
    report = loader_of(tmp_path / "t").report.extra_counts
    assert (report["skipped_documents"], report["empty_documents"]) == (3, 2)


def test_too_many_of_them_stop_it_and_leave_nothing(spoiled, tokenizer, tmp_path):
    with pytest.raises(BadDataError, match="documents cannot be used"):
        tokenize_shards(ShardSet(spoiled), tmp_path / "t", tokenizer, num_workers=0)
    with pytest.raises(BadDataError, match="1 documents cannot be used"):
        list(documents_of(ShardSet(spoiled)))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "user-cache") == ["spoiled"]


def test_the_limit_is_of_the_documents_that_there_seem_to_be(tmp_path):
    lines = '{"t": "good"}\n' * 149 + "{\n"
    write_shards(tmp_path / "s", [{"__key__": str(n), "jsonl": lines if n < 2 else lines[:-3]} for n in range(4)])
    account = DocumentAccount()
    documents = documents_of(ShardSet(tmp_path / "s"), TextMember("jsonl:t"), account=account)
    assert (len(list(documents)), account.bad) == (596, 2)


def test_directories_and_sources_that_will_not_do(text, made, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="is not empty: remove"):
        tokenize_shards(ShardSet(text), made, tokenizer)
    write_shards(tmp_path / "empty", [{"__key__": "a", "txt": ""}])
    with pytest.raises(ValueError, match="no documents to tokenise"):
        tokenize_shards(ShardSet(tmp_path / "empty"), tmp_path / "t", tokenizer, num_workers=0)
    for source, length, named in ((text, 16, "tokens.json"), (made, 0, "length"), (made, 10**6, "data.length")):
        with pytest.raises(ValueError, match=named):
            TokenWindows(source, length)


# ---- Token files that are damaged -----------------------------------------------------------------------------------


def copied(made, directory):
    shutil.copytree(made, directory)
    return directory


def flipped(folder):
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[200] ^= 1  # a token, still of the vocabulary
    (folder / "tokens.bin").write_bytes(data)


def described(**fields):
    """Return a change of tokens.json."""

    def change(folder):
        (folder / "tokens.json").write_text(json.dumps(json.loads((folder / "tokens.json").read_text()) | fields))

    return change


DAMAGE = {
    "cut": (lambda folder: os.truncate(folder / "tokens.bin", 700), "tokens.bin"),
    "a flipped bit": (flipped, "tokens.bin"),
    "gone": (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin"),
    "not JSON": (lambda folder: (folder / "tokens.json").write_text("{"), "tokens.json"),
    "nested": (lambda folder: (folder / "tokens.json").write_text("[" * 100_000), "tokens.json"),
    "another format": (described(format="other"), "other"),
    "tar shards": (described(format="diffvision-tokens-1"), "tokens-1.*diffvision data tokenize"),
    "dtype": (described(dtype="int64"), "tokens.json"),
    "no tokens": (described(count=0), "tokens.json"),
    "fewer tokens": (described(count=100), "tokens.bin"),
    "eos": (described(eos_id=300), "tokens.json"),
    "no sha256": (described(sha256={}), "tokens.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_token_files_are_one_error(made, tmp_path, damage):
    folder = copied(made, tmp_path / "damaged")
    change, named = DAMAGE[damage]
    change(folder)
    with pytest.raises(ValueError, match=named) as error:
        TokenWindows(folder, 16)
    assert "\n" not in str(error.value)


def test_a_file_that_changes_during_a_run_is_an_error_and_new_times_are_not(made, tmp_path):
    folder = copied(made, tmp_path / "changing")
    windows = TokenWindows(folder, 16)
    first = windows.members((0, 0))
    os.utime(folder / "tokens.bin", (0, 0))
    assert windows.members((0, 0)) == first
    for damage in ("a flipped bit", "cut", "gone"):
        DAMAGE[damage][0](folder)
        with pytest.raises((ValueError, FileNotFoundError), match=r"tokens\.bin"):
            windows.members((0, 0))


def test_a_token_outside_of_the_vocabulary_is_a_bad_sample(made, tmp_path):
    folder = copied(made, tmp_path / "outside")
    tokens = np.fromfile(folder / "tokens.bin", "<u2")
    tokens[:BLOCK] = 300
    tokens.tofile(folder / "tokens.bin")
    described(sha256={"tokens.bin": sha256(folder / "tokens.bin")})(folder)
    loader = loader_of(folder, seed=3, limits=LENIENT)
    assert {len(batch) for batch in read(loader)} == {4}
    assert list(loader.report.skipped) == ["token outside of the vocabulary"]
    assert loader.report.seen + loader.report.bad + loader.report.tail == loader.report.total
    with pytest.raises(ValueError, match="below 300, got 300"):
        TokenFiles(folder).check()
    assert read_account(folder).documents == len(DOCUMENTS)
