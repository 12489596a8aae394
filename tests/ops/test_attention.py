"""The operation in float64: every backend on every problem, and what else all of them promise.

Accuracy in every dtype is in test_battery.py.
"""

import itertools

import pytest
import torch
from oracle import PROBLEMS, masks, tensors
from stand_ins import RELEASES, StandIn, plain_flex
from torch.autograd import gradcheck

from diffvision.ops import attention_backend, diff_attention
from diffvision.ops.attention import BACKENDS, Problem, flash, flex
from diffvision.ops.attention.choice import choose

# The backends that compute in float64 anywhere; tests/ops/test_battery.py runs over every one.
NAMES = ["eager", "blocked", "sdpa"]


def by_the_formula(q, k, v, lam, causal=False, mask=None, scale=None):
    """Loops over everything, in float64: shares no line with the package."""
    out = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=torch.float64)
    lam = lam.double().expand(*q.shape[:2], q.shape[3], 1)
    mask = None if mask is None else mask.expand(*q.shape[:2], q.shape[3], k.shape[3])
    for b, h, i in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[3])):
        kv = h // (q.shape[1] // k.shape[1])
        allowed = [
            j
            for j in range(k.shape[3])
            if (not causal or j <= i + k.shape[3] - q.shape[3]) and (mask is None or mask[b, h, i, j])
        ]
        if not allowed:
            continue
        maps = []
        for p in range(2):
            keys = k[b, kv, p if k.shape[2] == 2 else 0, allowed].double()
            maps.append((keys @ q[b, h, p, i].double() * (q.shape[4] ** -0.5 if scale is None else scale)).softmax(0))
        out[b, h, i] = (maps[0] - lam[b, h, i] * maps[1]) @ v[b, kv, allowed].double()
    return out


EVERY = [*NAMES, "single", "flex", *RELEASES]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_formula_in_loops(problem):
    q, k, v, lam = tensors(**PROBLEMS[problem] | ({"m": 20, "n": 9} if "long" in problem else {}))
    for mask in (None, *masks(q, k).values()):
        for causal, scale in ((False, None), (False, 0.0), (True, -0.3)):
            out = diff_attention(q, k, v, lam, causal=causal, mask=mask, scale=scale, backend="eager")
            expected = by_the_formula(q, k, v, lam, causal, mask, scale)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def takes(backend, problem):
    one_query, has_keys = PROBLEMS[problem].get("m") == 1, PROBLEMS[problem].get("n") != 0
    return one_query if backend == "single" else has_keys or backend in NAMES


@pytest.mark.parametrize(
    ("backend", "problem"), [cell for cell in itertools.product(EVERY[1:], PROBLEMS) if takes(*cell)]
)
def test_every_backend_on_every_problem(backend, problem, monkeypatch):
    """Outputs and gradients of `eager`, at any mask and scale that the backend takes."""
    inputs, releases = tensors(**PROBLEMS[problem]), RELEASES.get(backend)
    q, k = inputs[:2]
    module = BACKENDS["flash" if releases else backend]
    monkeypatch.setattr(flex, "_compile", lambda device: plain_flex)
    if releases:
        made = StandIn(backend)
        monkeypatch.setattr(flash, "find_libraries", made.libraries)
    if backend == "flex":  # which has no backward on a CPU
        inputs = [t.detach() for t in inputs]
    given = [None] if releases else [None, *masks(q, k).values()]
    for (causal, scale), mask in itertools.product(((False, 0.7), (True, -0.3)), given):
        settings = {"causal": causal, "mask": mask, "scale": scale, "dropout": 0.0}
        out = module.diff_attention(*inputs, **settings)
        expected = BACKENDS["eager"].diff_attention(*inputs, **settings)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        if backend != "flex":
            weight = torch.randn_like(out)
            ours, theirs = (torch.autograd.grad(o, inputs, weight) for o in (out, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    if releases:
        calls = 1 if k.shape[2] == 1 else 2
        is_cut = inputs[2].shape[3] > made.package.largest or (q.shape[4] > 64 and inputs[2].shape[3] > 128)
        assert len(made.calls) == 2 * calls * (2 if is_cut else 1)


def test_single_takes_one_query():
    with pytest.raises(ValueError, match="'single' cannot take this call"):
        diff_attention(*tensors(m=1), dropout=0.1, backend="single")
    with pytest.raises(ValueError, match="one query per head, not 2"):
        diff_attention(*tensors(m=2), backend="single")
    for dtype in (torch.bfloat16, torch.float16):  # rounded once
        q, k, v, lam = tensors(m=1, n=40, hk=2, dtype=dtype)
        out, exact = diff_attention(q, k, v, lam, backend="single"), by_the_formula(q, k, v, lam)
        assert out.dtype == dtype
        torch.testing.assert_close(out, exact.to(dtype), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])  # the others' gradients are compared with these
def test_gradcheck(backend):
    inputs = tensors(**{"b": 1, "d": 3, **PROBLEMS["v2 grouped"], "v": 4, "lam": (1, 4, 1, 1)})
    mask = torch.ones(inputs[0].shape[3], inputs[1].shape[3], dtype=torch.bool)
    mask[0] = False  # a row without any key
    assert gradcheck(lambda *t: diff_attention(*t, causal=True, mask=mask, backend=backend), inputs)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout_keeps_the_expectation_and_draws_each_map(backend):
    q, k, v, lam = (t.detach().float() for t in tensors(b=1, h=1, m=4, n=4))
    same = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)
    difference = diff_attention(*same, v, 1.0, dropout=0.5, backend=backend)
    assert difference.abs().max() > 0.1, "one draw for both maps would cancel"
    # A batch of 20,000 copies gives as many draws.
    many = [t.expand(20_000, *t.shape[1:]) for t in (q, k, v)]
    mean = diff_attention(*many, lam, dropout=0.3, backend=backend).mean(0, keepdim=True)
    torch.testing.assert_close(mean, diff_attention(q, k, v, lam), rtol=0, atol=0.06)


