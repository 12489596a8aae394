"""kvpress's presses on V2 as a Llama, in a program without diffvision: what they keep, and the numbers behind it.

    diffvision export MODEL FOLDER              # a language model of variant v2 with at least 296 tokens
    python -m venv kv && kv/bin/pip install kvpress==0.5.5 "transformers>=5.0,<5.3"
    kv/bin/python scripts/programs/run_kvpress_v2.py FOLDER      # a minute on one CPU core

Two things of each press. Its cache must be the one that it makes of a Llama whose layers have the same projections and
are given the same inputs. And the logits of further tokens behind it must be those of the whole cache under a mask of
what each head has kept, layer by layer; presses that change keys or values instead have no such mask. Presses that read
weights, statistics or patterns of named models from the Hub are left out. Prints a table; exit status 1 if anything in
it failed.
"""

import sys
from pathlib import Path

import kvpress
import torch
from kvpress import AdaKVPress, BasePress, KnormPress, SnapKVPress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from shown import Shown, versions

LENGTH, FURTHER, RATIO = 288, 8, 0.5


def snap() -> SnapKVPress:
    return SnapKVPress(RATIO, window_size=16)


PRESSES = {
    **{
        name: lambda name=name: getattr(kvpress, f"{name}Press")(compression_ratio=RATIO)
        for name in (
            *("Random", "Knorm", "StreamingLLM", "TOVA", "ObservedAttention", "ExpectedAttention", "KeyDiff", "CUR"),
            *("LeverageScore", "NonCausalAttn", "Compactor", "Cap"),
        )
    },
    "SnapKV": snap,
    "PyramidKV": lambda: kvpress.PyramidKVPress(RATIO, window_size=16),
    "LagKV": lambda: kvpress.LagKVPress(RATIO, lag_size=32),
    "SimLayerKV": lambda: kvpress.SimLayerKVPress(lazy_threshold=0.1, n_last=1, n_recent=64, n_initial=4),
    "ThinK": lambda: kvpress.ThinKPress(key_channel_compression_ratio=RATIO),
    "KeyRerotation of Knorm": lambda: kvpress.KeyRerotationPress(KnormPress(RATIO)),
    "Chunk of Knorm": lambda: kvpress.ChunkPress(KnormPress(RATIO), chunk_length=64),
    "ChunkKV of SnapKV": lambda: kvpress.ChunkKVPress(snap(), chunk_length=8),
    "EntropyGatedChunkKV of SnapKV": lambda: kvpress.EntropyGatedChunkKVPress(snap()),
    "Block of KeyDiff": lambda: kvpress.BlockPress(kvpress.KeyDiffPress(RATIO), block_size=64),
    "PerLayerCompression of Knorm": lambda: kvpress.PerLayerCompressionPress(KnormPress(RATIO), [0.2, 0.5, 0.7]),
    "Composed of Knorm and ThinK": lambda: kvpress.ComposedPress([KnormPress(RATIO), kvpress.ThinKPress(RATIO)]),
    "Merging of Knorm": lambda: kvpress.MergingPress(KnormPress(RATIO)),
    "AdaKV of SnapKV": lambda: AdaKVPress(snap()),
    "AdaKV of ExpectedAttention": lambda: AdaKVPress(kvpress.ExpectedAttentionPress(RATIO)),
}
# They read an output projection of as many heads as there are queries; V2's has half.
REFUSED = {
    "CriticalKV of SnapKV": lambda: kvpress.CriticalKVPress(snap()),
    "CriticalAdaKV of SnapKV": lambda: kvpress.CriticalAdaKVPress(snap()),
}
# Their caches hold other numbers than those of the tokens kept.
CHANGING = {"ThinK", "KeyRerotation of Knorm", "Composed of Knorm and ThinK", "Merging of Knorm"}


