"""Motif-2.6B and Motif-2-12.7B of Motif-Technologies as our language models, and back: V1 and GDA with PolyNorm.

| here | Motif |
|---|---|
| attn.{q,k,v}_proj | self_attn.{q,k,v}_proj, heads in the same order |
| attn.proj, attn.head_norm | self_attn.{o_proj,subln} |
| attn.lambda_{q1,k1,q2,k2} | self_attn.lambda_{q1,k1,q2,k2} |
| norm1, norm2 | input_layernorm, post_attention_layernorm |
| mlp.{gate,up,down,act} | mlp.{gate_proj,up_proj,down_proj,act_fn} |
| rotary pairs (0, 1), (2, 3), ... | (i, i + D / 2) |

The rows of q_proj are [groups, signal heads and their noise head, D], those of k_proj [Hk, 2, D], of v_proj [Hk, 2D].
Their num_attention_heads counts signal and noise heads, their num_key_value_heads two a key/value head of ours, and
lambda_init is 0.8 - 0.6 exp(-0.3 (layer - 1)) with layers from 0. Without num_noise_heads half of the heads are noise:
that is V1.

Source: MotifTechnologies/vllm models/motif.py, attention/backends/grouped_diff_attn.py and layers/layernorm.py (commit
477e4d7; vLLM pull requests 23414 and 27396), read against junhoyeo/mlx-motif model.py; arXiv 2508.09148, 2510.06949 and
2511.07464. A public log of a conversion to llama.cpp has the 643 tensors that these names give for 12.7B's 40 layers.
Neither the modeling_motif.py, the config.json nor the weights on the Hub were read: that the settings of the released
files are among those that are accepted here, and that their model_type is "Motif", is not verified. The settings
`fused_rope` and `expanded` are ignored, as by vLLM.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diffvision.models.convert.state import State
from diffvision.models.convert.transformers import (
    HEAD_NORM_EPS,
    SIZES,
    WHAT,
    check_settings,
    check_sizes,
    layers,
    renamed,
    rope_settings,
    rotary_pairs,
    shared_from,
    sizes,
)
from diffvision.models.language.configuration import LanguageConfig
from diffvision.nn.diff_attention import VECTORS

MODEL_TYPE = "Motif"

_NAMES = {
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.head_norm.weight": "self_attn.subln.weight",
    "mlp.act.weight": "mlp.act_fn.weight",
    "mlp.act.bias": "mlp.act_fn.bias",
    **{f"attn.{name}": f"self_attn.{name}" for name in VECTORS},
}
_ROTATED = {f"attn.{name}.weight": f"self_attn.{name}.weight" for name in ("q_proj", "k_proj")}
_FIXED = {
    "hidden_act": "poly_norm",
    "attn_rms_norm_eps": HEAD_NORM_EPS,
    "k_ratio": 1,
    "use_bias": False,
    "attention_bias": False,
    "qkv_bias": False,
    "use_sliding_window": False,
    "is_causal": True,
}
"""Settings that our model has no other value of; it is the default where the configuration is silent."""


def recognised(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of one of Motif's language models."""
    return str(values.get("model_type")).lower() == MODEL_TYPE.lower()


