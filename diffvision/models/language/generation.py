"""Text from a language model, token by token: prefill, then decoding with a cache.

Tokens go in and come out; the command `diffvision generate` has the tokenizer.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.kv_cache import KVCache


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen from its logits.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens; None for all.
        top_p: only the likeliest tokens that together reach this probability, after top_k; None for all.

    Raises:
        ValueError: a value is out of its range, or top_k or top_p is given with temperature 0, which draws no token.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all tokens, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, or None for all tokens, got {self.top_p}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ValueError("temperature must be above 0 with top_k or top_p, got 0, which draws no token")

    def probabilities(self, logits: Float[Tensor, "... vocab"]) -> Float[Tensor, "... vocab"]:
        """Return the probabilities that tokens are drawn with; temperature must be above 0."""
        least_divisor = torch.finfo(logits.dtype).tiny  # a smaller one is 0 where such numbers are flushed
        logits = logits - logits.amax(-1, keepdim=True)  # first, so that quotients can only overflow downwards
        logits = logits / max(self.temperature, least_divisor)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ranked, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
            over = ranked.cumsum(-1) - ranked >= self.top_p  # those before it reach top_p already
            logits = logits.masked_fill(over.scatter(-1, order, over), -torch.inf)
        return logits.softmax(-1)

    def choose(self, logits: Float[Tensor, "B vocab"], generator: torch.Generator | None = None) -> Int[Tensor, "B"]:
        """Return a token for each row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)


class Compression(Protocol):
    """The interface of what prunes the cache of a prompt, such as `diffvision.evaluation.language.pruning.Compress`."""

    def prefill(
        self, model: LanguageModel, tokens: Tensor, padding: Tensor | None, more: int
    ) -> tuple[Tensor, KVCache]:
        """Return `LanguageModel.hidden` of the prompts, and a cache of the kept tokens with room for `more` others.

        The tokens are [B, N], padded on the left by `padding` [B], or None.
        """


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | Int[Tensor, "B N"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    compress: Compression | None = None,
) -> list[list[int]]:
    """Continue each prompt, all in one batch; variants that cannot use a cache compute the whole sequence each time.

    Args:
        model: the model; its mode is not changed (call `eval()` first).
        prompts: ids of each prompt, of any lengths, or [B, N].
        max_new_tokens: most tokens for each.
        temperature: as in `Sampling`.
        top_k: as in `Sampling`.
        top_p: as in `Sampling`.
        stop: tokens that end a continuation; they are not part of it.
        vocab_size: only tokens below it are generated: set it to the tokenizer's if the model's is rounded up.
        generator: for the draws, on the model's device; torch's default if None. A GPU may draw a few more tokens than
            are returned.
        on_token: called with (index of the prompt, token) for each new token, for streaming; True ends the prompt's
            continuation after this token.
        compress: prunes the prompts' cache before the first new token, such as `Compress("diff", ratio=0.5)` of
            `evaluation.language.pruning`; what is generated is never pruned.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: there is no prompt, one is empty or has tokens outside of the vocabulary, prompt and new tokens
            exceed the model's max_length, vocab_size exceeds the model's, `Sampling` refuses a value, or `compress`
            cannot prune the model.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = _rows(prompts)
    _check(model, rows, max_new_tokens, vocab_size)
    device = model.embed.weight.device
    tokens, padding = _left_padded(rows, device)
    length = tokens.shape[1]
    end = length + max_new_tokens

    past: KVCache | None = None
    if compress is None:
        if all(layer.cacheable for layer in model.attention_layers()):
            past = model.new_cache(len(rows), end)
        hidden = model.hidden(tokens, cache=past, padding=padding)
    else:
        hidden, past = compress.prefill(model, tokens, padding, max_new_tokens)
    read_every = 1 if on_token is not None else _tokens_between_reads(device)
    unread: list[Tensor] = []
    new: list[list[int]] = [[] for _ in rows]
    running = set(range(len(rows)))
    for position in range(length, end):
        chosen = sampling.choose(model.logits(hidden[:, -1])[:, :vocab_size], generator)
        unread.append(chosen)
        if len(unread) == read_every or position == end - 1:
            for step in torch.stack(unread).tolist():
                _add_tokens(step, new, running, stop, on_token)
            unread.clear()
        if not running or position == end - 1:
            break
        if past is None:
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
            hidden = model.hidden(tokens, padding=padding)
        else:
            hidden = model.hidden(chosen[:, None], cache=past, padding=padding)
    return new


def _tokens_between_reads(device: torch.device) -> int:
    """Return after how many tokens it is read whether all rows have ended; each time a GPU is waited for."""
    return 1 if device.type == "cpu" else 8


def _add_tokens(
    tokens: list[int],
    new: list[list[int]],
    running: set[int],
    stop: Collection[int],
    on_token: Callable[[int, int], bool | None] | None,
) -> None:
    """Add a step's tokens to the prompts that still run, and remove those that stop."""
    for index in sorted(running):
        token = tokens[index]
        if token in stop:
            running.discard(index)
            continue
        new[index].append(token)
        if on_token is not None and on_token(index, token):
            running.discard(index)


def _rows(prompts: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Return the ids of each prompt."""
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point():
            raise ValueError(f"prompts must be whole numbers [B, N], got {list(prompts.shape)} of {prompts.dtype}")
        return prompts.tolist()
    if any(isinstance(row, int) for row in prompts):
        raise ValueError("prompts must be lists of ids, got ids: give one prompt as [prompt]")
    return [[int(token) for token in row] for row in prompts]


def _check(model: LanguageModel, rows: list[list[int]], max_new_tokens: int, vocab_size: int | None) -> None:
    """Refuse prompts that are empty, too long, or not of this vocabulary."""
    config = model.config
    if vocab_size is not None and not 1 <= vocab_size <= config.vocab_size:
        raise ValueError(f"vocab_size must be 1 to the model's {config.vocab_size}, or None, got {vocab_size}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not rows or not all(rows):
        raise ValueError("prompts must have at least one prompt, each of at least one token, such as the end token")
    if (total := max(map(len, rows)) + max_new_tokens) > config.max_length:
        raise ValueError(
            f"prompt and new tokens must be at most max_length ({config.max_length}), got {total}: shorten the prompt "
            "or lower max_new_tokens"
        )
    if wrong := [token for row in rows for token in row if not 0 <= token < config.vocab_size]:
        raise ValueError(f"tokens must be 0 to {config.vocab_size - 1}, the model's vocabulary, got {wrong[0]}")


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return tokens [B, N] that end together, and the padding [B] at their left; None if there is none."""
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    tokens = torch.tensor([[0] * pad + row for pad, row in zip(padding, rows, strict=True)], device=device)
    return tokens, torch.tensor(padding, device=device) if any(padding) else None
