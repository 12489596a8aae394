"""V1 as transformers' DiffLlama, the matched Transformer as its Llama, V2 as a Llama too: the same function, both ways.

| | here | transformers |
|---|---|---|
| maps of V1's head h, of H | rows [H, 2, D]: side by side | rows [2, H, D]: h and h + H |
| value of V1's head | one of 2D | two of D, in the two halves of the heads |
| rotary pairs | (0, 1), (2, 3), ... | (i, i + D / 2) |
| V1's head norm | with a weight | without: it is folded into the output projection |
| V2 | H heads of two queries | 2H query heads, side by side as here |

Source: transformers models/diffllama/modeling_diffllama.py (5.x), models/llama/modeling_llama.py; V2's class is in
`diffvision.models.language.modeling_diffllama_v2`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffvision.models.checkpoint import State
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn import ATTENTION
from diffvision.nn.diff_attention import VECTORS

HEAD_NORM_EPS = 1e-5  # of `AttentionLayer`; transformers takes the one of all norms
# Buffers of older versions, and a tied head saved all the same.
NO_WEIGHTS = r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^lm_head\.weight$"
MODEL_TYPES = {"v1": "diffllama", "standard": "llama", "v2": "diffllama_v2"}
EXPORTED = "diffvision_export"
"""Set in the config.json of folders that we write: such a folder opens as a language model of ours."""

_SHARED = {
    "attn.proj": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Field of `LanguageConfig` -> the setting of transformers' models with the same meaning."""
_LAMBDAS = {"v1": VECTORS, "standard": (), "v2": ("lambda_proj.weight",)}
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
}
"""Settings that our model has no other value of."""


def to_hugging_face(config: LanguageConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings of transformers' configuration (with `model_type`), and the state_dict of its ...ForCausalLM.

    Args:
        config: variant v1, v2 or standard.
        state: the model's state_dict. Tensors may be shared with what is returned.

    Raises:
        ValueError: transformers has no such model: another variant or one by layer, another lambda_init than "depth",
            no head norm in V1 or one in the others, or norm_eps other than 1e-5 in V1.
    """
    _require_exportable(config)
    kv_heads = config.num_kv_heads or config.num_heads
    layer = ATTENTION[config.variant]
    values = {
        "model_type": MODEL_TYPES[config.variant],
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
        "num_attention_heads": layer.query_maps * config.num_heads,
        "num_key_value_heads": layer.key_maps * kv_heads,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_theta},
        "attention_bias": False,
    }
    out = {theirs: state[ours] for ours, theirs in _renamed(config).items()}
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}.attn.", f"model.layers.{index}.self_attn."
        for name, reorder in _projections(config).items():
            out[f"{theirs}{name}.weight"] = reorder(state[f"{ours}{name}.weight"])
        if config.variant == "v1":
            weight = state[f"{ours}head_norm.weight"]
            out[f"{theirs}o_proj.weight"] = state[f"{ours}proj.weight"] * weight.repeat(config.num_heads)
    return values, out


def from_hugging_face(
    values: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[LanguageConfig, dict[str, Tensor]]:
    """Return our configuration and state_dict from those of a DiffLlama(V2)ForCausalLM or LlamaForCausalLM.

    Args:
        values: its `config.to_dict()`, or its config.json.
        state: its state_dict.

    Raises:
        ValueError: it is another model, settings or weights are missing, or our model does not have a setting (biases,
            scaled rotary positions, another activation, an odd number of DiffLlama's heads).
    """
    config, state = _our_config(values), State(state, "the transformers model's state_dict")
    embedding, head = state["model.embed_tokens.weight"], state.get("lm_head.weight")
    if (count := state.layers("model.layers")) != config.depth:
        raise ValueError(f"num_hidden_layers must be {count}, as many as there are weights of, got {config.depth}")
    if config.tied and head is not None and not torch.equal(head, embedding):
        raise ValueError("tie_word_embeddings must be false: lm_head.weight differs from model.embed_tokens.weight")
    out = {ours: state[theirs] for ours, theirs in _renamed(config).items()}
    for index in range(config.depth):
        ours, theirs = f"blocks.{index}.attn.", f"model.layers.{index}.self_attn."
        for name, reorder in _projections(config, back=True).items():
            out[f"{ours}{name}.weight"] = reorder(state[f"{theirs}{name}.weight"])
        if config.variant == "v1":
            out[f"{ours}head_norm.weight"] = embedding.new_ones(2 * config.head_dim)  # theirs has none
    return config, out


def _require_exportable(config: LanguageConfig) -> None:
    """Refuse a configuration that no class of transformers holds."""
    is_v1 = config.variant == "v1"
    fixed: dict[str, Any] = {"variant_by_layer": None, "lambda_init": "depth", "head_norm": is_v1}
    if is_v1:  # DiffLlama has one eps for all norms, and our head norm's is fixed
        fixed["norm_eps"] = HEAD_NORM_EPS
    given = {name: getattr(config, name) for name in fixed} | {"head_norm": config.layers()[0].head_norm}
    wrong = [f"{name}={value!r}" for name, value in given.items() if value != fixed[name]]
    if config.variant not in MODEL_TYPES:
        wrong = [f"variant={config.variant!r}"]
    elif config.variant == "standard" and config.dim % config.num_heads:  # Llama's own check
        wrong = [f"dim={config.dim} and num_heads={config.num_heads}"]
    if wrong:
        raise ValueError(
            f"transformers has no class with {wrong[0]}: it is trained (fit), generates and is evaluated "
            "(evaluate-language, lm-eval) here"
        )


def _our_config(values: Mapping[str, Any]) -> LanguageConfig:
    """Return our configuration for a transformers model's."""
    variants = {model_type: variant for variant, model_type in MODEL_TYPES.items()}
    if (model_type := values.get("model_type")) not in variants:
        raise ValueError(f"model_type must be one of {', '.join(variants)}, got {model_type!r}")
    needed = (*_SIZES.values(), "num_attention_heads")
    if missing := [name for name in needed if values.get(name) is None]:
        raise ValueError(f"the transformers model's configuration lacks {', '.join(missing)}: take its whole config")
    for name in (*needed, "num_key_value_heads", "head_dim"):
        value, kind = values.get(name), int | float if name == "rms_norm_eps" else int
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or value <= 0):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
    variant, heads = variants[model_type], values["num_attention_heads"]
    rope = _rope_settings(values)
    eps = {"rms_norm_eps": HEAD_NORM_EPS} if variant == "v1" else {}  # it has one for all norms
    for name, only in {**_FIXED, **eps}.items():
        if (value := {**values, **rope}.get(name)) not in (None, only):
            raise ValueError(f"{name} must be {only!r}, which alone our model has, got {value!r}")
    kv_heads = heads if values.get("num_key_value_heads") is None else values["num_key_value_heads"]
    queries, keys = ATTENTION[variant].query_maps, ATTENTION[variant].key_maps
    for name, value, maps in (("num_attention_heads", heads, queries), ("num_key_value_heads", kv_heads, keys)):
        if value % maps:
            raise ValueError(f"{name} must be a multiple of {maps}, the maps of a head of {model_type}, got {value}")
    num_heads, num_kv_heads = heads // queries, kv_heads // keys
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of {queries * num_kv_heads} with num_key_value_heads={kv_heads}, "
            f"got {heads}"
        )
    return LanguageConfig(
        **{ours: values[theirs] for ours, theirs in _SIZES.items()},
        num_heads=num_heads,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        variant=variant,
        rotary_theta=float(rope["rope_theta"]),
        tied=bool(values.get("tie_word_embeddings")),
    )


