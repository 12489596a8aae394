"""TextData: text shards and token files give the same batches; vocabularies are compared before any work."""

import json
import os
from types import SimpleNamespace

import pytest

from diffvision.data import BadDataError, ShardSet, TextData, load_tokenizer, train_tokenizer
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.tokenize import cached_tokens, tokenize_shards
from diffvision.files import user_cache
from tests.data.text.conftest import DOCUMENTS


def data_of(places, source="text", batch_size=4, **settings):
    tokenizer = str(places / "tokenizer.json") if source == "text" else None
    settings = {"num_workers": 0, "tokenizer": tokenizer, **settings}
    return TextData(str(places / source), batch_size, 16, str(places / source), **settings)


def read(loader):
    return [{name: values.tolist() for name, values in batch.items()} for batch in loader]


@pytest.mark.parametrize("documents", [False, True])
def test_tokenised_beforehand_or_on_the_fly_it_is_the_same(places, documents):
    ready, live = (data_of(places, source, seed=5, documents=documents) for source in ("tokens", "text"))
    epochs = [read(loader) for loader in [ready.train_dataloader()] for _ in range(2)]
    loader = live.train_dataloader()
    assert [read(loader), read(loader)] == epochs
    assert epochs[0] != epochs[1]
    assert read(live.val_dataloader()) == read(ready.val_dataloader())
    assert set(epochs[0][0]) == ({"tokens", "documents"} if documents else {"tokens"})
    assert live.vocab_size == ready.vocab_size == 300


def test_text_is_tokenised_once_and_anew_when_it_changes(places, tmp_path):
    write_shards(tmp_path / "s", [{"__key__": "a", "txt": " ".join(DOCUMENTS)}])

    def made():
        data = TextData(str(tmp_path / "s"), 2, 16, tokenizer=str(places / "tokenizer.json"), num_workers=0)
        data.prepare_data()
        return data, {p: p.stat().st_mtime_ns for p in user_cache("tokens").glob("*/tokens.json")}

    data, first = made()
    assert len(first) == 1
    assert made()[1] == first
    (tmp_path / "s" / "000000.tar").unlink()
    write_shards(tmp_path / "s", [{"__key__": "a", "txt": " ".join(DOCUMENTS[:40])}])
    again, second = made()
    assert len(second) == 2
    assert len(again.train_dataloader().shards) < len(data.text_tokenizer.encode(" ".join(DOCUMENTS))) // 16


def test_validation_sees_each_sequence_once(places):
    data = data_of(places, "tokens", eval_batch_size=10)
    sizes = [len(batch["tokens"]) for batch in data.val_dataloader()]
    assert sum(sizes) == len(data.token_windows(data.evaluation, "test"))
    assert set(sizes[:-1]) == {10}
    assert TextData(str(places / "tokens"), 4, 16).val_dataloader() == []


@pytest.mark.parametrize("damaged", ["tokens.json", "tokens.bin"])
def test_damaged_tokens_in_the_cache_are_made_again(places, tokenizer, damaged):
    source = ShardSet(places / "text")
    folder = cached_tokens(source, tokenizer, num_workers=0)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    os.truncate(folder / damaged, 4)
    assert cached_tokens(source, tokenizer, num_workers=0) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_model_with_too_few_tokens_is_refused_before_any_work(places, source):
    def prepare(vocab_size):
        data, config = data_of(places, source), SimpleNamespace(vocab_size=vocab_size)
        module = SimpleNamespace(model=SimpleNamespace(config=config))
        data.trainer = SimpleNamespace(lightning_module=module, global_rank=0, world_size=1, current_epoch=0)
        data.prepare_data()
        data.setup()
        return data.train_dataloader()

    with pytest.raises(ValueError, match=r"vocab_size of the model .* got 299"):
        prepare(299)
    assert not user_cache("tokens").exists()
    assert read(prepare(320))


def test_settings_that_do_not_fit_are_said(places, tmp_path):
    other = tmp_path / "other.json"
    train_tokenizer(DOCUMENTS[:20], 270).save(other)
    tokenize_shards(ShardSet(places / "text"), tmp_path / "t", load_tokenizer(other), num_workers=0)
    text, tokens = str(places / "text"), str(places / "tokens")
    for train, settings, named in (
        (text, {}, "set tokenizer"),
        ([tokens, text], {}, "train must be"),
        (tokens, {"tokenizer": str(other)}, "the tokenizer of"),
        ([tokens, str(tmp_path / "t")], {}, "must have one tokenizer"),
        (tokens, {"batch_size": 5000}, "global batch of 5000"),
        (tokens, {"text_key": "jpg"}, "member 'jpg'"),
        (tokens, {"max_bad_fraction": 2}, "max_bad_fraction"),
    ):
        with pytest.raises(ValueError, match=named):
            TextData(train, **{"batch_size": 4, "length": 16, "num_workers": 0, **settings}).train_dataloader()


def test_bad_documents_stop_a_run_even_if_they_were_let_pass_before(places, tmp_path):
    samples = [{"__key__": f"{n:03d}", "jsonl": json.dumps({"t": d}) + "\n{"} for n, d in enumerate(DOCUMENTS)]
    write_shards(tmp_path / "lines", samples)

    def data(max_bad_fraction):
        settings = {"tokenizer": str(places / "tokenizer.json"), "text_key": "jsonl:t", "num_workers": 0}
        return TextData(str(tmp_path / "lines"), 4, 16, max_bad_fraction=max_bad_fraction, **settings)

    with pytest.raises(BadDataError, match="documents cannot be used"):
        data(0.4).prepare_data()
    loader = data(0.5).train_dataloader()
    assert read(loader)
    assert loader.report.extra_counts["skipped_documents"] == 60
    with pytest.raises(BadDataError, match="60 x damaged JSON"):
        data(0.4).prepare_data()
