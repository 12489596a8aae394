"""Whole attention modules, projections too, to be compared by `bench_attention.py`.

Width 768, biases on queries, keys and values; 12 plain heads of 64, so 6 differential ones (V1) or 12 (V2, whose
second query makes its query projection twice as wide). timm's DiffAttention gets 6 heads too, which makes its heads as
large as the plain ones (its models keep 12 and halve the size). Hugging Face's modules also turn queries and keys by a
rotary embedding, which the others have not. Every module is in the benchmark's dtype, and gradients are asked for x and
all parameters.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark import Way
from diffvision.nn import AttentionLayer, DiffAttention, DiffAttentionV2
from diffvision.ops.attention import Problem
from diffvision.ops.attention.choice import choose

WIDTH, PLAIN_HEADS, HEADS = 768, 12, 6

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

# A module, called with tokens [B, N, 768] -> [B, N, 768]
Call = Callable[[Tensor], Any]


class Shape(NamedTuple):
    """A call of a module to be timed."""

    batch: int
    tokens: int
    causal: bool = False
    backward: bool = True

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens}{' causal' if self.causal else ''}"

    @property
    def pairs(self) -> int:
        """Query-key pairs that may attend, of all differential heads and samples."""
        per_head = self.tokens**2
        if self.causal:
            per_head -= self.tokens * (self.tokens - 1) // 2
        return self.batch * HEADS * per_head

    @property
    def map_bytes(self) -> int:
        """Both maps of all heads, in float32."""
        return 8 * self.batch * HEADS * self.tokens**2


def merge_heads(out: Tensor) -> Tensor:
    """[B, H, M, V] -> [B, M, H * V]."""
    return out.transpose(1, 2).flatten(2)


def too_large(map_bytes: int, device: str) -> str:
    """Return why a way that keeps its maps, in several copies, is not tried; "" if it is."""
    memory = torch.cuda.get_device_properties(0).total_memory if device.startswith("cuda") else 16 << 30
    if map_bytes <= memory // 8:
        return ""
    return f"not tried: its maps alone would take more than {memory / 2**33:.0f} GiB in float32"


def step(call: Callable[[], Tensor], leaves: list[Tensor], backward: bool) -> Callable[[], Any]:
    """Return what one timing runs: the call without a graph, or the call and the gradients of all leaves."""
    grad: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> tuple[Tensor | None, ...]:
        out = call()
        # Random, since some kernels have another path for the gradient of a sum.
        if not grad:
            grad.append(torch.randn_like(out, memory_format=torch.contiguous_format))
        return torch.autograd.grad(out, leaves, grad[0], allow_unused=True)

    return both if backward else forward


def by_kernel(group: str, role: str, call: Callable[[], Any], device: str) -> list[Way]:
    """Return a way that rests on SDPA: on CUDA once with each of its kernels forced, on a CPU as SDPA chooses."""
    if not device.startswith("cuda"):
        return [Way(group, role, call)]
    return [Way(group, role, call, name, context=partial(sdpa_kernel, [kernel])) for name, kernel in KERNELS.items()]


class MapsAttention(nn.Module):
    """DiffCLIP's formulation with the same projections: every map kept, a softmax in the input's dtype.

    Written from arXiv 2503.06626 and the notes on its code: separate projections, an additive mask, an affine norm of
    each head.
    """

    def __init__(self, causal_length: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.lambda_init = WIDTH // PLAIN_HEADS, 0.8
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.vectors = nn.Parameter(torch.randn(4, self.head_dim) * 0.1)
        self.diff_norm = nn.RMSNorm(2 * self.head_dim, eps=1e-5)
        mask = None
        if causal_length is not None:
            mask = torch.full((causal_length, causal_length), -math.inf).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (PLAIN_HEADS, self.head_dim)).transpose(1, 2) * self.head_dim**-0.5
        k = self.k_proj(x).unflatten(-1, (PLAIN_HEADS, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (HEADS, 2 * self.head_dim)).transpose(1, 2)
        scores = q @ k.transpose(-1, -2)
        if self.mask is not None:
            scores = scores + self.mask
        one, two = scores.softmax(dim=-1).unflatten(1, (HEADS, 2)).unbind(2)
        q1, k1, q2, k2 = self.vectors.unbind(0)
        lam = ((q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init).type_as(x)
        out = self.diff_norm((one - lam * two) @ v) * (1 - self.lambda_init)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def _way(
    group: str, role: str, module: nn.Module, call: Call, x: Tensor, backward: bool, device: str, kernels: bool
) -> list[Way]:
    leaves = [x, *module.parameters()] if backward else []
    run = step(lambda: call(x), leaves, backward)
    return by_kernel(group, role, run, device) if kernels else [Way(group, role, run)]


def module_ways(shape: Shape, device: str, dtype: torch.dtype, backward: bool) -> list[Way]:
    """Return all modules at a shape's batch, length and `causal`, timm's plain Attention first, ours last."""
    x = torch.randn(shape.batch, shape.tokens, WIDTH, device=device, dtype=dtype, requires_grad=backward)
    ways: list[Way] = []

    def add(group: str, role: str, module: nn.Module, call: Callable[[nn.Module], Call], kernels: bool = False) -> None:
        module = module.to(device=device, dtype=dtype)
        ways.extend(_way(group, role, module, call(module), x, backward, device, kernels))

    _add_timm(add, ways, shape.causal)
    if reason := too_large(shape.map_bytes, device):
        ways.append(Way("maps (DiffCLIP)", "peer", None, cannot=reason))
    else:
        add("maps (DiffCLIP)", "peer", MapsAttention(shape.tokens if shape.causal else None), lambda m: m)
    _add_hugging_face(add, ways, shape, device, dtype)
    for variant, layer in (
        ("V1", DiffAttention(WIDTH, HEADS, lambda_init=0.8, qkv_bias=True)),
        ("V2", DiffAttentionV2(WIDTH, PLAIN_HEADS, qkv_bias=True)),
    ):
        run = step(*_layer_call(layer.to(device=device, dtype=dtype), x, shape.causal, backward))
        chosen, _ = choose("auto", problem_of(layer, x, shape.causal, backward))
        ways.append(Way(f"ours, {variant}", "ours", run, kernel=chosen))
    return ways


def _layer_call(
    layer: nn.Module, x: Tensor, causal: bool, backward: bool
) -> tuple[Callable[[], Tensor], list[Tensor], bool]:
    return (lambda: layer(x, is_causal=causal)), ([x, *layer.parameters()] if backward else []), backward


def _add_timm(add: Callable[..., None], ways: list[Way], causal: bool) -> None:
    import timm.layers

    def call(module: nn.Module) -> Call:
        return (lambda x: module(x, is_causal=True)) if causal else (lambda x: module(x))

    add("plain", "plain", timm.layers.Attention(WIDTH, PLAIN_HEADS, qkv_bias=True), call, kernels=True)
    if hasattr(timm.layers, "DiffAttention"):
        add("timm DiffAttention", "peer", timm.layers.DiffAttention(WIDTH, HEADS, qkv_bias=True), call, kernels=True)
    else:
        ways.append(Way("timm DiffAttention", "peer", None, cannot=f"timm {timm.__version__} has none"))


def _add_hugging_face(add: Callable[..., None], ways: list[Way], shape: Shape, device: str, dtype: torch.dtype) -> None:
    """DiffLlama's and Llama's attention on SDPA, where `transformers` is installed."""
    names = {"HF DiffLlama": "peer", "HF Llama (plain)": "other"}
    if importlib.util.find_spec("transformers") is None:
        ways.extend(Way(group, role, None, cannot="transformers is not installed") for group, role in names.items())
        return
    try:
        made = hugging_face_modules()
    # Another version has other names.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        ways.extend(Way(group, role, None, cannot=reason) for group, role in names.items())
        return
    angles = torch.randn(1, shape.tokens, WIDTH // PLAIN_HEADS, device=device)
    position = (angles.cos().to(dtype), angles.sin().to(dtype))

    def call(module: nn.Module) -> Call:
        module.is_causal = shape.causal
        return lambda x: module(x, position_embeddings=position, attention_mask=None)[0]

    for (group, role), module in zip(names.items(), made, strict=True):
        add(group, role, module, call, kernels=True)


def hugging_face_modules() -> tuple[nn.Module, nn.Module]:
    from transformers import DiffLlamaConfig, LlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    made = []
    for config_class, attention in ((DiffLlamaConfig, DiffLlamaAttention), (LlamaConfig, LlamaAttention)):
        config = config_class(
            hidden_size=WIDTH, num_attention_heads=PLAIN_HEADS, num_key_value_heads=PLAIN_HEADS, attention_bias=True
        )
        config._attn_implementation = "sdpa"
        made.append(attention(config, layer_idx=0))
    return made[0], made[1]


def problem_of(layer: AttentionLayer, x: Tensor, causal: bool, grad: bool) -> Problem:
    """Return the call of the operation inside one of our layers."""
    return Problem(
        batch=x.shape[0],
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        queries=x.shape[1],
        keys=x.shape[1],
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        causal=causal,
        dtype=x.dtype,
        device=x.device.type,
        grad=grad,
    )
