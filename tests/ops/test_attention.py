import itertools

import pytest
import torch
from torch.autograd import gradcheck

from diffvision.ops import (
    attention_backend,
    attention_maps,
    diff_attention,
    diff_attention_varlen,
    supported_backends,
)
from diffvision.ops.attention import BACKENDS, Problem, api
from diffvision.ops.attention.choice import REMOVED

# The backends that compute in float64 anywhere; tests/ops/test_battery.py runs over every one.
NAMES = ["eager", "blocked", "sdpa"]


def tensors(b=2, h=4, hk=None, m=7, n=7, d=8, v=16, keys=2, dtype=torch.float64, lam=(1,)):
    hk = h if hk is None else hk
    made = [torch.randn(b, h, 2, m, d), torch.randn(b, hk, keys, n, d), torch.randn(b, hk, n, v), torch.rand(lam) + 0.2]
    return [t.to(dtype).requires_grad_() for t in made]


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
            maps.append((keys @ q[b, h, p, i].double() * (scale or q.shape[4] ** -0.5)).softmax(0))
        out[b, h, i] = (maps[0] - lam[b, h, i] * maps[1]) @ v[b, kv, allowed].double()
    return out


SHAPES = {
    "v1": {},
    "v1 grouped": {"h": 4, "hk": 2},
    "v2 grouped": {"h": 4, "hk": 2, "keys": 1, "v": 8},
    "v2": {"keys": 1, "v": 8},
    "odd value size": {"v": 5},
    "value wider and odd": {"v": 19, "d": 6},
    "lam per head": {"lam": (4, 1, 1)},
    "lam per token": {"lam": (2, 4, 7, 1)},
    "one token": {"m": 1, "n": 1},
    "a cache of keys": {"m": 3, "n": 9},
    "one query, many keys": {"m": 1, "n": 9},
    "more queries than keys": {"m": 9, "n": 4},
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", NAMES)
def test_equals_the_formula(backend, shape, causal, masked):
    q, k, v, lam = tensors(**SHAPES[shape])
    mask = torch.rand(q.shape[0], 1, q.shape[3], k.shape[3]) > 0.4 if masked else None
    out = diff_attention(q, k, v, lam, causal=causal, mask=mask, backend=backend)
    torch.testing.assert_close(out, by_the_formula(q, k, v, lam, causal, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])  # the others' gradients are compared with these
def test_gradcheck(backend):
    inputs = tensors(**{"b": 1, "d": 3, **SHAPES["v2 grouped"], "v": 4, "lam": (1, 4, 1, 1)})
    mask = torch.ones(inputs[0].shape[3], inputs[1].shape[3], dtype=torch.bool)
    mask[0] = False  # a row without any key
    assert gradcheck(lambda *t: diff_attention(*t, causal=True, mask=mask, backend=backend), inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_backends_agree_on_every_gradient(shape):
    inputs = tensors(**SHAPES[shape])
    grads = {}
    for name in NAMES:
        out = diff_attention(*inputs, causal=True, backend=name)
        grads[name] = torch.autograd.grad(out.square().sum(), inputs)
    for name in NAMES:
        for own, oracle in zip(grads[name], grads["eager"], strict=True):
            torch.testing.assert_close(own, oracle, rtol=1e-10, atol=1e-12)


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


def test_maps_are_softmaxes():
    q, k, v, lam = tensors(h=4, hk=2)
    maps = attention_maps(q, k, causal=True)
    assert maps.shape == (2, 4, 2, 7, 7)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 2, 7, dtype=torch.float64))
    assert (maps.triu(1) == 0).all()
    out = (maps[:, :, 0] - lam * maps[:, :, 1]) @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, diff_attention(q, k, v, lam, causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["blocked", "auto"])
def test_compiles_whole_and_exports(backend):
    q, k, v, lam = (t.detach().float() for t in tensors())
    mask = torch.ones(7, 7, dtype=torch.bool)
    expected = diff_attention(q, k, v, lam, causal=True, mask=mask, backend=backend)

    class Call(torch.nn.Module):
        def forward(self, q, k, v, lam, mask):
            return diff_attention(q, k, v, lam, causal=True, mask=mask, backend=backend)

    compiled = torch.compile(Call(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, lam, mask), expected)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(
        Call(), (q, k, v, lam, mask), dynamic_shapes=({0: batch}, {0: batch}, {0: batch}, None, None)
    )
    twice = [torch.cat([t, t]) for t in (q, k, v)]
    torch.testing.assert_close(exported.module()(*twice, lam, mask), torch.cat([expected, expected]))


