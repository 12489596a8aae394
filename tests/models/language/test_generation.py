"""Generation: the cache against none, batches against single prompts, how tokens are drawn, and what is refused."""

import pytest
import torch

from diffvision.models.language import generation
from diffvision.models.language.generation import Sampling, generate
from diffvision.nn import ATTENTION

CLOSE = {"rtol": 0, "atol": 1e-5}


def _without_cache(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_variant_without_a_cache_computes_whole_sequences(make_model):
    model = make_model("diff-debug", variant="v1_dint")
    prompts = [torch.randint(97, (length,)).tolist() for length in (12, 3)]
    expected = [_without_cache(model, prompt, 8) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=8) == expected


def test_unequal_prompts_equal_each_alone(model):
    prompts = [torch.randint(97, (length,)).tolist() for length in (75, 1, 23, 75)]
    padding = torch.tensor([75 - len(prompt) for prompt in prompts])
    tokens = torch.tensor([[0] * (75 - len(prompt)) + prompt for prompt in prompts])
    with torch.no_grad():
        padded = model.hidden(tokens, padding=padding)
        assert padded.isfinite().all()
        for row, prompt in zip(padded, prompts, strict=True):
            torch.testing.assert_close(row[-len(prompt) :], model.hidden(torch.tensor([prompt]))[0], **CLOSE)
    expected = [_without_cache(model, prompt, 12) for prompt in prompts]
    assert min(len(set(made)) for made in expected) > 4
    assert generate(model, prompts, max_new_tokens=12) == expected


@pytest.mark.parametrize("variant", ["gated", "v1_gated", "v2_gated", "sink", "integral"])
def test_cures_decode_padded_prompts(variant, make_model):
    model = make_model("diff-debug", variant=variant, num_kv_heads=1)
    for name, parameter in model.named_parameters():
        if "sink" in name or "gate" in name:
            torch.nn.init.normal_(parameter)
    test_unequal_prompts_equal_each_alone(model)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_where_they_are_read_every_few(model, temperature, monkeypatch):
    """As from a GPU: rows that have ended go on until the others have, and what they draw is left out."""
    prompts = [[5, 6, 7], [8], [9, 3]]

    def new_tokens(stop, count):
        draws = torch.Generator().manual_seed(0)
        settings = {"temperature": temperature, "generator": draws}
        return generate(model, prompts, max_new_tokens=count, stop=stop, **settings)

    for count in (1, 11):
        stop = {row[len(row) // 2] for row in new_tokens((), 11)}
        monkeypatch.setattr(generation, "_tokens_between_reads", lambda device: 1)
        each = new_tokens(stop, count)
        for every in (4, 8):
            monkeypatch.setattr(generation, "_tokens_between_reads", lambda device, every=every: every)
            assert new_tokens(stop, count) == each


def test_stop_tokens_and_streaming(model):
    prompts = [[3, 4, 5], [6, 7]]
    free = generate(model, prompts, max_new_tokens=12)
    stop = free[0][4]
    seen = [[], []]
    kept = generate(
        model, prompts, max_new_tokens=12, stop={stop}, on_token=lambda index, token: seen[index].append(token)
    )
    assert kept == seen
    for got, whole in zip(kept, free, strict=True):
        assert got == (whole[: whole.index(stop)] if stop in whole else whole)
    assert generate(model, prompts[:1], max_new_tokens=12, stop=[free[0][0]]) == [[]]


def test_sampling_follows_its_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    plain = Sampling(temperature=1.0).probabilities(logits)
    torch.testing.assert_close(plain, logits.softmax(0))
    torch.testing.assert_close(Sampling(temperature=2.0).probabilities(logits), (logits / 2).softmax(0))
    two = logits[:2].softmax(0)
    zeros = torch.zeros(2)
    torch.testing.assert_close(Sampling(temperature=1.0, top_k=2).probabilities(logits), torch.cat([two, zeros]))
    # 0.644 + 0.237 + 0.087 + 0.032: the second is needed to reach 0.7, the third to reach 0.9
    torch.testing.assert_close(Sampling(temperature=1.0, top_p=0.7).probabilities(logits), torch.cat([two, zeros]))
    assert (Sampling(temperature=1.0, top_p=0.9).probabilities(logits) > 0).tolist() == [True, True, True, False]
    assert (Sampling(temperature=1.0, top_p=0.01).probabilities(logits)).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(Sampling(temperature=1.0, top_k=9, top_p=1.0).probabilities(logits), plain)
    generator = torch.Generator().manual_seed(0)
    drawn = Sampling(temperature=1.0).choose(logits.expand(20_000, -1), generator).bincount() / 20_000
    torch.testing.assert_close(drawn, plain, rtol=0, atol=0.01)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-60, 5e-324])
def test_greedy_is_the_limit_of_low_temperatures(temperature):
    """Whose quotients overflow, and which are 0 in float32; equals share what greedy gives to the first."""
    near = Sampling(temperature=temperature)
    logits = torch.tensor([[3.0, -2.0, 9.0, 8.9], [-5.0, -7.0, -5.0, -6.0], [0.0, 1e30, -1e30, -torch.inf]])
    expected = torch.tensor([[0, 0, 1.0, 0], [0.5, 0, 0.5, 0], [0, 1.0, 0, 0]])
    assert torch.equal(near.probabilities(logits), expected)
    assert torch.equal(Sampling(temperature=temperature, top_k=3, top_p=0.9).probabilities(logits), expected)
    assert near.choose(logits[::2]).tolist() == Sampling().choose(logits[::2]).tolist()


def test_draws_repeat_with_their_generator(make_model):
    model = make_model("diff-debug")

    def draw(seed, **settings):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, [[1, 2]], max_new_tokens=8, temperature=1.5, generator=generator, **settings)

    assert draw(0) == draw(0) != draw(1)
    assert draw(0, top_k=1) == generate(model, [[1, 2]], max_new_tokens=8)
    assert draw(0, top_p=1e-6) == generate(model, [[1, 2]], max_new_tokens=8)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompts"),
        ([], {}, "prompts"),
        ([[1], [5] * 250], {}, "max_length .*257"),
        ([[1, 97]], {}, "tokens .*97"),
        ([[1, -1]], {}, "tokens .*-1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_k": 5}, "temperature"),
        ([[1]], {"top_k": 0, "temperature": 1.0}, "top_k"),
        ([[1]], {"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ([[1]], {"vocab_size": 0}, "vocab_size"),
        (torch.tensor([1, 2]), {}, "prompts"),
        ([1, 2], {}, "prompts"),
    ],
)
def test_what_is_refused(prompts, settings, message, make_model):
    with pytest.raises(ValueError, match=message):
        generate(make_model("diff-debug"), prompts, **{"max_new_tokens": 7, **settings})


