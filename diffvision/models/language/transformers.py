"""The language models as models of transformers (`pip install diffvision[hf]`): heads, Auto classes, export.

Importing this module registers the classes, so that `AutoModelForCausalLM.from_pretrained` finds them. Decoder and
configuration are in `transformers_decoder.py`.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedTokenizerFast
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from diffvision.models import language
from diffvision.models.convert.transformers import is_llama_with_v2, to_hugging_face
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.modeling_diffllama_v2 import (
    DiffLlamaV2Config,
    DiffLlamaV2ForCausalLM,
    DiffLlamaV2Model,
)
from diffvision.models.language.transformers_decoder import (
    CLASSES,
    DiffTransformerConfig,
    DiffTransformerModel,
    DiffTransformerPreTrainedModel,
    mark_as_initialised,
    record,
)
from diffvision.nn.linear import Linear
from diffvision.tokenizer_settings import USUAL_ENDS, find_end, read_config, text_settings

# In files the output projection is where `LanguageModel` has it.
_HEAD_IN_FILES = "model.head.weight"


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """A `LanguageModel` of any variant as a causal language model of transformers.

    Its weights are those of the `LanguageModel`, under "model."; a tied output projection is not saved.
    `diffvision.models.language.generation` is the faster way to generate, and its greedy tokens equal `generate`'s.

    `output_attentions` returns the map that weights each head's values, [B, H, N, L] in float32 or better: in V1 and V2
    the difference of two softmax maps, `A1 - lambda A2`, whose rows sum to `1 - lambda` and may be negative.
    `attn_implementation` "sdpa", the default, leaves the choice of a kernel to `ops.diff_attention`; with "eager", or
    where maps are returned, they are computed explicitly.

    Args:
        config: the configuration.
        body: a `LanguageModel` to take the parts from; by default one with new weights.

    Attributes:
        model: the decoder.
        lm_head: the output projection, which shares the embedding's weight where they are tied.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012  (as the base class has it)

    def __init__(self, config: DiffTransformerConfig, body: LanguageModel | None = None) -> None:
        """Wrap a language model of ours, or one created from the configuration; its weights stay as they are."""
        super().__init__(config)
        body = LanguageModel(config.to_diffvision()) if body is None else body
        self.model = DiffTransformerModel(config, body)
        if body.head is None:
            self.lm_head: nn.Linear = Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
            self.lm_head.weight = body.head_weight
        else:
            self.lm_head = body.head
        mark_as_initialised(self)
        self.post_init()

    @classmethod
    def from_diffvision(cls, model: LanguageModel, **others: Any) -> "DiffTransformerForCausalLM":
        """Wrap the parts of a `LanguageModel`, without copying its weights; `to_diffvision` is the inverse.

        Args:
            model: the model, which shares its parts with the result.
            **others: further values of the configuration: eos_token_id, pad_token_id, ...
        """
        config = DiffTransformerConfig.from_diffvision(model.config, dtype=model.embed.weight.dtype, **others)
        return cls(config, model).train(model.training)

    def to_diffvision(self) -> LanguageModel:
        """Return a `LanguageModel` of the same parts; the weights are not copied."""
        with torch.device("meta"):
            model = LanguageModel(self.config.to_diffvision())
        model.embed, model.norm = self.model.embed, self.model.norm
        if model.head is not None:
            model.head = self.lm_head  # type: ignore[assignment]  # an adapter may be around it
        for block, part in zip(model.blocks, self.model.blocks, strict=True):
            block.norm1, block.attn, block.norm2, block.mlp = part.norm1, part.attn, part.norm2, part.mlp
        return model.train(self.training)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B N"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B N"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B N dim"] | None = None,
        labels: Int[Tensor, "B N"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of each token's successor, float32 or better, and the loss if there are labels.

        The arguments stand here by name, since transformers reads them from the signature. Those that are not described
        below are those of `DiffTransformerModel.forward`.

        Args:
            labels: equal to input_ids, -100 where there is no loss; they are shifted here.
            logits_to_keep: the logits of this many last tokens only (0: of all), or of those that an index names.
            **kwargs: as in `DiffTransformerModel.forward`, and for the loss `num_items_in_batch` (from transformers'
                Trainer) and `shift_labels`.

        Raises:
            ValueError: labels are given with logits_to_keep, or `DiffTransformerModel.forward` refuses an argument.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels with logits_to_keep: a loss needs all logits; leave one of them out")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `GenerationMixin.generate`; if that fails, restore the depth that early exit lowers."""
        host: Any = super()
        depth = self.config.num_hidden_layers
        try:
            return host.generate(*args, **kwargs)
        finally:
            self.config.num_hidden_layers = depth

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights by the names of this module, or by those in files: `Trainer` resumes with these."""
        if _HEAD_IN_FILES in state_dict:
            state_dict = dict(state_dict)
            state_dict["lm_head.weight"] = state_dict.pop(_HEAD_IN_FILES)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse `generate_batch`, which would report the failure of its paged attention in each request alone."""
        raise NotImplementedError(
            f"no paged attention for variant {self.config.variant!r}: use generate() in place of generate_batch()"
        )

    def _validate_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse more tokens than the model takes, where transformers warns and fails after the last that fits."""
        host: Any = super()  # mypy does not find the host's protocol for self here
        host._validate_generated_length(generation_config, *args, **kwargs)
        if (wanted := generation_config.max_length) > self.config.max_position_embeddings:
            raise ValueError(
                f"prompt and new tokens make {wanted}, over the model's max_length of "
                f"{self.config.max_position_embeddings}: shorten the prompt or lower max_new_tokens"
            )


class DiffTransformerForSequenceClassification(GenericForSequenceClassification, DiffTransformerPreTrainedModel):
    """Classifier of each row, from its last token, like `LlamaForSequenceClassification`."""


class DiffTransformerForTokenClassification(GenericForTokenClassification, DiffTransformerPreTrainedModel):
    """Classifier of each token, like `LlamaForTokenClassification`."""


class DiffTransformerForQuestionAnswering(GenericForQuestionAnswering, DiffTransformerPreTrainedModel):
    """Finds where an answer begins and ends, like `LlamaForQuestionAnswering`."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.set_input_embeddings(value)


def export(checkpoint: str, directory: str, tokenizer: str | None = None, *, eos: str | None = None) -> None:
    """Write one of our checkpoints as a transformers folder, with its tokenizer and a record of its architecture.

    V2 is written as a Llama with a difference at the end of attention, as engines take models: see
    `modeling_diffllama_v2.py`, which is copied into the folder and needs no diffvision. A program that does not import
    this package loads the folder with `trust_remote_code=True`. In folders of the other variants a file of one line
    imports `diffvision.models.hugging_face`, which must be installed. An example is lm-eval-harness:

        lm_eval --model hf --model_args pretrained=DIRECTORY,trust_remote_code=True --tasks ...

    Args:
        checkpoint: directory of a saved language model, or a checkpoint of our training (.ckpt).
        directory: made if it does not exist.
        tokenizer: tokenizer.json, or a directory that holds one; by default the one next to the checkpoint, or the one
            of its training. Without one there is a warning, and the folder has none.
        eos: token that ends a document; by default the one that tokenizer_config.json next to the tokenizer names, or
            <|endoftext|> or another of the usual names.

    Raises:
        FileNotFoundError: the checkpoint or the tokenizer does not exist.
        ValueError: one of them is damaged, or the tokenizer has no such token or more tokens than the model.
    """
    write(language.load(checkpoint), checkpoint, directory, tokenizer, eos=eos)


def write(
    model: LanguageModel, checkpoint: str, directory: str, tokenizer: str | None = None, *, eos: str | None = None
) -> None:
    """Export a model that was loaded from the checkpoint already; the arguments are those of `export`."""
    file = language.find_tokenizer(checkpoint) if tokenizer is None else tokenizer_file(Path(tokenizer))
    ends: dict[str, int] = {}
    if file is None:
        warnings.warn(
            f"no tokenizer next to {checkpoint}: the folder has none; name one with --tokenizer", stacklevel=3
        )
    else:
        fast = fast_tokenizer(file, model.config.vocab_size, model.config.max_length, eos)
        ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.eos_token_id}
        if fast.bos_token_id is not None:
            ends["bos_token_id"] = fast.bos_token_id
        fast.save_pretrained(directory)
    if is_llama_with_v2(model.config):
        _v2_as_llama(model, ends).save_pretrained(directory)
    else:
        DiffTransformerForCausalLM.from_diffvision(model, **ends).save_pretrained(directory)
        record(directory)


