"""Calls equal to one before skip the checks and the choice; whatever those read makes a call unequal."""

import pytest
import torch

from diffvision.ops import attention_backend, diff_attention
from diffvision.ops.attention import Problem, api, choice
from diffvision.ops.attention.choice import BACKENDS, problems_seen


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    monkeypatch.setattr(api, "_known", {})


@pytest.fixture
def chosen(monkeypatch):
    """The names of the backends that computed calls, and how often one was chosen."""
    names, choices = [], []

    def noted(name, function):
        def call(*tensors, **settings):
            names.append(name)
            return function(*tensors, **settings)

        return call

    for name, module in BACKENDS.items():
        if hasattr(module, "diff_attention"):  # varlen has none
            monkeypatch.setattr(module, "diff_attention", noted(name, module.diff_attention))
    rule = choice.rule
    monkeypatch.setattr(choice, "rule", lambda problem: choices.append(problem) or rule(problem))
    return names, choices


def tensors(queries=17, keys=17, dtype=torch.float32, grad=False):
    shapes = (2, 2, 2, queries, 8), (2, 2, 2, keys, 8), (2, 2, keys, 16)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def test_equal_calls_choose_once(chosen):
    names, choices = chosen
    for _ in range(3):
        diff_attention(*tensors(), 0.5)
    assert (names, len(choices)) == (["eager"] * 3, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"queries": 1}, "single"),
        ({"queries": 100, "keys": 100}, "blocked"),
        ({"dtype": torch.float64}, "eager"),
        ({"grad": True}, "eager"),
    ],
)
def test_other_tensors_are_chosen_for_again(chosen, change, name):
    names, choices = chosen
    diff_attention(*tensors(), 0.5)
    diff_attention(*tensors(**change), 0.5)
    assert (names, len(choices)) == (["eager", name], 2)


def test_other_settings_are_chosen_for_again(chosen):
    names, choices = chosen
    q, k, v = tensors(100, 100)
    mask, lam = torch.ones(1, 1, 1, 100, dtype=torch.bool), torch.rand(2, 2, 100, 1)
    for settings in ({}, {"causal": True}, {"mask": mask}, {"dropout": 0.1}, {"scale": 0.5}):
        diff_attention(q, k, v, 0.5, **settings)
    diff_attention(q, k, v, lam)
    assert (names, len(choices)) == (["blocked"] * 3 + ["sdpa"] + ["blocked"] * 2, 6)


def test_a_wrong_call_after_a_right_one_is_refused():
    q, k, v = tensors()
    diff_attention(q, k, v, 0.5)
    wrong = [
        ((q, k[:1], v, 0.5), {}),
        ((q, k, v.double(), 0.5), {}),
        ((q, k, v, torch.ones(3)), {}),
        ((q, k, v, 0.5), {"mask": torch.ones(17)}),
        ((q, k, v, 0.5), {"dropout": 1.0}),
        ((q, k, v, 0.5), {"scale": float("nan")}),
        ((q, k, v, 0.5), {"scale": [1.0]}),
        ((q, k, v, "0.5"), {}),
        ((q.tolist(), k, v, 0.5), {}),
    ]
    for _ in range(2):
        for arguments, settings in wrong:
            with pytest.raises(ValueError, match=r"batch|dtype|lam|mask|dropout|scale|q must"):
                diff_attention(*arguments, **settings)


def test_contexts_and_named_backends_decide(chosen):
    names, _ = chosen
    call = tensors()
    diff_attention(*call, 0.5)
    with attention_backend("sdpa"):
        diff_attention(*call, 0.5)
    diff_attention(*call, 0.5, backend="blocked")
    diff_attention(*call, 0.5)
    assert names == ["eager", "sdpa", "blocked", "eager"]
    with problems_seen() as seen:
        diff_attention(*call, 0.5)
        diff_attention(*call, 0.5)
    assert len(seen) == 2


def test_forward_derivatives_and_vmap_after_a_plain_call(chosen):
    names, _ = chosen
    q, k, v = tensors(100, 100)
    diff_attention(q, k, v, 0.5)
    _, tangent = torch.func.jvp(lambda q: diff_attention(q, k, v, 0.5), (q,), (torch.ones_like(q),))
    assert names == ["blocked", "eager"]
    assert tangent.abs().sum() > 0
    q, k, v = tensors()
    each = torch.func.vmap(lambda q: diff_attention(q, k, v, 0.5))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(each[1], diff_attention(2 * q, k, v, 0.5))


def test_a_compiled_call_after_a_plain_one_and_lengths_that_change():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: diff_attention(q, k, v, 0.5), fullgraph=True, dynamic=True, backend="eager"
    )
    for length in (17, 18, 100, 101):
        q, k, v = tensors(length, length)
        torch.testing.assert_close(compiled(q, k, v), diff_attention(q, k, v, 0.5))
    torch.compiler.reset()


def test_symbolic_sizes_are_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = tensors()
    graph = make_fx(lambda q, k, v: diff_attention(q, k, v, 0.5), tracing_mode="symbolic")(q, k, v)
    torch.testing.assert_close(graph(q, k, v), diff_attention(q, k, v, 0.5))


def test_under_autocast_and_deterministic_algorithms_the_numbers_are_the_same():
    q, k, v = tensors()
    plain = diff_attention(q, k, v, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(diff_attention(q, k, v, 0.5), plain)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(diff_attention(q, k, v, 0.5), plain)
    finally:
        torch.use_deterministic_algorithms(False)


def test_decoding_chooses_once_for_all_lengths_up_to_a_power_of_two(chosen):
    names, choices = chosen
    for keys in range(1, 301):
        diff_attention(*tensors(1, keys), 0.5)
    assert len(choices) == 10  # 1, 2, 3-4, 5-8, ..., 257-300
    alone = [choice.rule(Problem(2, 2, 2, 1, keys, 8, 16, grad=False))[0] for keys in range(1, 301)]
    assert names == alone


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(api, "_MAX_KNOWN", 4)
    for keys in range(1, 11):
        diff_attention(*tensors(2, keys), 0.5)
        assert len(api._known) <= 4
