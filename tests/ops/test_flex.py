"""FlexAttention: limits, masks by themselves, the pairing of heads without a compiler; the kernels when slow or gpu."""

import oracle
import pytest
import torch

from diffvision.ops import diff_attention
from diffvision.ops.attention import Problem, flex, reference

PROBLEM = Problem(2, 4, 4, 65, 65, 64, 128, grad=False)

LIMITS = {  # what differs, and what the limit names
    "dropout": ({"dropout": 0.1}, "dropout 0.1"),
    "float64": ({"dtype": torch.float64}, "float64"),
    "device": ({"device": "mps"}, "not on mps"),
    "backward on a CPU": ({"grad": True}, "no backward on a CPU"),
    "narrow heads on CUDA": ({"device": "cuda", "head_dim": 8}, "head size 8"),
    "narrow values on CUDA": ({"device": "cuda", "value_dim": 8}, "value size 8"),
    "wide heads": ({"device": "cuda", "head_dim": 128, "value_dim": 256}, "value size 256"),
    "no keys": ({"keys": 0}, "0 keys"),
    "no queries": ({"queries": 0}, "0 queries"),
    "no batch": ({"batch": 0}, "batch 0"),
}
TAKEN = (
    {"device": "cuda", "grad": True},
    {"device": "cuda", "head_dim": 128},
    {"value_dim": 5},
    {"masked": True, "causal": True, "kv_heads": 2},
    {"dtype": torch.bfloat16},
)


@pytest.fixture
def avx512(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


on_this_cpu = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="FlexAttention needs AVX512 on a CPU"
)


@pytest.mark.usefixtures("avx512")
def test_a_limit_names_the_value(monkeypatch):
    for change, message in LIMITS.values():
        assert message in flex.limit(PROBLEM._replace(**change))
    for change in TAKEN:
        assert flex.limit(PROBLEM._replace(**change)) is None
    for capability, takes in ((80, True), (89, False), (90, True), (103, True), (120, False)):  # float32 of 64 and 128
        monkeypatch.setattr(flex, "compute_capability", lambda capability=capability: capability)
        assert (flex.limit(PROBLEM._replace(device="cuda")) is None) == takes


def test_is_refused_where_its_kernel_reads_what_was_never_written(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert flex.limit(PROBLEM) == "CPU capability AVX2: FlexAttention needs AVX512"


def test_is_refused_inside_a_compiled_graph_on_a_cpu():
    assert torch.compile(lambda: flex.limit(PROBLEM) is not None, backend="eager", fullgraph=True)()


def tensors(**shape):
    return [
        t.detach() for t in oracle.tensors(**{"d": 16, "v": 32, "lam": (2, 4, 1, 1), "dtype": torch.float32} | shape)
    ]


def test_nothing_is_copied_on_the_way_in(monkeypatch):
    seen = []

    def look(q, k, v, **_):
        seen.append((q, k, v))
        return q

    monkeypatch.setattr(flex, "_compile", lambda device: look)
    for keys in (1, 2):
        q, k, v, lam = tensors(keys=keys)
        flex.diff_attention(q, k, v, lam, causal=False, mask=None, scale=0.25, dropout=0.0)
        for own, given in zip((q, k, v), seen[-1], strict=True):
            assert given.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
    assert len(seen) == 3  # one call where the key is shared, two where it is not


def test_layers_share_the_blocks_of_a_causal_call(monkeypatch):
    seen, (q, k, v, lam) = [], tensors()
    monkeypatch.setattr(flex, "_compile", lambda device: lambda q, k, v, **settings: seen.append(settings) or q)
    with torch.inference_mode():
        flex.diff_attention(q, k, v, lam, causal=True, mask=None, scale=1.0, dropout=0.0)
    flex.diff_attention(q, k, v, lam, causal=True, mask=None, scale=1.0, dropout=0.0)
    first, *others = (settings["block_mask"] for settings in seen)
    assert not first.kv_indices.is_inference()
    assert all(other is first for other in others)
    flex.diff_attention(q, k[:, :, :, 1:], v[:, :, 1:], lam, causal=True, mask=None, scale=1.0, dropout=0.0)
    assert seen[-1]["block_mask"] is not first


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.slow
def test_traces_whole_within_another_graph(keys):
    """Past its limit on a CPU, with a compiler that makes no kernels: what a CUDA graph would hold."""
    q, k, v, lam = tensors(keys=keys)
    settings = {"causal": True, "mask": torch.rand(2, 1, 1, 7) > 0.3, "scale": 0.25, "dropout": 0.0}
    compiled = torch.compile(flex.diff_attention, fullgraph=True, backend="aot_eager")
    expected = reference.diff_attention(q, k, v, lam, **settings)
    torch.testing.assert_close(compiled(q, k, v, lam, **settings), expected)


COMPILED = {
    "v1 causal": ({"m": 130, "n": 200}, True, "none"),
    "v1 grouped, masked": ({"hk": 2, "m": 33, "n": 45}, False, "full"),
    "v2 grouped, causal and padded": ({"hk": 2, "keys": 1, "v": 16, "m": 40, "n": 40}, True, "of keys"),
    "one query, a cache": ({"m": 1, "n": 129}, True, "none"),
    "more queries than keys": ({"m": 9, "n": 4}, True, "none"),
    "half precision": ({"dtype": torch.float16, "m": 17, "n": 17}, False, "none"),
    "bfloat16": ({"dtype": torch.bfloat16, "m": 17, "n": 17}, True, "of keys"),
}


@on_this_cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_the_compiled_kernel_on_a_cpu_equals_the_formula(case):
    shape, causal, name = COMPILED[case]
    inputs = tensors(**shape)
    mask = oracle.masks(*inputs[:2]).get(name)
    settings = {"causal": causal, "mask": mask, "scale": 0.25, "dropout": 0.0}
    expected = reference.diff_attention(*inputs, **settings)
    tolerance = {} if inputs[0].dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(flex.diff_attention(*inputs, **settings), expected, **tolerance)


@on_this_cpu
@pytest.mark.slow
def test_another_mask_of_one_shape_needs_no_other_kernel():
    q, k, v, lam = tensors(m=12, n=12)
    for _ in range(3):
        mask = torch.rand(2, 1, 12, 12) > 0.5
        settings = {"causal": True, "mask": mask, "scale": 0.25, "dropout": 0.0}
        with torch.compiler.set_stance("fail_on_recompile" if _ else "default"):
            out = flex.diff_attention(q, k, v, lam, **settings)
        torch.testing.assert_close(out, reference.diff_attention(q, k, v, lam, **settings))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inside_a_compiled_graph_on_a_gpu():
    given = tensors(m=300, n=300, d=64, v=128, device="cuda", dtype=torch.bfloat16)
    inputs = [t.detach().requires_grad_() for t in given]

    def call(*tensors):
        return diff_attention(*tensors, causal=True, backend="flex")

    out = torch.compile(call, fullgraph=True)(*inputs)
    out.float().sum().backward()
    torch.testing.assert_close(out, call(*inputs), rtol=2e-2, atol=2e-2)
    assert all(t.grad.isfinite().all() for t in inputs)
