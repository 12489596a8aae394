"""NVIDIA's kvpress on the matched Transformer and on V2, as Llamas, next to our pruning of the same weights.

    python -m venv kv && kv/bin/pip install . kvpress==0.5.5 "transformers>=5.0,<5.3"
    kv/bin/python scripts/programs/run_kvpress.py [MODEL]    # a minute on one CPU core

kvpress wants a transformers that is older than what is tested here: a separate environment. MODEL is the folder of a
plain or V2 language model of ours; without it, both are run with random weights, where two heads read a key/value head.
Prints a table; exit status 1 if anything in it failed.
"""

import sys
from pathlib import Path

import torch
from kvpress import KnormPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from kvpress.presses.scorer_press import ScorerPress
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from diffvision.analysis.capture import captured
from diffvision.evaluation.language.pruning import Compress
from diffvision.models import language
from diffvision.models.convert.transformers import to_hugging_face
from diffvision.models.language import LanguageConfig, LanguageModel
from diffvision.models.language.modeling_diffllama_v2 import DiffLlamaV2Config, DiffLlamaV2ForCausalLM
from shown import Shown, versions

LENGTH, FURTHER, ROWS, WINDOW = 128, 8, 4, 16
RATIOS = (0.25, 0.5, 0.75)
CLASSES = {"standard": (LlamaForCausalLM, LlamaConfig), "v2": (DiffLlamaV2ForCausalLM, DiffLlamaV2Config)}
PRESSES = {  # ours -> theirs; of these only SnapKV keeps a window
    "snap": lambda ratio: (Compress("snap", ratio, WINDOW), SnapKVPress(ratio, window_size=WINDOW)),
    "knorm": lambda ratio: (Compress("knorm", ratio, 0), KnormPress(ratio)),
    "window": lambda ratio: (Compress("window", ratio, 0), StreamingLLMPress(ratio)),
    "tova": lambda ratio: (Compress("tova", ratio, 1), TOVAPress(ratio)),
    "h2o": lambda ratio: (Compress("h2o", ratio, 0), ObservedAttentionPress(ratio)),
}


def random_model(variant: str) -> LanguageModel:
    """Return a model with weights of a size that makes attention uneven."""
    torch.manual_seed(0)
    sizes = {"dim": 64, "depth": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 128}
    model = LanguageModel(LanguageConfig(vocab_size=512, max_length=256, variant=variant, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model.eval()


def as_llama(model: LanguageModel) -> PreTrainedModel:
    """Return the same weights in transformers' class, or in that of V2 as a Llama."""
    values, state = to_hugging_face(model.config, model.state_dict())
    architecture, config = CLASSES[model.config.variant]
    llama = architecture(config(**values, attn_implementation="eager"))
    llama.load_state_dict(state, strict=not model.config.tied)
    return llama.eval()


def kept_by_kvpress(llama: PreTrainedModel, press: ScorerPress, prompt: Tensor) -> tuple[list[Tensor], DynamicCache]:
    """Return what each layer keeps, [B, Hk, N], by the keys that are in both caches; and the pruned cache."""
    whole, pruned = DynamicCache(), DynamicCache()
    llama.model(prompt, past_key_values=whole)
    with press(llama):
        llama.model(prompt, past_key_values=pruned)
    pairs = zip(whole.layers, pruned.layers, strict=True)
    return [(a.keys[:, :, :, None] == b.keys[:, :, None]).all(-1).any(-1) for a, b in pairs], pruned


def kept_by_us(model: LanguageModel, compress: Compress, prompt: Tensor) -> list[Tensor]:
    """Return what each layer keeps, [B, Hk, N]."""
    keeps: list[Tensor] = []
    stop = torch.full((len(prompt),), prompt.shape[1])
    with captured(model, lambda call: keeps.append(compress.select_tokens(call, torch.zeros_like(stop), stop))):
        model.hidden(prompt)
    return keeps


def further_logits(llama: PreTrainedModel, cache: DynamicCache, tokens: Tensor) -> Tensor:
    """Return the logits of tokens behind a pruned prompt, at their true positions, token by token."""
    logits = []
    for position, token in enumerate(tokens.unbind(1), start=LENGTH):
        at = torch.full((len(tokens), 1), position)
        logits.append(llama(token[:, None], past_key_values=cache, position_ids=at).logits)
    return torch.cat(logits, dim=1)


def compare(model: LanguageModel, shown: Shown) -> None:
    """Add a row for each press and ratio."""
    variant, llama = model.config.variant, as_llama(model)
    # No token twice: in the first layer equal tokens have keys of one norm, and rounding decides which is kept.
    generator = torch.Generator().manual_seed(1)
    tokens = torch.stack([torch.randperm(model.config.vocab_size, generator=generator) for _ in range(ROWS)])
    tokens = tokens[:, : LENGTH + FURTHER]
    prompt, further = tokens[:, :LENGTH], tokens[:, LENGTH:]
    apart = (model(tokens) - llama(tokens).logits).abs().max().item()
    shown.check(f"{variant}, without pruning", apart < 1e-4, f"logits {apart:.0e} apart")
    for name, pair in PRESSES.items():
        for ratio in RATIOS:
            compress, press = pair(ratio)
            theirs, cache = kept_by_kvpress(llama, press, prompt)
            ours = kept_by_us(model, compress, prompt)
            sets = torch.cat([(a == b).all(-1).flatten() for a, b in zip(ours, theirs, strict=True)])
            logits = further_logits(llama, cache, further)
            _, past = compress.prefill(model, prompt, None, lambda kept: kept + FURTHER)
            apart = (model.logits(model.hidden(further, cache=past)) - logits).abs().max().item()
            detail = f"{int(sets.sum())} of {len(sets)} kept sets equal, logits behind them {apart:.0e} apart"
            what = f"{variant}, {name}, {type(press).__name__}, ratio {ratio}"
            shown.check(what, bool(sets.all()) and apart < 1e-4, detail)


@torch.no_grad()
def main() -> int:
    print(versions("torch", "kvpress", "transformers", "diffvision"))
    shown = Shown(Path("runs/programs/kvpress"))
    models = [language.load(sys.argv[1])] if len(sys.argv) > 1 else map(random_model, CLASSES)
    for model in models:
        compare(model, shown)
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
