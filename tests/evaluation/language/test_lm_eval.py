"""Our language models under lm-eval's interface, with stand-ins for its base class and its registry."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from language_fixtures import make_llama

from diffvision.data.text.tokenizers import train_tokenizer
from diffvision.models import language
from diffvision.models.language.generation import generate
from diffvision.opening import open_model

TEXT = "One model reads a line of words, and another line of words follows. "
TOKENIZER = train_tokenizer([TEXT * 20], 300)
MODULE = "diffvision.evaluation.language.lm_eval"


@pytest.fixture
def adapter(monkeypatch):
    """The class that is registered as "diffvision"."""
    registered = {}
    names = ["lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[2]].LM = object
    sys.modules[names[3]].register_model = lambda name: lambda kind: registered.setdefault(name, kind)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    __import__(MODULE)
    yield registered["diffvision"]
    sys.modules.pop(MODULE)


@pytest.fixture
def opened(adapter, tmp_path):
    """Save a miniature of a variant; return the adapter on it, and the model."""

    def save(variant="standard", start=None, **settings):
        torch.manual_seed(0)
        tokenizer = TOKENIZER if start is None else type(TOKENIZER)(TOKENIZER._backend, bos=start)
        model = language.create("diff-debug", variant=variant, vocab_size=tokenizer.vocab_size, max_length=32)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3)
        language.save(model, tmp_path / variant, tokenizer)
        return adapter(str(tmp_path / variant), batch_size="2", device="cpu", **settings), model.eval()

    return save


def requests(*rows):
    return [SimpleNamespace(args=row) for row in rows]


@torch.no_grad()
def by_hand(model, context, continuation):
    """The sum of log-probabilities of tokens one after another, and whether each is the likeliest."""
    total, greedy = 0.0, True
    for token in continuation:
        logs = model(torch.tensor([context[-32:]]))[0, -1].log_softmax(-1)
        total, greedy = total + logs[token].item(), greedy and logs.argmax().item() == token
        context = [*context, token]
    return total, greedy


@pytest.mark.parametrize("variant", ["standard", "v1", "v2", "v1_dint"])  # the last takes no cache
def test_every_variant_answers_all_kinds_of_requests(variant, opened):
    lm, model = opened(variant)
    context = TOKENIZER.encode("One model")
    likeliest = generate(model, [context], max_new_tokens=1)[0]
    ends = [TOKENIZER.eos_id]
    asked = {  # the two texts -> what they are read as
        ("One model", " reads a line"): (context, " reads a line"),
        ("", "One"): (ends, "One"),
        ("One model ", "reads"): (context, " reads"),
    }
    scores = lm.loglikelihood(requests(*asked))
    for (score, greedy), (start, text) in zip(scores, asked.values(), strict=True):
        expected, is_greedy = by_hand(model, start, TOKENIZER.encode(text))
        assert (score, greedy) == (pytest.approx(expected, abs=1e-4), is_greedy)
    assert lm._score([(context, likeliest)])[0][1]
    assert lm.loglikelihood_rolling(requests((TEXT,), ("",))) == [
        pytest.approx(by_hand(model, ends, TOKENIZER.encode(TEXT))[0], abs=1e-4),
        0,
    ]
    written = generate(model, [context], max_new_tokens=6, stop={TOKENIZER.eos_id})[0]
    asked = {"until": [], "max_gen_toks": 6}
    assert lm.generate_until(requests(("One model", asked), (TEXT, asked)))[0] == TOKENIZER.decode(written)


def test_long_texts_are_scored_in_windows_of_full_context(opened):
    lm, model = opened()
    tokens = [TOKENIZER.eos_id, *TOKENIZER.encode(TEXT * 5)]
    assert len(tokens) > 2 * 32
    last = (len(tokens) - 1) // 32 * 32 + 1
    expected = sum(by_hand(model, tokens[i : i + 1], tokens[i + 1 : i + 33])[0] for i in range(0, last - 1, 32))
    expected += by_hand(model, tokens[-33:last], tokens[last:])[0]
    assert lm.loglikelihood_rolling(requests((TEXT * 5,))) == [pytest.approx(expected, abs=1e-3)]
    short = TOKENIZER.encode(" follows")
    context = tokens[1:-1]  # the space at the end belongs to the continuation
    score = lm.loglikelihood(requests((TEXT * 5, "follows")))[0][0]
    room = 33 - len(short)
    assert score == pytest.approx(by_hand(model, context[-room:], short)[0], abs=1e-4)


def test_texts_end_before_what_ends_them(opened):
    lm, _ = opened()
    whole = lm.generate_until(requests(("One", {"max_gen_toks": 12})))[0]
    end = whole[3:5]
    for until in (end, ["", end]):
        assert lm.generate_until(requests(("One", {"max_gen_toks": 12, "until": until}))) == [whole.partition(end)[0]]
    settings = {"max_gen_toks": 12, "do_sample": True, "temperature": 5.0, "top_k": 50}
    torch.manual_seed(0)
    assert lm.generate_until(requests(("One", settings))) != [whole]
    assert lm.generate_until(requests(("One", settings | {"do_sample": False}))) == [whole]


def test_a_start_token_precedes_each_context(opened):
    start = TOKENIZER.decode([5])
    lm, model = opened(start=start)
    expected = by_hand(model, [5, *TOKENIZER.encode("One")], TOKENIZER.encode(" model"))[0]
    assert lm.loglikelihood(requests(("One", " model")))[0][0] == pytest.approx(expected, abs=1e-4)
    expected = by_hand(model, [5], TOKENIZER.encode("One"))[0]
    assert lm.loglikelihood_rolling(requests(("One",))) == [pytest.approx(expected, abs=1e-4)]


def test_what_cannot_be_scored(opened, adapter, tmp_path):
    lm, _ = opened()
    for continuation in ("", TEXT * 5):
        with pytest.raises(ValueError, match="continuation"):
            lm.loglikelihood(requests(("One", continuation)))
    with pytest.raises(ValueError, match="max_length"):
        lm.generate_until(requests(("One", {"max_gen_toks": 32})))
    (tmp_path / "standard/tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        adapter(str(tmp_path / "standard"))
    make_llama("Llama", vocab_size=64, hidden_size=16, num_attention_heads=4).save_pretrained(tmp_path / "llama")
    assert open_model(f"hf:{tmp_path / 'llama'}").library == "transformers"
    with pytest.raises(ValueError, match="transformers"):
        adapter(f"hf:{tmp_path / 'llama'}")