def equal_llama(model: PreTrainedModel) -> LlamaForCausalLM:
    """Return a Llama with the model's projections of queries, keys and values; its output projection is random."""
    values = {name: value for name, value in model.config.to_dict().items() if name in LlamaConfig().to_dict()}
    llama = LlamaForCausalLM(LlamaConfig(**{**values, "model_type": "llama"})).eval()
    for theirs, ours in zip(llama.model.layers, model.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(theirs.self_attn, name).load_state_dict(getattr(ours.self_attn, name).state_dict())
    return llama


def pruned(model: PreTrainedModel, press: BasePress, prompt: Tensor) -> tuple[DynamicCache, list[dict]]:
    """Return the cache that a press leaves of a prompt, and what each layer's attention was called with."""
    calls: list[dict] = []
    note = lambda module, args, kwargs: calls.append({**kwargs, "past_key_values": None})  # noqa: E731
    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    cache = DynamicCache()
    torch.manual_seed(3)
    with press(model):
        model.model(prompt, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return cache, calls


def pruned_alone(llama: LlamaForCausalLM, press: BasePress, calls: list[dict]) -> DynamicCache:
    """Return the cache that a press leaves of a Llama's layers, each called with what is given."""
    cache = DynamicCache()
    torch.manual_seed(3)
    with press(llama):
        for layer, call in zip(llama.model.layers, calls, strict=True):
            layer.self_attn(**{**call, "past_key_values": cache})
    return cache


def prefilled(model: PreTrainedModel, prompt: Tensor) -> DynamicCache:
    """Return the whole cache of a prompt."""
    cache = DynamicCache()
    model.model(prompt, past_key_values=cache)
    return cache


def masked_indices(layer: torch.nn.Module) -> tuple[Tensor, ...]:
    """Return where a press of single heads masks keys of a layer, which it leaves in the cache; empty if nowhere."""
    return getattr(layer.self_attn, "masked_key_indices", None) or ()


def equal(a: list[tuple[Tensor, ...]], b: list[tuple[Tensor, ...]]) -> bool:
    """Return whether two models mask the same keys."""
    return all(len(x) == len(y) and all(map(torch.equal, x, y)) for x, y in zip(a, b, strict=True))


def kept(model: PreTrainedModel, whole: DynamicCache, cache: DynamicCache) -> list[Tensor]:
    """Return which tokens each layer and key/value head has left, [B, Hk, N]: those in the cache and not masked."""
    sets = []
    for layer, full, left in zip(model.model.layers, whole.layers, cache.layers, strict=True):
        held = torch.stack([(full.keys[:, :, i, None] == left.keys).all(-1).any(-1) for i in range(LENGTH)], -1)
        if masked := masked_indices(layer):
            held[masked] = False
        sets.append(held)
    return sets


def further_logits(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor) -> Tensor:
    """Return the logits of tokens behind a prompt, at their true positions, token by token."""
    logits = []
    for position, token in enumerate(tokens.unbind(1), start=LENGTH):
        at = torch.full((len(tokens), 1), position)
        logits.append(model(token[:, None], past_key_values=cache, position_ids=at).logits)
    return torch.cat(logits, dim=1)


def masked_logits(model: PreTrainedModel, whole: DynamicCache, sets: list[Tensor], tokens: Tensor) -> Tensor:
    """Return the same logits behind the whole prompt, where each layer's heads attend to what they have kept."""
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def mask(layer, args, kwargs):
        seen = sets[layer.layer_idx].repeat_interleave(groups, dim=1)[:, :, None]
        new = whole.get_seq_length(layer.layer_idx) + 1 - LENGTH
        seen = torch.cat([seen, seen.new_ones(*seen.shape[:3], new)], -1)
        return args, {**kwargs, "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))}

    hooks = [layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    logits = further_logits(model, whole, tokens)
    for hook in hooks:
        hook.remove()
    return logits


def apart(a: DynamicCache, b: DynamicCache) -> float:
    """Return the largest difference of two caches, infinite where they have other lengths."""
    layers = list(zip(a.layers, b.layers, strict=True))
    pairs = [(x.keys, y.keys) for x, y in layers] + [(x.values, y.values) for x, y in layers]
    return max((x - y).abs().max().item() if x.shape == y.shape else float("inf") for x, y in pairs)


def drawn(vocabulary: int) -> Tensor:
    """Return random tokens [1, LENGTH + FURTHER], none of them twice.

    In the first layer equal tokens have keys of one norm, and rounding decides which is kept.
    """
    if vocabulary < (least := LENGTH + FURTHER):
        raise SystemExit(f"the model has a vocabulary of {vocabulary}: give one of at least {least}, no token is twice")
    return torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))[None, :least]


@torch.no_grad()
def main() -> int:
    sys.modules["diffvision"] = None  # type: ignore[assignment]  # cannot be imported
    print(versions("torch", "kvpress", "transformers"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shown = Shown(Path("runs/programs/kvpress_v2"))
    v2 = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
    llama = equal_llama(v2)
    tokens = drawn(v2.config.vocab_size)
    prompt, further = tokens[:, :LENGTH], tokens[:, LENGTH:]
    unpruned = further_logits(v2, prefilled(v2, prompt), further)
    for name, make in PRESSES.items():
        for model in (v2, llama):
            model.set_attn_implementation("eager" if name == "ObservedAttention" else "sdpa")
        cache, calls = pruned(v2, make(), prompt)
        same = apart(cache, pruned_alone(llama, make(), calls))
        masked = [[masked_indices(layer) for layer in model.model.layers] for model in (v2, llama)]
        same = max(same, 0.0 if equal(*masked) else float("inf"))
        detail = f"cache {same:.0e} from the Llama's"
        wrong = 0.0
        if name not in CHANGING:
            whole = prefilled(v2, prompt)  # which forgets what is masked
            for layer, indices in zip(v2.model.layers, masked[0], strict=True):
                layer.self_attn.masked_key_indices = indices or None
            sets = kept(v2, whole, cache)
            share = torch.stack([keep.float().mean() for keep in sets]).mean().item()
            logits = further_logits(v2, cache, further)
            changed = (logits - unpruned).abs().max().item()
            wrong = (logits - masked_logits(v2, whole, sets, further)).abs().max().item()
            detail += f", {share:.0%} kept, logits {wrong:.0e} from the mask's and {changed:.0e} from the whole cache's"
            wrong = wrong if changed > 100 * wrong else float("inf")
        shown.check(name, same < 1e-4 and wrong < 1e-3, detail)
    for name, make in REFUSED.items():
        try:
            pruned(v2, make(), prompt)
        except RuntimeError as error:
            shown.check(f"{name} refuses", "is invalid for input of size" in str(error), str(error))
        else:
            shown.check(f"{name} refuses", False, "ran")
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
