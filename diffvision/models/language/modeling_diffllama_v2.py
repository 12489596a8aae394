"""DIFF V2 in a Llama, as transformers and the engines that take its models call one.

`diffvision export` copies this file next to the weights, so that a program without diffvision loads the folder with
`trust_remote_code=True`: it needs torch and transformers alone. To a cache or an attention kernel a layer is
grouped-query attention: H heads of DIFF V2 are 2H query heads over the key/value heads of the matched Llama, and the
difference is taken of what the kernel returns:

    out[2h] - sigmoid(lambda_proj(x))[h] * out[2h + 1]

Source: microsoft/unilm Diff-Transformer/Diff-Transformer-V2; transformers models/llama/modeling_llama.py, whose classes
these extend.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class DiffLlamaV2Config(LlamaConfig):
    """Llama's configuration; `num_attention_heads` counts query heads, two of each head of DIFF V2.

    Without `num_key_value_heads` there is one for each head.
    """

    model_type = "diffllama_v2"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **LlamaConfig.base_model_tp_plan,
        "layers.*.self_attn.lambda_proj": "colwise",
    }

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:  # Llama's default is as many as query heads
            self.num_key_value_heads = self.num_attention_heads // 2
        super().__post_init__(**kwargs)
        self.validate_architecture()  # a subclass's is not called

    def validate(self) -> None:
        """Call this class's checks: transformers calls Llama's, which refuse widths that 2H does not divide."""
        for check in getattr(type(self), "__class_validators__", ()):  # transformers before 5.3 may have none
            getattr(self, check.__name__)()

    def validate_architecture(self) -> None:
        """Raise a ValueError if the two queries of a head would not read the same key/value head."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 1
        if heads % (2 * kv_heads):
            raise ValueError(
                f"num_attention_heads is {heads}: it must be a multiple of {2 * kv_heads}, two queries of a head for "
                f"each of num_key_value_heads={kv_heads}"
            )


class DiffLlamaV2Attention(LlamaAttention):
    """Llama's attention with a difference of each two neighbouring heads."""

    def __init__(self, config: DiffLlamaV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads // 2
        self.lambda_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(  # type: ignore[override]  # arguments of kernels pass through
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, N, hidden_size], and the 2H softmax maps [B, 2H, N, L] where the kernel gives them."""
        shape = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            # transformers before 5.3 has static caches that must be handed the positions to write at
            k, v = past_key_values.update(k, v, self.layer_idx, {"cache_position": kwargs.get("cache_position")})
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, maps = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        out = out.reshape(*shape, -1, 2, self.head_dim)  # some engines return [tokens, 2H D]
        lam = self.lambda_proj(hidden_states).float().sigmoid().to(out.dtype)
        return self.o_proj((out[..., 0, :] - lam[..., None] * out[..., 1, :]).flatten(-2)), maps


class DiffLlamaV2DecoderLayer(LlamaDecoderLayer):
    """Llama's block with this attention."""

    def __init__(self, config: DiffLlamaV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DiffLlamaV2Attention(config, layer_idx)


class DiffLlamaV2PreTrainedModel(LlamaPreTrainedModel):
    """Base of the two models."""

    config_class = DiffLlamaV2Config
    _no_split_modules = ["DiffLlamaV2DecoderLayer"]  # noqa: RUF012  (as the base class has it)
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DiffLlamaV2DecoderLayer,
        "attentions": DiffLlamaV2Attention,
    }


class DiffLlamaV2Model(DiffLlamaV2PreTrainedModel, LlamaModel):
    """The decoder without its output projection."""

    def __init__(self, config: DiffLlamaV2Config) -> None:
        PreTrainedModel.__init__(self, config)  # LlamaModel's would make layers of Llama's
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DiffLlamaV2DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DiffLlamaV2ForCausalLM(DiffLlamaV2PreTrainedModel, LlamaForCausalLM, GenerationMixin):
    """The causal language model; `forward` is `LlamaForCausalLM.forward`."""

    def __init__(self, config: DiffLlamaV2Config) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = DiffLlamaV2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(DiffLlamaV2Config.model_type, DiffLlamaV2Config, exist_ok=True)
AutoModel.register(DiffLlamaV2Config, DiffLlamaV2Model, exist_ok=True)
AutoModelForCausalLM.register(DiffLlamaV2Config, DiffLlamaV2ForCausalLM, exist_ok=True)
DiffLlamaV2Config.register_for_auto_class()
DiffLlamaV2Model.register_for_auto_class("AutoModel")
DiffLlamaV2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
