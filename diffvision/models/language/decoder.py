"""The paper's decoder with any attention of `diffvision.nn.ATTENTION`."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffvision import ops
from diffvision.models.language.configuration import LanguageConfig
from diffvision.models.language.kv_cache import KVCache
from diffvision.nn import AttentionLayer, build_attention
from diffvision.nn.attention import Rotation
from diffvision.nn.linear import Linear, linear
from diffvision.nn.transformer import DecoderBlock, SwiGLU
from diffvision.ops.attention.document_masks import first_tokens, same_document


class Blocks(nn.ModuleList):
    """The blocks of a model, a module that torch.compile takes as a whole."""

    def forward(self, x: Tensor, mask: Any, rotation: Rotation, checkpointing: bool = False) -> Tensor:
        """Return the hidden states after all blocks, without a cache; their activations are recomputed if asked."""
        for block in self:
            if checkpointing:
                x = checkpoint(block, x, mask, True, rotation=rotation, use_reentrant=False)
            else:
                x = block(x, mask, True, rotation=rotation)
        return x


class LanguageModel(nn.Module):
    """Decoder of embedding, pre-norm blocks with rotary attention and SwiGLU, RMSNorm, output projection; no biases.

    Weights start as N(0, sqrt(2 / (5 dim))) (arXiv 1910.05895; 0.02 at a width of 1,000), the two projections back to
    the residual stream divided by sqrt(2 depth) (GPT-2), V1's lambda vectors as N(0, 0.1), norms as 1. The paper gives
    only the lambda vectors', and its code has no training: the rest is this repository's choice, one for all variants.

    Attributes:
        config: the settings of the model.
        grad_checkpointing: recompute each block's activations in the backward pass.

    Source: arXiv 2410.05258 section 2 and appendix D; microsoft/unilm Diff-Transformer.
    """

    def __init__(
        self,
        config: LanguageConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.grad_checkpointing = config, False
        self.embed = nn.Embedding(config.vocab_size, config.dim, **factory_kwargs)
        self.blocks = Blocks(
            DecoderBlock(
                build_attention(
                    layer.variant,
                    config.dim,
                    layer.num_heads,
                    layer.num_kv_heads,
                    head_dim=config.head_dim,
                    proj_bias=False,
                    rotary=config.rotary_theta,
                    depth=index,
                    lambda_init=config.lambda_init,
                    signal_ratio=config.signal_ratio,
                    gate=config.gate,
                    head_norm=layer.head_norm,
                    **factory_kwargs,
                ),
                config.dim,
                layer.mlp_dim,
                norm_eps=config.norm_eps,
                **factory_kwargs,
            )
            for index, layer in enumerate(config.layers())
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps, **factory_kwargs)
        self.head = None if config.tied else Linear(config.dim, config.vocab_size, bias=False, **factory_kwargs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all weights (see the class), also after `to_empty`."""
        std, std_back = initial_std(self.config)
        back = {id(part) for block in self.blocks for part in _residual_projections(block)}
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=std_back if id(module) in back else std)
            elif isinstance(module, nn.RMSNorm | AttentionLayer):
                module.reset_parameters()

    @property
    def head_weight(self) -> Float[Tensor, "vocab dim"]:
        """The output projection's weight [vocab, dim]: the embedding's, if tied.

        Raises:
            ValueError: an adapter is around it, which a product with the weight would leave out.
        """
        name, layer = ("head", self.head) if self.head is not None else ("embed", self.embed)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise ValueError(
                f"{name} is wrapped in {type(layer).__module__}.{type(layer).__name__}: merge it (PEFT: "
                "merge_and_unload), or exclude the output projection (exclude_modules)"
            )
        return layer.weight

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass, for a third more time and much less memory."""
        self.grad_checkpointing = enable

    def forward(
        self, tokens: Int[Tensor, "B N"], *, documents: Int[Tensor, "B N"] | ops.Documents | None = None
    ) -> Float[Tensor, "B N vocab"]:
        """Return the logits of each token's successor, float32 or better; the arguments are those of `hidden`."""
        return self.logits(self.hidden(tokens, documents=documents))

    def logits(self, hidden: Float[Tensor, "... dim"]) -> Float[Tensor, "... vocab"]:
        """Return the logits [..., vocab] of the result of `hidden`, float32 or better."""
        logits = linear(hidden, self.head_weight) if self.head is None else self.head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def hidden(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        documents: Int[Tensor, "B N"] | ops.Documents | None = None,
        cache: KVCache | None = None,
        padding: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """Return the input of the output projection [B, N, dim], after the final norm.

        Args:
            tokens: ids [B, N].
            documents: number of each token's document, which a row has one after another: a token attends to those
                before it of the same number, and positions count from each document's first. On
                CUDA give `ops.Documents`, since finding where numbers change waits for the device.
            cache: past tokens, which these follow; these are added to it.
            padding: [B] how many tokens at the left of each row are padding: no token attends to them, and positions
                count from behind them. With a cache it is the padding of the row that began in it.

        Raises:
            ValueError: there are more tokens than config.max_length or the cache's capacity, or documents with a cache.
        """
        start = 0 if cache is None else cache.position
        end = start + tokens.shape[1]
        if end > self.config.max_length:
            raise ValueError(f"tokens must be at most max_length ({self.config.max_length}), got {end}: shorten them")
        if documents is not None and cache is not None:
            raise ValueError("documents with a cache: generation continues one document; leave documents out")
        positions = torch.arange(start, end, device=tokens.device)
        mask: Any = None
        if isinstance(documents, Tensor) and documents.is_cuda and not torch.compiler.is_compiling():
            documents = ops.Documents(documents, ops.document_ends(documents))
        if documents is not None:
            numbers = documents.numbers if isinstance(documents, ops.Documents) else documents
            positions = positions - _document_starts(numbers)
            mask = documents if isinstance(documents, ops.Documents) else same_document(numbers)
        if padding is not None:
            mask = mask.mask() if isinstance(mask, ops.Documents) else mask
            slots = end if cache is None else cache.length + tokens.shape[1]
            empty = padding if cache is None or cache.empty is None else cache.empty
            real = (torch.arange(slots, device=tokens.device) >= empty[:, None])[:, None, None]
            mask = real if mask is None else mask & real
            if documents is None:
                positions = (positions - padding[:, None]).clamp(min=0)
        if positions.ndim == 2:  # they differ between rows
            positions = positions[:, None, None]
        rotation = ops.rotary_tables(positions, self.config.head_dim, self.config.rotary_theta)
        x = self.embed(tokens)
        if cache is None:
            x = self.blocks(x, mask, rotation, self.grad_checkpointing and self.training)
        else:
            for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
                x = block(x, mask, True, cache=layer_cache, rotation=rotation)
        return self.norm(x)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` rows of up to `capacity` tokens, on the model's device."""
        return KVCache(self.attention_layers(), batch, capacity)

    def attention_layers(self) -> list[AttentionLayer]:
        """Return the attention of each block, in order."""
        return [block.attn for block in self.blocks]  # type: ignore[misc]  # a ModuleList forgets what it holds

    def extra_repr(self) -> str:
        mixed = f", variant_by_layer={by_layer}" if (by_layer := self.config.variant_by_layer) else ""
        return f"variant={self.config.variant}{mixed}, max_length={self.config.max_length}, tied={self.config.tied}"


def _document_starts(documents: Int[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """Return the position in its row at which each token's document begins."""
    positions = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(first_tokens(documents), positions, 0).cummax(dim=1).values


def initial_std(config: LanguageConfig) -> tuple[float, float]:
    """Return the standard deviations of new weights, and of those that project back to the residual stream."""
    std = math.sqrt(2 / (5 * config.dim))
    return std, std / math.sqrt(2 * config.depth)


def _residual_projections(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    assert isinstance(block, DecoderBlock)
    assert isinstance(block.mlp, SwiGLU)
    return block.attn.proj, block.mlp.down