def test_sdpa_never_takes_the_math_path_on_a_cpu_without_dropout():
    """Unequal sizes would: the profile names the kernel that ran."""
    q, k, v, lam = (t.detach().float() for t in tensors(m=33, n=33))
    with torch.profiler.profile(acc_events=True) as profile:
        diff_attention(q, k, v, lam, causal=True, backend="sdpa")
    names = {event.name for event in profile.events()}
    assert any("flash_attention_for_cpu" in name for name in names)
    assert not any("attention_math" in name for name in names)


def test_what_auto_takes():
    short, cuda = Problem(2, 4, 4, 33, 33, 16, 32), {"device": "cuda", "dtype": torch.bfloat16}
    long = short._replace(queries=4096, keys=4096)
    for name, problem in {
        "eager": short,
        "blocked": long,
        "sdpa": long._replace(dropout=0.1),
        "single": long._replace(queries=1),
    }.items():
        assert choose("auto", problem)[0] == name
        assert choose("auto", problem._replace(**cuda))[0] == "sdpa"
        assert BACKENDS[name].limit(problem) is None


def test_a_preferred_backend_serves_every_call_within_and_never_falls_back():
    q, k, v, lam = tensors()
    with attention_backend("blocked"):
        with torch.profiler.profile(acc_events=True) as profile:
            diff_attention(q, k, v, lam)
        assert "diffvision::diff_attention_blocked" in {event.name for event in profile.events()}
        with pytest.raises(ValueError, match="'blocked' cannot take this call"):
            diff_attention(q, k, v, lam, dropout=0.5)
        diff_attention(q, k, v, lam, dropout=0.5, backend="eager")
    diff_attention(q, k, v, lam, dropout=0.5)
    with pytest.raises(ValueError, match="unknown backend 'fast'"), attention_backend("fast"):
        pass


@pytest.mark.parametrize("backend", NAMES)
def test_the_result_may_be_changed_in_place(backend):
    inputs = tensors()
    diff_attention(*inputs, backend=backend).mul_(2).sum().backward()
    assert all(t.grad is not None for t in inputs)