def test_sdpa_never_takes_the_math_path_on_a_cpu_without_dropout():
    """Unequal sizes would: the profile names the kernel that ran."""
    q, k, v, lam = (t.detach().float() for t in tensors(m=33, n=33))
    with torch.profiler.profile(acc_events=True) as profile:
        diff_attention(q, k, v, lam, causal=True, backend="sdpa")
    names = {event.name for event in profile.events()}
    assert any("flash_attention_for_cpu" in name for name in names)
    assert not any("attention_math" in name for name in names)


def test_auto_is_what_supported_backends_says():
    short = Problem(2, 4, 4, 33, 33, 16, 32)
    chosen = {
        "eager": short,
        "blocked": short._replace(queries=4096, keys=4096),
        "sdpa": short._replace(device="cuda", dtype=torch.bfloat16),
    }
    for name, problem in chosen.items():
        report = supported_backends(problem)
        assert next(iter(report)) == name
        assert set(report) == set(BACKENDS)
        assert report[name].startswith("chosen: ")
        assert all(
            reason.startswith(("passed over: ", "cannot: ")) for other, reason in report.items() if other != name
        )
    assert supported_backends(short)["flash"].startswith("cannot: ")
    dropped = supported_backends(short._replace(queries=4096, keys=4096, dropout=0.1))
    assert next(iter(dropped)) == "sdpa"
    assert dropped["blocked"] == "cannot: it draws no dropout, got 0.1"


@pytest.mark.parametrize("name", REMOVED)
def test_a_backend_of_an_earlier_version_is_refused_with_another(name):
    q, k, v, lam = tensors()
    with pytest.raises(ValueError, match=f"{name}.*{REMOVED[name]}"):
        diff_attention(q, k, v, lam, backend=name)
    with pytest.raises(ValueError, match=f"{name}.*{REMOVED[name]}"), attention_backend(name):
        pass


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
def test_queries_long_before_the_first_key_are_zeros(backend):
    """Whole blocks of rows without keys, and no keys at all."""
    q, k, v, lam = tensors(b=1, h=10, hk=2, m=232, n=93, d=24, v=5, keys=1)
    out = diff_attention(q, k, v, lam, causal=True, backend=backend)
    true = diff_attention(q, k, v, lam, causal=True, backend="eager")
    torch.testing.assert_close(out, true)
    assert (out[:, :, :139] == 0).all()
    for got, want in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v, lam)),
        torch.autograd.grad(true.square().sum(), (q, k, v, lam)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    q, k, v, lam = tensors(h=4, hk=2, n=0)
    out = diff_attention(q, k, v, lam, backend=backend)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v, lam)))


@pytest.mark.parametrize("scale", [0.0, -0.25, 1e-8])
@pytest.mark.parametrize("backend", NAMES)
def test_any_finite_scale(backend, scale):
    q, k, v, lam = tensors()
    out = diff_attention(q, k, v, lam, causal=True, scale=scale, backend=backend)
    scores = torch.einsum("bhpmd,bhpnd->bhpmn", q, k) * scale
    maps = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, (maps[:, :, 0] - lam * maps[:, :, 1]) @ v)


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


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
BAD_PACKED = {
    "axes": (lambda q, k, v, lam: ((q[None], k, v, lam, CU), {}), r"q \[T, H, 2, D\]"),
    "one map": (lambda q, k, v, lam: ((q[:, :, :1], k, v, lam, CU), {}), r"q \[B, H, 2, M, D\]"),
    "heads": (lambda q, k, v, lam: ((q, k[:, :3], v[:, :3], lam, CU), {}), "4 query heads cannot share 3"),
    "rows": (lambda q, k, v, lam: ((q, k, v[:4], lam, CU), {}), "same heads and length"),
    "dtype": (lambda q, k, v, lam: ((q.half(), k, v, lam, CU), {}), "one dtype"),
    "integers": (lambda q, k, v, lam: ((q.int(), k.int(), v.int(), lam, CU), {}), "floating point"),
    "offsets": (lambda q, k, v, lam: ((q, k, v, lam, CU.long()), {}), "cu_seqlens must be int32"),
    "offsets of keys": (lambda q, k, v, lam: ((q, k, v, lam, CU), {"cu_seqlens_k": [0, 2, 5]}), "cu_seqlens_k must be"),
    "number": (lambda q, k, v, lam: ((q, k, v, lam, CU), {"cu_seqlens_k": CU[:2]}), "has 2 offsets and cu_seqlens 3"),
    "end": (lambda q, k, v, lam: ((q, k, v, lam, CU - 1), {}), "must rise from 0"),
    "lam": (lambda q, k, v, lam: ((q, k, v, torch.ones(3, 1, 1), CU), {}), r"lam has shape \(3, 1, 1\)"),
    "complex lam": (lambda q, k, v, lam: ((q, k, v, lam * 1j, CU), {}), "lam must be a real tensor"),
    "scale": (lambda q, k, v, lam: ((q, k, v, lam, CU), {"scale": float("inf")}), "scale must be a finite"),
    "backend": (lambda q, k, v, lam: ((q, k, v, lam, CU), {"backend": "flash"}), "cuda, not on cpu"),
}


