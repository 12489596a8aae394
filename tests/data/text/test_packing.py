"""Whole conversations in windows: none split, none lost, each token's bit and number right, in a resumable order."""

import json

import numpy as np
import pytest

from diffvision.data import ShardLoader, ShardSet, TextData, train_tokenizer
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.chat import TEMPLATES, Chat
from diffvision.data.text.documents import JsonLines, RowMember
from diffvision.data.text.packing import PackedSequence, PackedWindows, best_fit_decreasing
from diffvision.data.text.tokenize import tokenize_shards
from diffvision.files import sha256

LENGTH = 40
ROWS = [{"prompt": "q" * (1 + 7 * n % 23), "response": "a" * (1 + 5 * n % 13)} for n in range(299)]
ROWS.append({"prompt": "q" * 20, "response": "a" * 20})  # fills a window
LONG = [{"prompt": "q" * 20, "response": "a" * 30}, {"prompt": "q" * 45, "response": "a"}]


def write(directory, rows):
    tokenizer = train_tokenizer(["qa"], 257)  # one token a letter
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chat = Chat(tokenizer, TEMPLATES["plain"], "plain")
    source = JsonLines(directory / "rows.jsonl")
    tokenize_shards(source, directory / "made", tokenizer, RowMember(), chat=chat, num_workers=0)
    return str(directory / "made")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Token files of 302 conversations, of which two are longer than a window. Not to be changed."""
    return write(tmp_path_factory.mktemp("packed"), [*ROWS, *LONG])


def texts(batches, eos_id):
    """The conversations in batches of one row: sorted lengths (prompt, response) of stretches with one number."""
    seen = []
    for batch in batches:
        tokens, numbers, learned = (batch[name][0] for name in ("tokens", "documents", "learned"))
        assert (numbers.diff() >= 0).all()
        for number in numbers.unique():
            bits = learned[numbers == number]
            if bits.any():
                seen.append((len(bits) - int(bits.sum()), int(bits.sum())))
            else:  # padding
                assert number == numbers[-1]
                assert (tokens[numbers == number] == eos_id).all()
    return sorted(seen)


def loader(made, batch_size=1, **settings):
    windows = PackedWindows(made, LENGTH, block=2000)
    kind = PackedSequence(windows.account, LENGTH)
    return ShardLoader(windows, kind, batch_size, **{"num_workers": 0} | settings), windows


def test_every_conversation_is_whole_in_one_window(made):
    batches, windows = loader(made)
    assert len(windows.counts) > 1
    read = list(batches)
    assert read[0]["tokens"].shape == read[0]["learned"].shape == (1, LENGTH + 1)
    assert texts(read, windows.account.eos_id) == sorted((len(r["prompt"]), len(r["response"]) + 1) for r in ROWS)
    counts = batches.report.extra_counts
    assert counts["left_out_conversations"] == windows.long == 2
    tokens = sum(len(r["prompt"]) + len(r["response"]) + 1 for r in ROWS)
    assert counts["padding_tokens"] == len(windows) * (LENGTH + 1) - tokens


def test_best_fit_decreasing_by_hand():
    windows = best_fit_decreasing(np.array([5, 4, 3, 3, 2, 2, 1]), 7)
    # 5; 4; 3 joins 4 (room 3, exact); 3 opens one; 2 joins 5 (room 2, exact); 2 and 1 join the second 3
    assert windows == [[0, 4], [1, 2], [3, 5, 6]]
    sizes = np.random.default_rng(0).integers(1, 100, 500)
    assert len(best_fit_decreasing(sizes, 128)) <= 1.02 * sizes.sum() / 128 + 1


def test_the_data_module_packs_conversations_and_says_what_does_not_fit(made, tmp_path):
    data = TextData(made, 4, LENGTH, made, num_workers=0)
    message = r"2 of 302 conversations are longer than 41 tokens and left out, the first is made: conversation 301"
    with pytest.warns(UserWarning, match=message):
        batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"tokens", "documents", "learned"}
    with pytest.raises(ValueError, match=r"data.length must hold a conversation, got 1"):
        TextData(made, 4, 1, num_workers=0).train_dataloader()
    write_shards(tmp_path / "text", [{"__key__": "a", "txt": "qa" * 200}])
    tokenize_shards(ShardSet(tmp_path / "text"), tmp_path / "tokens", train_tokenizer(["qa"], 257), num_workers=0)
    with pytest.raises(ValueError, match="join text and conversations"):
        TextData([made, str(tmp_path / "tokens")], 4, LENGTH, num_workers=0).train_dataloader()


def test_lengths_that_do_not_add_up_are_one_error(tmp_path):
    write(tmp_path, ROWS[:40])
    folder = tmp_path / "made"
    (np.fromfile(folder / "lengths.bin", "<u4") + 1).tofile(folder / "lengths.bin")
    account = json.loads((folder / "tokens.json").read_text())
    account["sha256"]["lengths.bin"] = sha256(folder / "lengths.bin")
    (folder / "tokens.json").write_text(json.dumps(account))
    with pytest.raises(ValueError, match=r"lengths\.bin must add up"):
        PackedWindows(folder, LENGTH)
