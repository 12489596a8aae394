"""The language models as Hugging Face ones (`pip install diffvision[hf]`): `generate`, `save_pretrained`, Auto classes.

Importing this module registers the classes, so that `AutoModelForCausalLM.from_pretrained` finds them; nothing else of
the package imports transformers for it.

    python -c "from diffvision.models.hugging_face import export; export('checkpoint', 'hugging_face')"
"""

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from diffvision.models import language
from diffvision.models.decoder import LanguageModel
from diffvision.models.ends import ENDS, told_end
from diffvision.models.language_config import LanguageConfig
from diffvision.nn.cache import KVCache

_FIELDS = {field.name for field in dataclasses.fields(LanguageConfig)} - {"max_length"}
_CODE = "modeling_diffvision"  # the file in a saved folder that imports this module


class DiffTransformerConfig(PreTrainedConfig):
    """`LanguageConfig` as transformers keeps it, under its names and, where transformers has others, under those too.

    `LanguageConfig.max_length` is `max_position_embeddings`: transformers' own `max_length` is one of generation. The
    values by default are those of "diff-3m".

    Raises:
        ValueError: a value that `LanguageConfig` refuses.
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "mlp_dim",
        "rope_theta": "rotary_theta",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied",
    }

    vocab_size: int = 4096
    dim: int = 256
    depth: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int = 32
    mlp_dim: int = 688
    variant: str = "v1"
    max_position_embeddings: int = 2048
    rotary_theta: float = 10_000.0
    tied: bool = True
    norm_eps: float = 1e-5
    lambda_init: float | str = "depth"
    head_norm: bool | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.to_diffvision()

    @classmethod
    def from_diffvision(cls, config: LanguageConfig, **others: Any) -> "DiffTransformerConfig":
        """Of ours; `others` as transformers' configurations take them (eos_token_id, ...)."""
        values = dataclasses.asdict(config)
        return cls(max_position_embeddings=values.pop("max_length"), **values, **others)

    def to_diffvision(self) -> LanguageConfig:
        """Ours; ValueError for values that it refuses."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return LanguageConfig(max_length=self.max_position_embeddings, **values)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As transformers' (a model's comes by here), and the file of one line for `trust_remote_code=True`."""
        classes = {"AutoConfig": DiffTransformerConfig, "AutoModelForCausalLM": DiffTransformerForCausalLM}
        self.auto_map = {auto: f"{_CODE}.{own.__name__}" for auto, own in classes.items()}  # of this very folder
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        names = ", ".join(own.__name__ for own in classes.values())
        line = f"from {__name__} import {names}  # noqa: F401\n"
        (Path(save_directory) / f"{_CODE}.py").write_text(line, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: transformers asks when it has run a folder's line, and would then save this module's text."""


class DiffTransformerForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel` of any variant in the clothes of a causal language model of transformers.

    Its weights are those of `.model`, under "model."; a tied output projection is no weight of its own. `generate` uses
    transformers' growing cache (not a static one, and `diffvision.models.generation` is the faster way), and equals it
    in what is likeliest. Samples of unequal length are padded at the left and told by `attention_mask`.

    Attributes:
        model: the `LanguageModel`.
    """

    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules: set[str] | list[str] | None = ["DecoderBlock"]  # noqa: RUF012  (as the base class has it)
    supports_gradient_checkpointing = True
    model: LanguageModel

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(config.to_diffvision())
        self.post_init()

    @classmethod
    def from_diffvision(cls, model: LanguageModel, **others: Any) -> "DiffTransformerForCausalLM":
        """Around a model of ours, which stays where it is; `.model` is the way back.

        Args:
            model: taken as it is, its weights not copied.
            **others: of the configuration: eos_token_id, pad_token_id, ...
        """
        config = DiffTransformerConfig.from_diffvision(model.config, dtype=model.embed.weight.dtype, **others)
        with torch.device("meta"):
            host = cls(config)
        host.model = model
        return host.train(model.training)

    @classmethod
    def from_pretrained(cls, *args: Any, **settings: Any) -> Any:
        """As transformers', but weights that are missing or left over are an error: they would be drawn at random.

        Raises:
            ValueError: the weights are not those of the configuration (another variant, a damaged file).
        """
        wants_info = settings.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **settings)
        model, info = loaded
        wrong = {kind: sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected") if info[f"{kind}_keys"]}
        if wrong:
            told = "; ".join(f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in wrong.items())
            raise ValueError(
                f"the weights of {args[0] if args else cls.__name__!r} are not those of variant "
                f"{model.config.variant!r} that its configuration names: {told}"
            )
        return (model, info) if wants_info else model

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B N"],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "B N"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of each token's successor, and the loss if there are labels.

        Args:
            input_ids: tokens [B, N], those after past_key_values if there are any.
            attention_mask: [B, past + N], 0 for padding, at the left of a row (nothing attends to it, and positions
                count from behind it) or, without past tokens, at its right (where causal attention ignores it).
            position_ids: none but the positions that the mask gives: the model counts them itself.
            past_key_values: a cache that grows; it takes these tokens.
            labels: input_ids themselves, -100 where there is no loss; shifted within.
            use_cache: hand back a cache for the tokens to follow; by default the configuration's choice in evaluation,
                and none in training.
            logits_to_keep: logits of the last so many tokens only (0: of all), or of those that an index names.
            num_items_in_batch: what the sum of the losses is divided by (transformers' Trainer gives it).

        Raises:
            ValueError: padding within a row, positions other than the mask's, a mask of another shape, a static cache,
                labels with logits_to_keep, or more tokens than the model's max_length.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels with logits_to_keep: a loss needs all logits; leave one of them out")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        cache = None if past_key_values is None else _HostCache(past_key_values, self.model)
        start = 0 if cache is None else cache.length
        padding = _padding(attention_mask, input_ids, start)
        if position_ids is not None:
            _check_positions(position_ids, input_ids, start, padding, attention_mask)
        hidden = self.model.hidden(input_ids, cache=cache, padding=padding)
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
            hidden = hidden[:, kept]
        else:
            hidden = hidden[:, logits_to_keep]
        logits = self.model.logits(hidden)
        loss = None
        if labels is not None:
            vocab_size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `LanguageModel` has drawn its weights, and `from_pretrained` wants them all."""

    def _validate_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        """transformers only warns; here the tokens that fit would be lost with the first that does not."""
        host: Any = super()  # whose own protocol for self mypy does not find here
        host._validate_generated_length(generation_config, *args, **kwargs)
        if (wanted := generation_config.max_length) > self.model.config.max_length:
            raise ValueError(
                f"prompt and new tokens make {wanted}, over the model's max_length of {self.model.config.max_length}: "
                "shorten the prompt or lower max_new_tokens"
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: as `DiffTransformerConfig.register_for_auto_class`."""

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute each block's activations in the backward pass, as `LanguageModel.set_grad_checkpointing`."""
        self.model.set_grad_checkpointing(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the activations again."""
        self.model.set_grad_checkpointing(False)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection, None if it is the embedding."""
        return self.model.head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """The embedding, whose size stays; ValueError for another one."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"the model's vocabulary is {self.config.vocab_size}, and cannot become {new_num_tokens}: make a model "
                "with that vocab_size"
            )
        return self.model.embed


class _HostCache(KVCache):
    """A cache of transformers, asked as `KVCache` is."""

    def __init__(self, past: Cache, model: LanguageModel) -> None:
        if past.is_compileable:
            raise ValueError(
                f"{type(past).__name__} is a static cache: use DynamicCache, transformers' default, or "
                "diffvision.models.generation, whose cache is static"
            )
        self.past = past
        self.layers = [_HostLayer(past, index) for index in range(len(model.blocks))]  # type: ignore[misc]

    @property
    def length(self) -> int:
        return int(self.past.get_seq_length())


class _HostLayer:
    """One layer of a cache of transformers: keys [B, Hk P, L, D], the maps of a head adjacent; values [B, Hk, L, V]."""

    def __init__(self, past: Cache, index: int) -> None:
        self.past, self.index = past, index

    def append(
        self, k: Float[Tensor, "B Hk P N D"], v: Float[Tensor, "B Hk N V"]
    ) -> tuple[Float[Tensor, "B Hk P L D"], Float[Tensor, "B Hk L V"]]:
        keys, values = self.past.update(k.flatten(1, 2), v, self.index)
        return keys.unflatten(1, k.shape[1:3]), values


def _padding(mask: Tensor | None, tokens: Tensor, start: int) -> Tensor | None:
    """Tokens [B] at the left of each row that are none; None if there are none anywhere."""
    if mask is None:
        return None
    rows, end = tokens.shape[0], start + tokens.shape[1]
    if mask.shape != (rows, end):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, and must be [{rows}, {end}]: one number for each token, those in "
            "the cache included"
        )
    real = mask != 0
    if real.all():
        return None
    begun = real.cumsum(1) > 0
    gap = (begun & ~real)[:, :-1] & real[:, 1:]
    if gap.any() or (start and not real[:, -1].all()):
        raise ValueError(
            "attention_mask has padding within or, with a cache, behind a row: pad at the left (padding_side='left')"
        )
    padding = (~begun).sum(1)
    return padding if padding.any() else None


def _check_positions(given: Tensor, tokens: Tensor, start: int, padding: Tensor | None, mask: Tensor | None) -> None:
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    if padding is not None:
        positions = positions - padding[:, None]
    wrong = given != positions
    if mask is not None:
        wrong = wrong & (mask[:, start:] != 0)
    if wrong.any():
        raise ValueError(
            "position_ids are not those that attention_mask gives, counted from each row's first token: leave them out"
        )


def export(checkpoint: str, directory: str, tokenizer: str | None = None, *, eos: str | None = None) -> None:
    """Writes a checkpoint of ours as a Hugging Face folder, with its tokenizer.

    A program that knows nothing of this package loads the folder with `trust_remote_code=True`: a file of one line in
    it imports this module, which must be installed. lm-eval-harness, for one:

        lm_eval --model hf --model_args pretrained=DIRECTORY,trust_remote_code=True --tasks ...

    Args:
        checkpoint: directory of a saved language model, or a checkpoint of our training (.ckpt).
        directory: made if it is not there.
        tokenizer: tokenizer.json, or a directory that holds one; by default the one beside the checkpoint, or the one
            of its training. Without any there is a warning, and the folder has none.
        eos: token that ends a document; by default the one that tokenizer_config.json beside the tokenizer names, or
            <|endoftext|> or another of the usual names.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint or tokenizer, or a damaged one; the tokenizer has no such
            token, or more tokens than the model.
    """
    write(language.load(checkpoint), checkpoint, directory, tokenizer, eos=eos)


def write(
    model: LanguageModel, checkpoint: str, directory: str, tokenizer: str | None = None, *, eos: str | None = None
) -> None:
    """As `export`, of a model that was loaded from the checkpoint already."""
    file = language.tokenizer_beside(checkpoint) if tokenizer is None else _tokenizer_file(Path(tokenizer))
    ends: dict[str, int] = {}
    if file is None:
        warnings.warn(f"no tokenizer beside {checkpoint}: the folder has none; name one with tokenizer", stacklevel=3)
    else:
        words = _tokenizer(file, model.config, eos)
        ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.eos_token_id}
        words.save_pretrained(directory)
    DiffTransformerForCausalLM.from_diffvision(model, **ends).save_pretrained(directory)


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}: give a tokenizer.json, or a directory that holds one")
    return file


def _tokenizer(file: Path, config: LanguageConfig, eos: str | None) -> PreTrainedTokenizerFast:
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a file of the tokenizers library: {error}") from None
    eos = eos or told_end(file, vocabulary) or ENDS[0]
    if eos not in vocabulary:
        raise ValueError(f"{file} has no token {eos!r} that ends a document: name its own with eos")
    if (size := max(vocabulary.values()) + 1) > config.vocab_size:
        raise ValueError(f"{file} has {size} tokens and the model {config.vocab_size}: they do not belong together")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        eos_token=eos,
        pad_token=eos,
        padding_side="left",
        split_special_tokens=True,  # text is only text, as in our own tokenizers
        model_max_length=config.max_length,
    )


def register() -> None:
    """Makes the classes known to transformers' Auto classes; done when this module is imported."""
    AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
    AutoModelForCausalLM.register(DiffTransformerConfig, DiffTransformerForCausalLM, exist_ok=True)


register()