BAD = {
    "one map": (lambda q, k, v, lam: (q[:, :, :1], k, v, lam), {}, r"q \[B, H, 2, M, D\]"),
    "heads": (lambda q, k, v, lam: (q, k[:, :3], v[:, :3], lam), {}, "4 query heads cannot share 3"),
    "head size": (lambda q, k, v, lam: (q[..., :4], k, v, lam), {}, "one head size"),
    "length": (lambda q, k, v, lam: (q, k[..., :5, :], v, lam), {}, "same heads and length"),
    "dtype": (lambda q, k, v, lam: (q.float(), k, v, lam), {}, "one dtype"),
    "lam": (lambda q, k, v, lam: (q, k, v, torch.ones(3)), {}, r"lam has shape \(3,\)"),
    "mask dtype": (lambda *t: t, {"mask": torch.zeros(7, 7)}, "mask must be a boolean tensor"),
    "mask kind": (lambda *t: t, {"mask": True}, "mask must be a boolean tensor"),
    "no heads": (lambda q, k, v, lam: (q, k[:, :0], v[:, :0], lam), {}, "heads and head sizes must be 1 or more"),
    "no size": (lambda q, k, v, lam: (q[..., :0], k[..., :0], v, lam), {}, "heads and head sizes must be 1 or more"),
    "complex lam": (lambda q, k, v, lam: (q, k, v, lam + 1j), {}, "lam must be a real tensor or number"),
    "lam kind": (lambda q, k, v, lam: (q, k, v, None), {}, "lam must be a real tensor or number, got NoneType"),
    "integers": (lambda q, k, v, lam: (q.int(), k.int(), v.int(), lam), {}, "floating point of 16 bits"),
    "scale": (lambda *t: t, {"scale": float("nan")}, "scale must be a finite number"),
    "mask shape": (lambda *t: t, {"mask": torch.ones(6, 7, dtype=torch.bool)}, "mask has shape"),
    "dropout": (lambda *t: t, {"dropout": 1.0}, "dropout must be in"),
    "backend": (lambda *t: t, {"backend": "flashy"}, "unknown backend 'flashy'"),
    "batch": (lambda q, k, v, lam: (q, k[:1], v, lam), {}, "batch"),
    "no tensor": (lambda q, k, v, lam: (q.tolist(), k, v, lam), {}, "q must"),
    "a list as scale": (lambda *t: t, {"scale": [1.0]}, "scale"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    change, settings, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        diff_attention(*change(*tensors()), **settings)


def test_vmap_and_forward_mode_derivatives_are_the_formula_s_or_refused():
    q, k, v, lam = (t.detach() for t in tensors(m=90, n=90))

    def tangent(backend):
        return torch.func.jvp(lambda q: diff_attention(q, k, v, lam, backend=backend), (q,), (torch.ones_like(q),))[1]

    assert tangent("eager").abs().max() > 0
    torch.testing.assert_close(tangent("auto"), tangent("eager"))
    with pytest.raises(ValueError, match="'blocked' cannot take this call"):
        tangent("blocked")
    q, k, v = (t[..., :7, :] for t in (q, k, v))
    each = torch.func.vmap(lambda q: diff_attention(q, k, v, lam))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(each[1], diff_attention(2 * q, k, v, lam))


@pytest.mark.slow
def test_a_scale_that_changes_compiles_whole():
    inputs = tensors()
    compiled = torch.compile(lambda s: diff_attention(*inputs, scale=s), fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(scale), diff_attention(*inputs, scale=scale))


@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
def test_exports_for_any_batch(backend):
    class Call(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return diff_attention(q, k, v, 0.5, causal=True, mask=mask, backend=backend)

    inputs, mask = small(), torch.rand(17, 17) > 0.3
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(Call(), (*inputs, mask), dynamic_shapes=(batch, batch, batch, None)).module()
    given = [torch.cat([t, t.flip(0)]) for t in inputs]
    torch.testing.assert_close(program(*given, mask), Call()(*given, mask))


def small(length=17):
    return [torch.randn(shape) for shape in ((2, 2, 2, length, 8), (2, 2, 2, length, 8), (2, 2, length, 16))]


def test_a_compiled_call_of_lengths_that_change():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: diff_attention(q, k, v, 0.5), fullgraph=True, dynamic=True, backend="eager"
    )
    for length in (17, 18, 100, 101):
        q, k, v = small(length)
        torch.testing.assert_close(compiled(q, k, v), diff_attention(q, k, v, 0.5))
    torch.compiler.reset()


def test_under_autocast_and_deterministic_algorithms_the_numbers_are_the_same():
    q, k, v = small()
    plain = diff_attention(q, k, v, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(diff_attention(q, k, v, 0.5), plain)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(diff_attention(q, k, v, 0.5), plain)
    finally:
        torch.use_deterministic_algorithms(False)