def _v2_as_llama(model: LanguageModel, ends: dict[str, int]) -> DiffLlamaV2ForCausalLM:
    """Return a V2 model as engines take one: a Llama whose attention takes a difference at the end."""
    values, state = to_hugging_face(model.config, model.state_dict())
    dtype = model.embed.weight.dtype
    config = DiffLlamaV2Config(**{**values, "bos_token_id": None, "eos_token_id": None, **ends}, dtype=dtype)
    # engines make the decoder alone, by AutoModel; save_pretrained adds the two other classes
    config.auto_map = {"AutoModel": f"{DiffLlamaV2Model.__module__.rsplit('.', 1)[-1]}.{DiffLlamaV2Model.__name__}"}
    with torch.device("meta"):
        llama = DiffLlamaV2ForCausalLM(config)
    if model.head is None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, assign=True)
    return llama


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a path, which is that file or its folder; FileNotFoundError if there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}: give a tokenizer.json, or a directory that holds one")
    return file


def fast_tokenizer(file: Path, vocab_size: int, max_length: int, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Return transformers' tokenizer of a tokenizer.json, for a model with these sizes; it pads at the left.

    Raises:
        ValueError: the file is not a tokenizer, has no token `eos`, or has more tokens than the model.
    """
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a file of the tokenizers library: {error}") from None
    eos = eos or find_end(vocabulary, read_config(file.parent)) or USUAL_ENDS[0]
    if eos not in vocabulary:
        raise ValueError(f"{file} has no token {eos!r} that ends a document: name the one that does with eos")
    if (size := max(vocabulary.values()) + 1) > vocab_size:
        raise ValueError(f"{file} has {size} tokens and the model {vocab_size}: give the model's own tokenizer")
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        eos_token=eos,
        pad_token=eos,
        padding_side="left",
        model_max_length=max_length,
        **text_settings(file.parent),
    )


def register() -> None:
    """Register the classes with transformers' Auto classes; importing this module calls it."""
    for auto, name in CLASSES.items():
        key = DiffTransformerConfig.model_type if auto == "AutoConfig" else DiffTransformerConfig
        getattr(transformers, auto).register(key, globals()[name], exist_ok=True)
    renaming = WeightRenaming(f"^{re.escape(_HEAD_IN_FILES)}", "lm_head.weight")
    register_checkpoint_conversion_mapping(DiffTransformerForCausalLM.__name__, [renaming], overwrite=True)


register()
