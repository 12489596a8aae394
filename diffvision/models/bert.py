"""transformers' BERT with attention that `diffvision.adapt` changed, as classes that its Auto classes load.

    model = diffvision.adapt(BertModel.from_pretrained(...), "v2")     an AdaptedBertModel from here on
    AutoModel.from_pretrained(FOLDER)                                  what `save_pretrained` or `adapt` wrote

Importing this module registers the classes. Each builds transformers' model and changes its attention, so a
configuration is BERT's and the method.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedModel,
)
from transformers.models.bert.modeling_bert import BertAttention, BertLayer, BertSelfAttention

from diffvision.nn import ATTENTION, AttentionLayer, build_attention
from diffvision.nn.linear import refuse_wrapped


class AdaptedSelfAttention(BertSelfAttention):
    """A layer of ours, with its output projection, in place of BERT's self-attention.

    It is a subclass for transformers' hooks, which record the maps of BERT's class; it has no weights but the layer's.

    Args:
        layer: the attention.
        config: of the model; with `attn_implementation="eager"` maps are computed and returned.
    """

    def __init__(self, layer: AttentionLayer, config: Any) -> None:
        nn.Module.__init__(self)
        self.attn, self.config = layer, config

    def forward(  # type: ignore[override]  # returns no map where it computes none
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, N, width], and with eager attention the map that weights the values [B, H, N, N]."""
        maps: list[Tensor] | None = [] if self.config._attn_implementation == "eager" else None
        return self.attn(hidden_states, attention_mask, maps=maps), maps[0] if maps else None


class AdaptedBertConfig(BertConfig):
    """BERT's configuration, and the method of `diffvision.adapt`."""

    model_type = "adapted_bert"
    method: str = "v2"


class _Adapted(PreTrainedModel):
    """What the classes below add to transformers'."""

    config_class = AdaptedBertConfig
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: AdaptedBertConfig, **settings: Any) -> None:
        if config.method not in ATTENTION:
            raise ValueError(f"method is {config.method!r}: choose one of {', '.join(ATTENTION)}")
        super().__init__(config, **settings)
        for depth, _, layer in unadapted_layers(self):
            put(layer.attention, ATTENTION[config.method].from_standard(standard_of(layer.attention), depth=depth))

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that a file lacks: ours as the layer does, transformers' as BERT does."""
        super()._init_weights(module)
        if isinstance(module, AttentionLayer):
            module.reset_parameters()


class AdaptedBertModel(_Adapted, BertModel):
    """BERT's encoder."""


class AdaptedBertForMaskedLM(_Adapted, BertForMaskedLM):
    """BERT with the head of its masked tokens."""


class AdaptedBertForSequenceClassification(_Adapted, BertForSequenceClassification):
    """Classifier of each row."""


class AdaptedBertForTokenClassification(_Adapted, BertForTokenClassification):
    """Classifier of each token."""


class AdaptedBertForQuestionAnswering(_Adapted, BertForQuestionAnswering):
    """Finds where an answer begins and ends."""


CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {
    BertModel: AdaptedBertModel,
    BertForMaskedLM: AdaptedBertForMaskedLM,
    BertForSequenceClassification: AdaptedBertForSequenceClassification,
    BertForTokenClassification: AdaptedBertForTokenClassification,
    BertForQuestionAnswering: AdaptedBertForQuestionAnswering,
}
"""transformers' class -> the class of its adapted models."""


def unadapted_layers(model: PreTrainedModel) -> list[tuple[int, str, BertLayer]]:
    """Return depth, name and layer of each block whose attention is BERT's."""
    return [
        (depth, name, layer)
        for depth, (name, layer) in enumerate(_layers(model))
        if not isinstance(layer.attention.self, AdaptedSelfAttention)
    ]


