"""FlexAttention: limits, masks by themselves, the pairing of heads without a compiler; the kernels when slow or gpu."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from oracle import plain_flex
from torch.torch_version import TorchVersion

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
    "no keys": ({"keys": 0}, "0 keys"),
    "no queries": ({"queries": 0}, "0 queries"),
    "no batch": ({"batch": 0}, "batch 0"),
}
TAKEN = (
    {"device": "cuda", "grad": True},
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
def test_a_limit_names_the_value():
    for change, message in LIMITS.values():
        assert message in flex.limit(PROBLEM._replace(**change))
    for change in TAKEN:
        assert flex.limit(PROBLEM._replace(**change)) is None


def test_is_refused_where_its_kernel_reads_what_was_never_written(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert flex.limit(PROBLEM) == "CPU capability AVX2: FlexAttention needs AVX512"


def test_is_refused_inside_a_compiled_graph_on_a_cpu():
    assert torch.compile(lambda: flex.limit(PROBLEM) is not None, backend="eager", fullgraph=True)()


def tensors(b=2, h=4, hk=4, keys=2, m=7, n=7, d=16, v=32, dtype=torch.float32, device="cpu"):
    """Queries lie in memory as a projection leaves them: [B, M, H, 2, D]."""
    q = torch.randn(b, m, h, 2, d).permute(0, 2, 3, 1, 4)
    k = torch.randn(b, n, hk, keys, d).permute(0, 2, 3, 1, 4)
    value = torch.randn(b, n, hk, v).transpose(1, 2)
    return [*(t.to(device, dtype) for t in (q, k, value)), torch.rand(b, h, m, 1, device=device)]


def masks(b, h, m, n):
    full = torch.rand(b, h, m, n) > 0.4
    full[0, :, m // 2] = False  # a row without any key
    padding = torch.arange(n) < torch.tensor([n, n // 2 + 1])[:, None, None, None]
    return {"none": None, "full": full, "shared by heads": full[:, :1], "padding": padding, "all": padding[..., :1]}


MASKS = ["none", "full", "shared by heads", "padding", "all"]
LENGTHS = [(1, 300), (7, 7), (128, 128), (130, 257), (300, 130)]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_the_mask_and_its_blocks(m, n, causal, name):
    """`mask_mod` is our mask; a block left out holds nothing, and one called whole holds everything."""
    b, h, maps = 2, 3, 2
    mask = masks(b, h, m, n)[name]
    allowed = torch.ones(b, h, m, n, dtype=torch.bool) if mask is None else mask.expand(b, h, m, n)
    allowed = allowed & torch.ones(m, n, dtype=torch.bool).tril(n - m) if causal else allowed
    allowed = allowed.repeat_interleave(maps, dim=1)
    q, k = torch.empty(b, h, 2, m, 16), torch.empty(b, h, 1, n, 16)
    blocks = flex._block_mask(q, k, causal=causal, mask=mask, maps_a_head=maps)
    if blocks is None:
        assert allowed.all()
        return
    grid = torch.meshgrid(*(torch.arange(size) for size in (b, h * maps, m, n)), indexing="ij")
    assert torch.equal(blocks.mask_mod(*grid), allowed)

    def tokens(numbers, indices):
        listed = torch.arange(indices.shape[3]) < numbers[..., None]
        listed = torch.zeros_like(listed).scatter(3, indices.long(), listed)
        return listed.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :m, :n].expand_as(allowed)

    partial = tokens(blocks.kv_num_blocks, blocks.kv_indices)
    whole = tokens(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & whole).any()
    assert allowed[whole].all()
    assert not allowed[~(partial | whole)].any()


@pytest.mark.parametrize(("m", "n"), LENGTHS)
def test_the_causal_mask_in_blocks_for_flash_attention_4(m, n):
    q, k = torch.empty(2, 3, 2, m, 16), torch.empty(2, 3, 1, n, 16)
    blocks = flex._flash_blocks(q, k)
    allowed = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    assert blocks.BLOCK_SIZE == (256, 128)
    grid = torch.meshgrid(*(torch.arange(size) for size in (1, 1, m, n)), indexing="ij")
    assert torch.equal(blocks.mask_mod(*grid)[0, 0], allowed)
    whole = blocks.full_kv_num_blocks.new_zeros(-(-m // 256), -(-n // 128)).bool()
    partial = whole.clone()
    for seen, count, order in (
        (whole, blocks.full_kv_num_blocks, blocks.full_kv_indices),
        (partial, blocks.kv_num_blocks, blocks.kv_indices),
    ):
        for row in range(len(seen)):
            seen[row, order[0, 0, row, : count[0, 0, row]].long()] = True
    tiles = [t.repeat_interleave(256, 0).repeat_interleave(128, 1)[:m, :n] for t in (whole, partial)]
    assert allowed[tiles[0]].all()
    assert not allowed[~(tiles[0] | tiles[1])].any()


CUDA = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(2, 4, 2, 65, 64))
NOT_FLASH = {
    "eager": {"compiling": False},
    "CPU": {"q": {"is_cuda": False}},
    "float32": {"q": {"dtype": torch.float32}},
    "mask": {"mask": torch.ones(1, 1, 1, 65, dtype=torch.bool)},
    "wide values": {"v": (2, 4, 65, 128)},
    "large heads": {"q": {"shape": (2, 4, 2, 65, 136)}, "v": (2, 4, 65, 136)},
    "odd heads": {"q": {"shape": (2, 4, 2, 65, 20)}, "v": (2, 4, 65, 20)},
    "decoding": {"q": {"shape": (2, 4, 2, 1, 64)}},
    "Ada": {"capability": 89},
    "RTX 50": {"capability": 120},
    "not installed": {"installed": False},
    "an older torch": {"version": "2.14.1"},
}


@pytest.mark.parametrize("case", [None, *NOT_FLASH])
def test_what_flash_attention_4_takes_in_a_graph(case, monkeypatch):
    change = NOT_FLASH.get(case, {})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: change.get("compiling", True))
    monkeypatch.setattr(flex, "compute_capability", lambda: change.get("capability", 90))
    monkeypatch.setattr(torch, "__version__", TorchVersion(change.get("version", "2.15.0+cu132")))
    if change.get("installed", True):
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    q = SimpleNamespace(**vars(CUDA) | change.get("q", {}))
    v = SimpleNamespace(shape=change.get("v", (2, 4, 65, 64)))
    assert flex._takes_flash(q, v, change.get("mask")) is (case is None)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_graph_asks_for_flash_attention_4(keys, causal, monkeypatch):
    """On a CPU, with a compiler that makes no kernels: the option arrives, and the mask is right."""
    monkeypatch.setattr(flex, "_takes_flash", lambda q, v, mask: True)
    seen = []

    def look(graph, inputs):
        modules = [graph, *graph.children()]
        seen.extend(str(node.args) for m in modules for node in m.graph.nodes if "flex_attention" in str(node.target))
        return graph.forward

    inputs = tensors(keys=keys, v=16, m=9, n=9)
    settings = {"causal": causal, "mask": None, "scale": None, "dropout": 0.0}
    out = torch.compile(flex.diff_attention, fullgraph=True, backend=look)(*inputs, **settings)
    torch.testing.assert_close(out, reference.diff_attention(*inputs, **settings))
    assert len(seen) == keys
    assert all("'BACKEND': 'FLASH'" in arguments for arguments in seen)


def test_causal_block_masks_are_kept_within_a_bound_and_those_of_inference_serve_training():
    flex._causal_blocks.cache_clear()
    q, k = torch.empty(1, 1, 2, 7, 16), torch.empty(1, 1, 2, 9, 16)
    with torch.inference_mode():
        first = flex._block_mask(q, k, causal=True, mask=None, maps_a_head=1)
    assert not first.kv_indices.is_inference()
    assert flex._block_mask(q, k, causal=True, mask=None, maps_a_head=2) is first
    assert flex._causal_blocks.cache_info().maxsize == 16


SHAPES = {
    "v1": {},
    "v1 grouped": {"hk": 2},
    "v2": {"keys": 1, "v": 16},
    "v2 grouped": {"hk": 2, "keys": 1, "v": 16},
    "a cache of keys": {"m": 3, "n": 9},
    "more queries than keys": {"m": 9, "n": 4},
    "one query": {"m": 1, "n": 9},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_maps_and_masks_go_where_they_belong(shape, causal, name, monkeypatch):
    monkeypatch.setattr(flex, "_compile", lambda device: plain_flex)
    inputs = tensors(**SHAPES[shape])
    mask = masks(2, 4, inputs[0].shape[3], inputs[1].shape[3])[name]
    settings = {"causal": causal, "mask": mask, "scale": 0.3, "dropout": 0.0}
    expected = reference.diff_attention(*inputs, **settings)
    torch.testing.assert_close(flex.diff_attention(*inputs, **settings), expected)


def test_nothing_is_copied_on_the_way_in(monkeypatch):
    seen = []

    def look(q, k, v, **_):
        seen.append((q, k, v))
        return q

    monkeypatch.setattr(flex, "_compile", lambda device: look)
    for keys in (1, 2):
        q, k, v, lam = tensors(keys=keys)
        flex.diff_attention(q, k, v, lam, causal=False, mask=None, scale=None, dropout=0.0)
        for own, given in zip((q, k, v), seen[-1], strict=True):
            assert given.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
    assert len(seen) == 3  # one call where the key is shared, two where it is not


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.slow
def test_traces_whole_within_another_graph(keys):
    """Past its limit on a CPU, with a compiler that makes no kernels: what a CUDA graph would hold."""
    q, k, v, lam = tensors(keys=keys)
    settings = {"causal": True, "mask": torch.rand(2, 1, 1, 7) > 0.3, "scale": None, "dropout": 0.0}
    compiled = torch.compile(flex.diff_attention, fullgraph=True, backend="aot_eager")
    expected = reference.diff_attention(q, k, v, lam, **settings)
    torch.testing.assert_close(compiled(q, k, v, lam, **settings), expected)


COMPILED = {
    "v1 causal": ({"m": 130, "n": 200}, True, "none"),
    "v1 grouped, masked": ({"hk": 2, "m": 33, "n": 45}, False, "full"),
    "v2 grouped, causal and padded": ({"hk": 2, "keys": 1, "v": 16, "m": 40, "n": 40}, True, "padding"),
    "one query, a cache": ({"m": 1, "n": 129}, True, "none"),
    "more queries than keys": ({"m": 9, "n": 4}, True, "none"),
    "half precision": ({"dtype": torch.float16, "m": 17, "n": 17}, False, "none"),
    "bfloat16": ({"dtype": torch.bfloat16, "m": 17, "n": 17}, True, "padding"),
}


@on_this_cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_the_compiled_kernel_on_a_cpu_equals_the_formula(case):
    shape, causal, name = COMPILED[case]
    inputs = tensors(**shape)
    mask = masks(2, 4, inputs[0].shape[3], inputs[1].shape[3])[name]
    settings = {"causal": causal, "mask": mask, "scale": None, "dropout": 0.0}
    expected = reference.diff_attention(*inputs, **settings)
    tolerance = {} if inputs[0].dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(flex.diff_attention(*inputs, **settings), expected, **tolerance)


@on_this_cpu
@pytest.mark.slow
def test_another_mask_of_one_shape_needs_no_other_kernel():
    q, k, v, lam = tensors(m=12, n=12)
    for _ in range(3):
        mask = torch.rand(2, 1, 12, 12) > 0.5
        settings = {"causal": True, "mask": mask, "scale": None, "dropout": 0.0}
        with torch.compiler.set_stance("fail_on_recompile" if _ else "default"):
            out = flex.diff_attention(q, k, v, lam, **settings)
        torch.testing.assert_close(out, reference.diff_attention(q, k, v, lam, **settings))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("value_dim", [128, 64])  # of one size it is FlashAttention-4's kernel where that is installed
def test_inside_a_compiled_graph_on_a_gpu(value_dim):
    given = tensors(m=300, n=300, d=64, v=value_dim, device="cuda", dtype=torch.bfloat16)
    inputs = [t.detach().requires_grad_() for t in given]

    def call(*tensors):
        return diff_attention(*tensors, causal=True, backend="flex")

    out = torch.compile(call, fullgraph=True)(*inputs)
    out.float().sum().backward()
    torch.testing.assert_close(out, call(*inputs), rtol=2e-2, atol=2e-2)
    assert all(t.grad.isfinite().all() for t in inputs)


OPTIONS = {
    "half, D 128, V 128": (torch.bfloat16, 128, 128, None, None),
    "half, D 128, V 256": (torch.bfloat16, 128, 256, flex.WIDE_HALF, flex.WIDE_HALF),
    "float32, D 64, V 64": (torch.float32, 64, 64, None, None),
    "float32, D 128, V 128": (torch.float32, 128, 128, flex.WIDE_SMALL, None),
    "float32, D 128, V 256": (torch.float32, 128, 256, flex.WIDE_SMALL, flex.WIDE),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wide_heads_take_blocks_that_fit_the_card(monkeypatch, case):
    dtype, d, v, *expected = OPTIONS[case]
    shapes = (1, 2, 2, 300, d), (1, 2, 300, v)
    q, values = (SimpleNamespace(is_cuda=True, device=None, dtype=dtype, shape=shape) for shape in shapes)
    for kib, options in zip((99, 227), expected, strict=True):  # of capability 8.9 and 9.0
        monkeypatch.setattr(flex, "shared_memory", lambda _, kib=kib: kib)
        assert flex._kernel_options(q, values) == options