def test_only_the_tokenizer_s_tokens(model):
    assert max(generate(model, [[1, 2]], max_new_tokens=40)[0]) >= 30
    assert max(generate(model, [[1, 2]], max_new_tokens=40, vocab_size=30)[0]) < 30


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", [name for name, layer in ATTENTION.items() if layer.cacheable])
@torch.no_grad()
def test_generates_under_autocast(variant, device, make_model):
    model = make_model("diff-debug", variant=variant).to(device)
    tokens = torch.randint(97, (2, 24), device=device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype):
            cache = model.new_cache(2, 24)
            cached = torch.cat([model.hidden(part, cache=cache) for part in tokens.split([20, 1, 3], dim=1)], dim=1)
            whole = model.hidden(tokens)
            made = generate(model, [[1, 2, 3], [4]], max_new_tokens=4)
        assert (cache.layers[0].keys.dtype, cache.layers[0].values.dtype) == (dtype, dtype)
        assert (cached - whole).float().norm() < 0.03 * whole.float().norm()
        assert [len(row) for row in made] == [4, 4]
    cache = model.new_cache(1, 24)  # in float32
    with torch.autocast(device, torch.bfloat16), pytest.raises(ValueError, match=r"got 1 in torch\.bfloat16"):
        model.hidden(tokens[:1], cache=cache)