def standard_of(theirs: BertAttention) -> AttentionLayer:
    """Return BERT's attention with its output projection as a standard layer of ours; the weights are shared.

    Raises:
        ValueError: it is causal, or reads another sequence.
    """
    part, out = theirs.self, theirs.output.dense
    if theirs.is_cross_attention or part.is_causal:
        raise ValueError("a BERT that is a decoder cannot be made differential: adapt an encoder, is_decoder=False")
    refuse_wrapped(query=part.query, key=part.key, value=part.value, dense=out)
    layer = build_attention(
        "standard",
        part.query.in_features,
        part.num_attention_heads,
        head_dim=part.attention_head_size,
        qkv_bias=True,
        attn_drop=part.dropout.p,
        device="meta",
    )
    layer.q_proj.load_state_dict(part.query.state_dict(), assign=True)
    layer.k_proj.load_state_dict(part.key.state_dict(), assign=True)
    layer.v_proj.load_state_dict(part.value.state_dict(), assign=True)
    layer.proj.load_state_dict(out.state_dict(), assign=True)
    return layer


def put(theirs: BertAttention, layer: AttentionLayer) -> None:
    """Put a layer of ours in place of BERT's self-attention and output projection, with the hooks that are there."""
    adapted = AdaptedSelfAttention(layer.train(theirs.training), theirs.self.config)
    adapted._forward_hooks.update(theirs.self._forward_hooks)  # transformers' hooks record maps
    theirs.self = adapted
    setattr(theirs.output, "dense", nn.Identity())  # noqa: B010


def check_attention(model: PreTrainedModel) -> None:
    """Raise a ValueError where a model attends in a way that adapted layers have not."""
    if (how := model.config._attn_implementation) not in ("eager", "sdpa"):
        raise ValueError(f"{type(model).__name__} attends by {how!r}: call set_attn_implementation('sdpa') first")


def become_adapted(model: PreTrainedModel, method: str) -> None:
    """Make an adapted model one of the classes above, so that it is saved as what it is."""
    kind = CLASSES.get(type(model))
    if kind is None:
        return
    _set_config(model, AdaptedBertConfig, method=method)
    with torch.device("meta"):
        kind(model.config)  # transformers learns what a class can record when the first model of it is made
    model.__class__ = kind


def become_standard(model: PreTrainedModel) -> None:
    """Make an adapted model whose layers are standard ones again, as after `merge_dex`, one of transformers' classes.

    Raises:
        ValueError: a layer is differential.
    """
    kind = {adapted: plain for plain, adapted in CLASSES.items()}[type(model)]
    parts = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "proj": "output.dense"}
    for name, layer in _layers(model):
        ours: Any = layer.attention.self.attn
        if ours.variant != "standard":
            raise ValueError(f"{name} has attention of {ours.variant}, which BERT has not: merge it first")
        with torch.device("meta"):
            plain = BertAttention(model.config)
        for part, theirs in parts.items():
            plain.get_submodule(theirs).load_state_dict(getattr(ours, part).state_dict(), assign=True)
        plain.self._forward_hooks.update(layer.attention.self._forward_hooks)
        plain.train(layer.attention.training)
        layer.attention.self, layer.attention.output.dense = plain.self, plain.output.dense
    _set_config(model, BertConfig)
    model.__class__ = kind


def _set_config(model: PreTrainedModel, kind: type[BertConfig], **values: Any) -> None:
    """Give a model and its parts the same configuration as another class of configurations."""
    before = model.config
    shared = {name: value for name, value in before.to_dict().items() if name not in ("model_type", "method")}
    config = kind(**shared, **values)
    config._attn_implementation = before._attn_implementation
    for module in model.modules():
        if getattr(module, "config", None) is before:
            setattr(module, "config", config)  # noqa: B010  (a Module has no such attribute for mypy)


def _layers(model: PreTrainedModel) -> list[tuple[str, BertLayer]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BertLayer)]


def register() -> None:
    """Register the classes with transformers' Auto classes; importing this module calls it."""
    transformers.AutoConfig.register(AdaptedBertConfig.model_type, AdaptedBertConfig, exist_ok=True)
    for theirs, ours in CLASSES.items():
        auto = "AutoModel" + theirs.__name__.removeprefix("Bert").removeprefix("Model")
        getattr(transformers, auto).register(AdaptedBertConfig, ours, exist_ok=True)


register()
