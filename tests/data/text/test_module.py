"""TextData: text shards and token files give the same batches; vocabularies are compared before any work."""

import contextlib
import json
import warnings
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from diffvision.data import BadDataError, ShardSet
from diffvision.data.shards.writer import write_shards
from diffvision.data.text.module import TextData
from diffvision.data.text.tokenize import tokenize_shards
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.files import user_cache

DOCUMENTS = [f"document {n}: " + " ".join(f"word{n * k % 17}" for k in range(3 + n % 9)) for n in range(60)]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Text shards, a tokenizer and the token files of the two. Not to be changed."""
    root = tmp_path_factory.mktemp("places")
    write_shards(root / "text", ({"__key__": f"{n:03d}", "txt": d} for n, d in enumerate(DOCUMENTS)), per_shard=16)
    train_tokenizer(DOCUMENTS, 280).save(root / "tokenizer.json")
    tokenize_shards(ShardSet(root / "text"), root / "tokens", load_tokenizer(root / "tokenizer.json"), num_workers=0)
    return root


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
    assert live.vocab_size == ready.vocab_size == 280


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


@pytest.mark.parametrize("world_size", [1, 3])
def test_validation_sees_each_sequence_once(places, world_size):
    data = data_of(places, "tokens", batch_size=3)
    expected = [row for batch in read(data.val_dataloader()) for row in batch["tokens"]]
    assert len(expected) == len(data.token_windows(data.evaluation, "test"))
    rows = []
    for rank in range(world_size):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, current_epoch=0)
        rows += [row for batch in read(data.val_dataloader()) for row in batch["tokens"]]
    assert rows == expected
    assert TextData(str(places / "tokens"), 4, 16).val_dataloader() == []
    sizes = [len(batch["tokens"]) for batch in read(data_of(places, "tokens", eval_batch_size=10).val_dataloader())]
    assert set(sizes[:-1]) == {10}
    assert 0 < sizes[-1] <= 10


def test_ranks_and_epoch_come_from_the_trainer(places):
    data = data_of(places, "tokens")
    alone = read(data.train_dataloader())
    data.trainer = SimpleNamespace(global_rank=1, world_size=2, current_epoch=0)
    assert read(data.train_dataloader()) == [{"tokens": batch["tokens"][2:]} for batch in alone]
    data.trainer.current_epoch = 2
    assert data.train_dataloader().epoch == 2


class Recorder(pl.LightningModule):
    """Writes down what it is given."""

    def __init__(self, vocab_size=280, stop_after=None):
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.model.config = SimpleNamespace(vocab_size=vocab_size)
        self.automatic_optimization = False
        self.seen, self.validated, self.stop_after = [], [], stop_after

    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        self.seen.append(batch["tokens"].tolist())

    def on_train_batch_end(self, *args):
        if len(self.seen) == self.stop_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/cut.ckpt")
            raise KeyboardInterrupt

    def validation_step(self, batch, batch_idx):
        self.validated += batch["tokens"].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module, data, directory, ckpt_path=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, about workers and loggers
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=str(directory),
            max_epochs=2,
        )
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, data, ckpt_path=ckpt_path)


def test_a_run_cut_in_the_middle_goes_on_exactly(places, tmp_path):
    whole, first, second = Recorder(), Recorder(stop_after=17), Recorder()
    fit(whole, data_of(places), tmp_path / "a")
    fit(first, data_of(places), tmp_path)
    fit(second, data_of(places), tmp_path, ckpt_path=str(tmp_path / "cut.ckpt"))
    assert len(whole.seen) == 2 * len(data_of(places).train_dataloader()) > 17
    assert first.seen + second.seen == whole.seen
    assert len(whole.validated) == 2 * len(data_of(places).token_windows(str(places / "tokens"), "test"))


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_a_model_with_too_few_tokens_is_refused_before_any_work(places, tmp_path, source):
    module = Recorder(vocab_size=279)
    with pytest.raises(ValueError, match=r"vocab_size of the model .* got 279"):
        fit(module, data_of(places, source), tmp_path)
    assert not user_cache("tokens").exists()
    fit(padded := Recorder(vocab_size=320), data_of(places, source), tmp_path)
    assert padded.seen


def test_settings_that_do_not_fit_are_said(places, tmp_path):
    with pytest.raises(ValueError, match="holds text: set tokenizer"):
        TextData(str(places / "text"), 4, 16).train_dataloader()
    with pytest.raises(ValueError, match="must be token files or text, got both"):
        TextData([str(places / "tokens"), str(places / "text")], 4, 16).train_dataloader()
    other = tmp_path / "other.json"
    train_tokenizer(DOCUMENTS[:20], 270).save(other)
    with pytest.raises(ValueError, match="the tokenizer of"):
        data_of(places, "tokens", tokenizer=str(other)).train_dataloader()
    tokenize_shards(ShardSet(places / "text"), tmp_path / "t", load_tokenizer(other), num_workers=0)
    with pytest.raises(ValueError, match="must have one tokenizer"):
        TextData([str(places / "tokens"), str(tmp_path / "t")], 4, 16).train_dataloader()
    with pytest.raises(ValueError, match="fewer than one global batch of 5000"):
        data_of(places, "tokens", batch_size=5000).train_dataloader()
    with pytest.raises(ValueError, match="member 'jpg' is of a type"):
        data_of(places, text_key="jpg")
    with pytest.raises(ValueError, match="max_bad_fraction is 2"):
        data_of(places, max_bad_fraction=2)


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
    assert loader.report.as_dict()["skipped_documents"] == 60
    with pytest.raises(BadDataError, match="60 x damaged JSON"):
        data(0.4).prepare_data()
