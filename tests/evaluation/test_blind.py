"""A language model that reads captions without the images: likelihoods by hand, and the metrics that come of them."""

import math
import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diffvision.evaluation.blind import Blind
from diffvision.evaluation.cache import Cache
from diffvision.evaluation.suite import evaluate
from diffvision.opening import Model

WORDS = ["<end>", "grey", "12", "18", "90", "99", "10", "20", "190"]


class Table(nn.Module):
    """The next word depends on the last one alone."""

    def __init__(self, likely):
        super().__init__()
        table = torch.full((len(WORDS), len(WORDS)), 0.01)
        for (before, after), probability in likely.items():
            table[WORDS.index(before), WORDS.index(after)] = probability
        self.logits = nn.Parameter(table.log())
        self.calls = 0

    def forward(self, tokens):
        assert not self.training
        self.calls += 1
        return self.logits[tokens]


class Split:
    eos_id, vocab_size = 0, len(WORDS)

    def encode(self, text):
        return [WORDS.index(word) for word in text.split() if word in WORDS]


def model_of(likely, **settings):
    given = {"name": "table", "host": "language", "module": Table(likely).eval(), "tokenizer": Split()}
    return Model(**given | {"max_length": 64, "weights": "here"} | settings)


def normalised(likely, before):
    """Return the table's log-probabilities after a word: its weights are unnormalised."""
    weights = {word: likely.get((before, word), 0.01) for word in WORDS}
    return {word: math.log(weight / sum(weights.values())) for word, weight in weights.items()}


LIKELY = {("<end>", "grey"): 0.9, ("grey", "12"): 0.4, ("grey", "10"): 0.2}


def test_mean_log_likelihood_by_hand():
    first, then = normalised(LIKELY, "<end>"), normalised(LIKELY, "grey")
    scores = Blind(model_of(LIKELY), batch_size=2).log_likelihoods(["grey 12", "grey", "grey 90", "", "grey 12"])
    expected = [(first["grey"] + then["12"]) / 2, first["grey"], (first["grey"] + then["90"]) / 2]
    assert scores.tolist() == pytest.approx([*expected, -math.inf, expected[0]], rel=1e-5)


def test_a_text_longer_than_the_model_reads_is_scored_in_windows():
    text = "grey 12 grey 12 grey 12"
    whole, cut = (Blind(model_of(LIKELY, max_length=n)).log_likelihoods([text]).item() for n in (64, 2))
    assert whole == pytest.approx(cut, rel=1e-5)  # one word of context is all that the table knows


def test_captions_are_scored_once_and_kept(tmp_path):
    texts = ["grey 12", "grey 90", "grey 99"]
    blind = Blind(model_of(LIKELY), cache=Cache(tmp_path))
    scores = blind.log_likelihoods(texts)
    calls = blind.model.module.calls
    assert calls == 1
    assert torch.equal(blind.log_likelihoods(texts[::-1]), scores.flip(0))
    again = Blind(model_of(LIKELY), cache=Cache(tmp_path))
    assert torch.equal(again.log_likelihoods(texts), scores)
    assert (again.model.module.calls, blind.model.module.calls) == (0, calls)
    other = Blind(model_of({("grey", "90"): 0.9}), cache=Cache(tmp_path))
    assert not torch.equal(other.log_likelihoods(texts), scores)


def test_next_to_composition(circle, to_tensor, numbers, swapped):
    # Right and wrong: 12 and 90, 99 and 10, 20 and 190. Without the images: 12 is likelier, 10 too, the last two tie.
    metrics = evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers, blind=Blind(model_of(LIKELY)))
    assert metrics["composition/memory/blind_acc"] == pytest.approx(2 / 3)  # a tie is right, as for the model
    swapped.rows["test"] = [(*row, kind) for row, kind in zip(swapped.rows["test"], "xxy", strict=True)]
    metrics = evaluate(circle, swapped, transform=to_tensor, tokenizer=numbers, blind=Blind(model_of(LIKELY)))
    assert metrics["composition/memory/blind_acc/x"] == 0.5
    assert metrics["composition/memory/mean_per_kind_blind_acc"] == 0.75
    assert metrics["composition/memory/mean_per_kind_acc"] == 0.5


def test_next_to_pairs(circle, to_tensor, numbers, memory_folder):
    rows = [(12, ["grey 12"]), (90, ["grey 90"]), (99, ["grey 99"]), (10, ["grey 10"])]
    folder = memory_folder("pairs", {"test": rows})
    metrics = evaluate(circle, folder, transform=to_tensor, tokenizer=numbers, blind=Blind(model_of(LIKELY)))
    assert metrics["pairs/memory/blind_first"] == 0.5
    assert metrics["pairs/memory/group_score"] == 1.0


def test_what_cannot_read(circle):
    with pytest.raises(ValueError, match="blind is table, which came without"):
        Blind(model_of(LIKELY, tokenizer=None))
    with pytest.raises(ValueError, match="table has new weights: --blind"):
        Blind(model_of(LIKELY, weights=None))
    with pytest.raises(ValueError, match="circle is a model of images"):
        Blind(Model(name="circle", host="open_clip", module=circle))


def _rank(rank, path, texts, results):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        results.put(Blind(model_of(LIKELY), batch_size=1).log_likelihoods(texts).tolist())
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forked processes need not import everything again")
def test_ranks_share_the_captions(tmp_path):
    texts = ["grey 12", "grey 90", "grey", "grey 12"]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "store", texts, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    both = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(timeout=60)
    assert both == [Blind(model_of(LIKELY)).log_likelihoods(texts).tolist()] * 2