def _rope_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the rotary embedding: transformers 5 has them in rope_parameters, 4 in rope_scaling."""
    mappings = [values.get("rope_parameters") or {}, values.get("rope_scaling") or {}, values]
    if wrong := [mapping for mapping in mappings if not isinstance(mapping, Mapping)]:
        raise ValueError(f"rope_parameters and rope_scaling must be dictionaries, got {wrong[0]!r}")

    def setting(default: Any, *names: str) -> Any:
        """Return the first value in the dictionaries that is not the default; only one of them is in use."""
        given = (mapping.get(name) for mapping in mappings for name in names)
        return next((value for value in given if value not in (None, default)), default)

    theta = next((mapping["rope_theta"] for mapping in mappings if mapping.get("rope_theta") is not None), 10_000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"rope_theta must be a number, got {theta!r}")
    return {
        "rope_theta": theta,
        "rope_type": setting("default", "rope_type", "type"),  # "type" before transformers 4.43
        "partial_rotary_factor": setting(1.0, "partial_rotary_factor"),
    }


def _renamed(config: LanguageConfig) -> dict[str, str]:
    """Return our names and theirs of the weights that are only renamed; V1's output projection is also scaled."""
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not config.tied:
        names["head.weight"] = "lm_head.weight"
    for index in range(config.depth):
        for ours, theirs in _SHARED.items():
            names[f"blocks.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
        for name in _LAMBDAS[config.variant]:
            names[f"blocks.{index}.attn.{name}"] = f"model.layers.{index}.self_attn.{name}"
    return names


def _projections(config: LanguageConfig, back: bool = False) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the function that reorders the rows of each projection."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads or config.num_heads, config.head_dim
    maps = ATTENTION[config.variant].key_maps  # V2's queries stay side by side

    def halves(weight: Tensor, count: int) -> Tensor:
        """Move two maps, or halves of a value, from side by side to the two halves of the heads."""
        if maps == 1:
            return weight
        shape = (maps, count) if back else (count, maps)
        return weight.unflatten(0, (*shape, size)).transpose(0, 1).flatten(0, 2)

    def pairs(weight: Tensor) -> Tensor:
        """Move rotary pairs from side by side to D / 2 apart."""
        shape = (2, size // 2) if back else (size // 2, 2)
        return weight.unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2)

    return {
        "q_proj": lambda weight: pairs(halves(weight, heads)),
        "k_proj": lambda weight: pairs(halves(weight, kv_heads)),
        "v_proj": lambda weight: halves(weight, kv_heads),
    }