@pytest.mark.parametrize("case", BAD_PACKED)
def test_bad_packed_input_is_named(case):
    change, message = BAD_PACKED[case]
    arguments, settings = change(
        torch.randn(5, 4, 2, 8), torch.randn(5, 4, 2, 8), torch.randn(5, 4, 16), torch.tensor(0.2)
    )
    with pytest.raises(ValueError, match=message):
        diff_attention_varlen(*arguments, **settings)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lam", [(1, 1, 1), (1, 4, 1), (13, 4, 1)])
def test_sequences_padded_to_the_longest_equal_each_alone(lam, causal):
    """With sequences without queries, without keys, and with more queries than keys."""
    cu, cu_k = torch.tensor([[0, 3, 3, 12, 13], [0, 5, 7, 11, 11]], dtype=torch.int32)
    q, k, v = torch.randn(13, 4, 2, 8), torch.randn(11, 2, 2, 8), torch.randn(11, 2, 16)
    leaves = [t.double().requires_grad_() for t in (q, k, v, torch.rand(lam))]
    outs = [diff_attention_varlen(*leaves, cu, cu_seqlens_k=cu_k, causal=causal, scale=0.3)]
    outs.append(api._padded_attention(*leaves, cu, cu_k, 9, 5, causal, 0.3, "auto"))
    assert (outs[1][-1] == 0).all()
    for got, want in zip(*((out, *torch.autograd.grad(out.sin().sum(), leaves)) for out in outs), strict=True):
        torch.testing.assert_close(got, want)


def test_sequences_on_a_device_are_not_waited_for():
    q, v = torch.empty(9, 4, 2, 8, device="meta", requires_grad=True), torch.empty(9, 4, 8, device="meta")
    cu = torch.empty(4, dtype=torch.int32, device="meta")  # whose values nothing can read
    out = diff_attention_varlen(q, q, v, 0.5, cu, max_seqlen=5, max_seqlen_k=5, causal=True)
    assert out.shape == v.shape
    out.sum().backward()


@pytest.mark.slow
def test_sequences_are_one_graph():
    q, v, cu = torch.randn(9, 4, 2, 8), torch.randn(9, 4, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    settings = {"max_seqlen": 5, "max_seqlen_k": 5, "causal": True}
    out = torch.compile(diff_attention_varlen, fullgraph=True, backend="eager")(q, q, v, 0.5, cu, **settings)
    torch.testing.assert_close(out, diff_attention_varlen(q, q, v, 0.5, cu, **settings))


@pytest.mark.parametrize("backend", NAMES)
def test_masks_of_any_broadcastable_shape(backend):
    q, k, v, lam = (t.detach() for t in tensors())
    keys = torch.tensor([True, True, False, True, True, True, False])
    expected = by_the_formula(q, k, v, lam, mask=keys[None, None, None])
    torch.testing.assert_close(diff_attention(q, k, v, lam, mask=keys, backend=backend), expected, rtol=0, atol=1e-12)
    everything = diff_attention(q, k, v, lam, mask=torch.tensor(True), backend=backend)
    torch.testing.assert_close(everything, by_the_formula(q, k, v, lam), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_query_with_any_lambda_and_mask(shape):
    q, k, v, lam = tensors(**{**SHAPES[shape], "m": 1, "n": 5, "lam": (1,)})
    for one in (
        lam,
        lam.view(1, 1, 1, 1),
        lam.squeeze(),
        torch.rand(2, 4, 1, 1).double(),
        torch.rand(4, 1, 1).double(),
    ):
        for mask in (None, torch.tensor(True), torch.tensor([[[[True]]], [[[False]]]]), torch.rand(2, 4, 1, 5) > 0.4):
            out = diff_attention(q, k, v, one, mask=mask, backend="single")
            torch.testing.assert_close(out, diff_attention(q, k, v, one, mask=mask, backend="eager"))
    for rows, keys in ((0, 5), (2, 0)):
        out = diff_attention(q[:rows], k[:rows, :, :, :keys], v[:rows, :, :keys], lam, backend="single")
        assert out.shape == (rows, 4, 1, v.shape[3])
        assert (out == 0).all()


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


def test_symbolic_sizes_are_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = small()
    graph = make_fx(lambda q, k, v: diff_attention(q, k, v, 0.5), tracing_mode="symbolic")(q, k, v)
    torch.testing.assert_close(graph(q, k, v), diff_attention(q, k, v, 0.5))


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
