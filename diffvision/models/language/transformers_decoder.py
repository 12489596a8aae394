"""The decoder as a model of transformers: its configuration, blocks, masks and caches.

The heads and the export are in `transformers.py`; both need `pip install diffvision[hf]`.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from diffvision import ops
from diffvision.models.architecture import check, metadata, recorded
from diffvision.models.language.configuration import LanguageConfig
from diffvision.models.language.decoder import LanguageModel, initial_std
from diffvision.nn import ATTENTION
from diffvision.nn.attention import Rotation
from diffvision.nn.transformer import DecoderBlock

CLASSES = {
    "AutoConfig": "DiffTransformerConfig",
    "AutoModel": "DiffTransformerModel",
    "AutoModelForCausalLM": "DiffTransformerForCausalLM",
    "AutoModelForSequenceClassification": "DiffTransformerForSequenceClassification",
    "AutoModelForTokenClassification": "DiffTransformerForTokenClassification",
    "AutoModelForQuestionAnswering": "DiffTransformerForQuestionAnswering",
}  # of transformers -> ours, all available from `diffvision.models.hugging_face`
# Fields of LanguageConfig under the names that transformers has for them. The others have the same name in both.
_NAMES = {
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "map_dim",
    "mlp_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_FIELDS = {field.name: _NAMES.get(field.name, field.name) for field in dataclasses.fields(LanguageConfig)}
_CODE = "modeling_diffvision"  # the file in a saved folder that imports `diffvision.models.hugging_face`


class DiffTransformerConfig(PreTrainedConfig):
    """`LanguageConfig` under transformers' names; its names there (`dim`, `depth`, ...) work as well.

    Two names differ in meaning from `LanguageConfig`. `max_length` is that of transformers' generation, and the model's
    is `max_position_embeddings`. `head_dim` is the width of a key and of a value of one head in a cache: in V1 the two
    maps' keys together, so twice `map_dim`, which is `LanguageConfig.head_dim`. Where `head_dim` is given without
    `map_dim`, it is `LanguageConfig`'s. The defaults are those of "diff-3m".

    Raises:
        ValueError: `LanguageConfig` refuses a value.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        **{ours: theirs for ours, theirs in _NAMES.items() if ours not in ("head_dim", "max_length")},
        "rope_theta": "rotary_theta",
    }
    base_model_fsdp_plan: ClassVar[dict[Any, str]] = {
        "embed": "free_full_weight",
        "blocks.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    map_dim: int | None = None
    head_dim: int = 32
    intermediate_size: int = 688
    variant: str = "v1"
    variant_by_layer: str | None = None
    max_position_embeddings: int = 2048
    rotary_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    lambda_init: float | str = "depth"
    head_norm: bool | None = None
    signal_ratio: int = 2
    gate: str = "element"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.map_dim = self.head_dim if self.map_dim is None else self.map_dim
        layers = self.to_diffvision().layers()
        self.head_dim = self.map_dim * ATTENTION[self.variant].value_maps
        self.use_cache = self.use_cache and all(ATTENTION[layer.variant].cacheable for layer in layers)

    @classmethod
    def from_diffvision(cls, config: LanguageConfig, **others: Any) -> "DiffTransformerConfig":
        """Return the configuration of a `LanguageConfig`, with others of transformers' values (eos_token_id, ...)."""
        return cls(**{_FIELDS[name]: value for name, value in dataclasses.asdict(config).items()}, **others)

    def to_diffvision(self) -> LanguageConfig:
        """Return the `LanguageConfig`, with None for as many key/value heads as heads; ValueError as there."""
        values = {ours: getattr(self, theirs) for ours, theirs in _FIELDS.items()}
        if values["num_kv_heads"] == values["num_heads"]:
            values["num_kv_heads"] = None
        return LanguageConfig(**values)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, with the file of one line for `trust_remote_code=True`; a model calls this too."""
        self.auto_map = write_code(save_directory, "diffvision.models.hugging_face", CLASSES)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers calls it after a folder's line has run, and would then save this module's text."""


class DiffTransformerBlock(GradientCheckpointingLayer):
    """A `DecoderBlock`'s parts under the same names, called as transformers calls its layers.

    Args:
        block: the block to take the parts from.
        layer_idx: index of the block, from 0.
    """

    def __init__(self, block: nn.Module, layer_idx: int) -> None:
        super().__init__()
        assert isinstance(block, DecoderBlock)
        self.norm1, self.attn, self.norm2, self.mlp = block.norm1, block.attn, block.norm2, block.mlp
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Float[Tensor, "B N dim"],
        *,
        attention_mask: Tensor | None,
        is_causal: bool,
        position_embeddings: Rotation,
        past_key_values: Cache | None,
        explicit: bool,
    ) -> tuple[Float[Tensor, "B N dim"], Float[Tensor, "B H N L"] | None]:
        """Return the block's output, and with `explicit` the map that weights each head's values."""
        cache = None if past_key_values is None else _HostLayer(past_key_values, self.layer_idx, is_causal)
        maps: list[Tensor] | None = [] if explicit else None
        attended = self.attn(
            self.norm1(hidden_states), attention_mask, is_causal, cache=cache, rotation=position_embeddings, maps=maps
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.norm2(hidden_states)), maps[0] if maps else None


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """Base of the classes below: how weights are drawn, loaded and kept."""

    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _supports_sdpa = True
    _can_compile_fullgraph = True
    # As the base class has them, no ClassVar:
    _no_split_modules: set[str] | list[str] | None = ["DiffTransformerBlock"]  # noqa: RUF012
    _skip_keys_device_placement: set[str] | list[str] | None = ["past_key_values"]  # noqa: RUF012
    _can_record_outputs: dict[str, Any] | None = {  # noqa: RUF012
        "hidden_states": OutputRecorder(DiffTransformerBlock, index=0),
        "attentions": OutputRecorder(DiffTransformerBlock, index=1),
    }

    @classmethod
    def from_pretrained(cls, *args: Any, **settings: Any) -> Any:
        """Load as transformers does, but raise for missing weights, which transformers would draw at random.

        A folder of the same class must hold all weights and no others, and a folder of another class those of the
        decoder: a classifier may be made of a language model.

        Raises:
            ValueError: the weights are not those of the configuration (another variant, a damaged file), or a folder
                records that they are of another architecture.
        """
        wants_info = settings.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **settings)
        model, info = loaded
        prefixes = [f"{prefix}{part}." for prefix in ("", "model.") for part in ("embed", "blocks", "norm")]
        asked = ("",) if cls.__name__ in (model.config.architectures or ()) else tuple(prefixes)
        source = args[0] if args else settings.get("pretrained_model_name_or_path")
        check_loaded(info, source or cls.__name__, f"variant {model.config.variant!r}", asked)
        if source is not None:
            _check_recorded(Path(source, settings.get("subfolder") or ""), model.config)
        return (model, info) if wants_info else model

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Refuse functions of transformers' `AttentionInterface`, which would not be called."""
        if attn_implementation not in (None, "eager", "sdpa"):
            raise ValueError(
                f"attn_implementation {attn_implementation!r} would not be called: give 'sdpa' or 'eager' (kernels: "
                "diffvision.ops.attention_backend)"
            )
        host: Any = super()  # mypy does not find the host's protocol for self here
        return host._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights as `LanguageModel` does."""
        if isinstance(module, nn.Linear | nn.Embedding):
            back = [part for block in getattr(self, "blocks", ()) for part in (block.attn.proj, block.mlp.down)]
            std, std_back = initial_std(self.config.to_diffvision())
            nn.init.normal_(module.weight, std=std_back if any(module is part for part in back) else std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, as `DiffTransformerConfig.register_for_auto_class`."""


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """The decoder of a `LanguageModel`: embedding, blocks and final norm, without the output projection.

    Args:
        config: the configuration; its `num_key_value_heads` is filled in where it is None.
        body: a `LanguageModel` to take the parts from; by default one with new weights.
    """

    def __init__(self, config: DiffTransformerConfig, body: LanguageModel | None = None) -> None:
        super().__init__(config)
        body = LanguageModel(config.to_diffvision()) if body is None else body
        self.embed, self.norm = body.embed, body.norm
        self.blocks = nn.ModuleList(DiffTransformerBlock(block, index) for index, block in enumerate(body.blocks))
        # Of a layer of the model's own variant: others count theirs otherwise.
        own = (layer.num_kv_heads for layer in body.attention_layers() if layer.variant == config.variant)
        config.num_key_value_heads = next(own, config.num_key_value_heads or config.num_attention_heads)
        mark_as_initialised(self)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Int[Tensor, "B N"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B N"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B N dim"] | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the input of the output projection, after the final norm.

        Args:
            input_ids: tokens [B, N], those after past_key_values if there are any.
            attention_mask: [B, past + N], 0 for padding at either side, which no token attends to; or a complete mask
                [B, 1, N, past + N], boolean (True = may attend) or float (0 = may attend).
            position_ids: counted from 0; by default the number of tokens that attention_mask has before each. Without
                mask and cache, a row whose positions begin anew holds several documents, which do not attend to each
                other.
            past_key_values: a cache of transformers, of any kind; these tokens are added to it.
            inputs_embeds: embeddings in place of input_ids.
            use_cache: return a cache for the tokens to follow; by default the configuration's value in evaluation, and
                False in training.
            **kwargs: `output_hidden_states`, `output_attentions` (see `DiffTransformerForCausalLM`) and `return_dict`
                as in transformers. Others are ignored, as in transformers' models.

        Raises:
            ValueError: neither or both of input_ids and inputs_embeds are given, the mask has another shape, or there
                are more tokens than max_position_embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            inputs_embeds = self.embed(input_ids)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        if isinstance(start, int):  # a static cache counts in a tensor; `generate` checks its length
            _check_length(inputs_embeds, attention_mask, start, self.config.max_position_embeddings)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if position_ids is None:
            position_ids = _positions(inputs_embeds, attention_mask, start)
        rotation = ops.rotary_tables(position_ids[:, None, None], self.config.map_dim, self.config.rotary_theta)
        wanted = kwargs.get("output_attentions", self.config.output_attentions)
        explicit = bool(wanted) or self.config._attn_implementation == "eager"
        hidden_states = inputs_embeds
        for block in self.blocks[: self.config.num_hidden_layers]:  # `assistant_early_exit` lowers it for a while
            hidden_states, _ = block(
                hidden_states,
                attention_mask=mask,
                is_causal=mask is None and getattr(self.config, "is_causal", True),
                position_embeddings=rotation,
                past_key_values=past_key_values,
                explicit=explicit,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class _HostLayer:
    """One layer of a cache of transformers: keys [B, Hk, L, P D], a head's maps side by side, and values [B, Hk, L, V].

    In V1 both are 2D wide, in V2 and in the standard variant D: caches of transformers want one shape for both.

    A static cache returns its whole buffer, which starts as zeros. transformers leaves the mask of several tokens to
    `is_causal` only where they are the first tokens. The rest of the buffer is then unused and cut off here, for
    `is_causal` is aligned to the last key.

    Args:
        past: the cache.
        index: index of the layer.
        is_causal: whether the layer attends with `is_causal` instead of a mask.
    """

    def __init__(self, past: Cache, index: int, is_causal: bool) -> None:
        self.past, self.index, self.is_causal = past, index, is_causal

    def append(
        self, k: Float[Tensor, "B Hk P N D"], v: Float[Tensor, "B Hk N V"]
    ) -> tuple[Float[Tensor, "B Hk P L D"], Float[Tensor, "B Hk L V"]]:
        keys, values = self.past.update(k.transpose(2, 3).flatten(3), v, self.index)
        if self.is_causal and (count := v.shape[2]) > 1:
            keys, values = keys[:, :, :count], values[:, :, :count]
        return keys.unflatten(3, (k.shape[2], k.shape[4])).transpose(2, 3), values


def write_code(folder: str | os.PathLike, module: str, classes: Mapping[str, str]) -> dict[str, str]:
    """Write the file of one line that imports classes from a module; return transformers' auto_map of the folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    line = f"from {module} import {', '.join(classes.values())}  # noqa: F401\n"
    (Path(folder) / f"{_CODE}.py").write_text(line, encoding="utf-8")
    return {auto: f"{_CODE}.{name}" for auto, name in classes.items()}


def check_loaded(info: Mapping[str, Any], source: Any, what: str, asked: tuple[str, ...] = ("",)) -> None:
    """Raise a ValueError if transformers found weights missing or unexpected, of names with the prefixes `asked`."""
    wrong = {
        kind: sorted(name for name in info[f"{kind}_keys"] if name.startswith(asked))
        for kind in ("missing", "unexpected")
    }
    if any(wrong.values()):
        listed = [f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in wrong.items() if names]
        raise ValueError(
            f"the weights of {str(source)!r} are not those of {what} that its configuration names: {'; '.join(listed)}"
        )


def mark_as_initialised(model: PreTrainedModel) -> None:
    """Mark weights that are drawn or loaded already, so that `post_init` leaves them; those on "meta" are neither."""
    if next(model.parameters()).device.type != "meta":
        for module in model.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]


def record(folder: str | Path) -> None:
    """Record the architecture of a saved folder with its weights, for `from_pretrained` to compare.

    transformers writes no metadata but the format.
    """
    folder = Path(folder)
    about = metadata(_empty_model(DiffTransformerConfig.from_pretrained(folder)))
    for file in _weight_files(folder):
        copy = file.with_suffix(".recorded")  # the tensors are read from the old file while they are written
        save_file(load_file(file), copy, metadata=about)
        copy.replace(file)


def _check_recorded(folder: Path, config: DiffTransformerConfig) -> None:
    """Raise a ValueError if a folder records that its weights are of another architecture."""
    for file in _weight_files(folder):
        check(recorded(file), _empty_model(config), f"{file}")


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _empty_model(config: DiffTransformerConfig) -> LanguageModel:
    """Return the model of a configuration, without weights."""
    with torch.device("meta"):
        return LanguageModel(config.to_diffvision())


def _check_length(embeds: Tensor, mask: Tensor | None, start: int, longest: int) -> None:
    rows, end = embeds.shape[0], start + embeds.shape[1]
    if end > longest:
        raise ValueError(
            f"{end} tokens are over the model's max_length of {longest}: shorten them, or train with a larger "
            "max_position_embeddings"
        )
    if mask is not None and mask.ndim == 2 and mask.shape != (rows, end):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, and must be [{rows}, {end}]: one number for each token, those in "
            "the cache included"
        )


def _positions(embeds: Tensor, mask: Tensor | None, start: int | Tensor) -> Int[Tensor, "B N"]:
    """Return the positions of the tokens: how many the mask has before each, or how many come before."""
    count = embeds.shape[1]
    if mask is not None and mask.ndim == 2:
        return ((mask != 0).cumsum(1) - 1).clamp(min=0)[:, -count:]
    return (torch.arange(count, device=embeds.device) + start)[None]