def to_motif(config: LanguageConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings of Motif's configuration (with `model_type`), and the state_dict of its MotifForCausalLM.

    Args:
        config: variant v1 or gda, with PolyNorm and lambda_init "depth-1".
        state: the model's state_dict. Tensors may be shared with what is returned.

    Raises:
        ValueError: Motif has another variant, activation, lambda_init or no such head norm.
    """
    if config.variant not in ("v1", "gda"):
        raise ValueError(f"Motif has no model of variant {config.variant!r}: convert v1 or gda")
    fixed = {"activation": "poly_norm", "lambda_init": "depth-1", "head_norm": True, "variant_by_layer": None}
    check_settings("this model", {name: getattr(config, name) for name in fixed}, "Motif", fixed)
    groups = config.num_heads // (config.signal_ratio if config.variant == "gda" else 1)
    values = {
        "model_type": MODEL_TYPE,
        **sizes(config),
        "num_attention_heads": config.num_heads + groups,
        **({"num_noise_heads": groups} if config.variant == "gda" else {}),
        "num_key_value_heads": 2 * (config.num_kv_heads or groups),
        "rope_theta": config.rotary_theta,
        "rope_scaling": None,
        **_FIXED,
    }
    out = {theirs: state[ours] for ours, theirs in renamed(config)}
    for ours, theirs in layers(config):
        out |= {theirs + other: state[ours + name] for name, other in _NAMES.items()}
        out |= {theirs + other: rotary_pairs(state[ours + name], config.head_dim) for name, other in _ROTATED.items()}
    return values, out


def from_motif(values: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[LanguageConfig, dict[str, Tensor]]:
    """Return our configuration and state_dict from those of a MotifForCausalLM.

    Args:
        values: its config.json.
        state: its state_dict.

    Raises:
        ValueError: it is another model, such as Motif-3, settings or weights are missing, or our model does not have a
            setting (sliding windows, biases, scaled rotary positions, another k_ratio or eps).
    """
    state = State(state, WHAT)
    config = _our_config(values, tied="lm_head.weight" not in state)
    out = shared_from(config, state)
    for ours, theirs in layers(config):
        out |= {ours + name: state[theirs + other] for name, other in _NAMES.items()}
        out |= {
            ours + name: rotary_pairs(state[theirs + other], config.head_dim, back=True)
            for name, other in _ROTATED.items()
        }
    return config, out


def _our_config(values: Mapping[str, Any], *, tied: bool) -> LanguageConfig:
    """Return our configuration; `tied` holds where the settings do not say it."""
    if not recognised(values):
        raise ValueError(
            f"a transformers model of type {values.get('model_type')!r} is not {MODEL_TYPE}: give one of that type"
        )
    if (latent := values.get("kv_lora_rank")) is not None:
        raise ValueError(
            f"the Motif model has kv_lora_rank={latent!r}, of Motif-3, which is not supported: give Motif-2.6B or "
            "Motif-2-12.7B"
        )
    check_sizes(values, "num_key_value_heads", "num_noise_heads", "head_dim")
    rope = rope_settings(values)
    fixed = _FIXED | {"rope_type": "default", "partial_rotary_factor": 1.0}
    check_settings("the Motif model", {**values, **rope}, "ours", fixed)
    kinds = values.get("layer_types") or ()
    windows = {*kinds} - {"full_attention"}
    if windows or (values.get("sliding_window") is not None and values.get("use_sliding_window") is None):
        raise ValueError(
            f"the Motif model has layer_types={list(kinds)!r}, sliding_window={values.get('sliding_window')!r}: set "
            "use_sliding_window=false if unused, or run its own code"
        )
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    noise = values.get("num_noise_heads") or (0 if heads % 2 else heads // 2)
    if not 0 < noise < heads or heads % noise:
        raise ValueError(
            f"the Motif model has num_attention_heads={heads}, not a multiple of num_noise_heads={noise}: use its "
            "own config.json"
        )
    if kv_heads % 2 or noise % (kv_heads // 2):
        raise ValueError(
            f"the Motif model has num_key_value_heads={kv_heads}, whose half must divide {noise} noise heads: use "
            "its own config.json"
        )
    ratio = heads // noise - 1
    return LanguageConfig(
        **{ours: values[theirs] for ours, theirs in SIZES.items()},
        num_heads=heads - noise,
        num_kv_heads=None if kv_heads == 2 * noise else kv_heads // 2,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rotary_theta=float(rope["rope_theta"]),
        tied=tied if values.get("tie_word_embeddings") is None else bool(values["tie_word_embeddings"]),
        lambda_init="depth-1",
        activation="poly_norm",
        **({"variant": "v1"} if ratio == 1 else {"variant": "gda", "signal_ratio": ratio}),
    )
