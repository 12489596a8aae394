"""Pruning the KV cache of a prompt: scores of its tokens, a cache of the best ones, and the same computed by masks.

All maps and heads that read a key/value head keep the same tokens, because a token's keys of both maps and its value
are dropped together. After pruning, each softmax runs over the remaining tokens. `cache_pruning` measures the cost.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffvision.analysis.capture import Call, Scores, captured
from diffvision.models.language.decoder import LanguageModel
from diffvision.models.language.kv_cache import KVCache
from diffvision.nn import AttentionLayer

SINKS = 4  # first tokens that `window` keeps
POOLED = 5  # neighbours whose scores are averaged, as SnapKV does


class Method(NamedTuple):
    """One way to score the tokens of a prompt.

    Attributes:
        weights: what is averaged over the observed queries, [B, H, Q, N] from their scores; None where no query is
            read.
        observed: which queries are read: the "window" at the prompt's end, "all", or the "last".
        pooled: whether a token's score is the mean of its neighbourhood.
        differential: whether it reads the two maps of a differential layer.
    """

    weights: Callable[[Scores], Tensor] | None = None
    observed: str = "window"
    pooled: bool = True
    differential: bool = False


def _mean_of_maps(scores: Scores) -> Tensor:
    """Return the mean of a head's maps, for methods made for plain attention."""
    return scores.maps().mean(dim=2)


def _difference(scores: Scores) -> Tensor:
    return scores.compute_weights().abs()


METHODS = {
    "window": Method(),
    "random": Method(),
    "knorm": Method(),
    "h2o": Method(_mean_of_maps, observed="all", pooled=False),
    "snap": Method(_mean_of_maps),
    "tova": Method(_mean_of_maps, observed="last", pooled=False),
    "diff": Method(_difference, differential=True),
}


class Prompts(NamedTuple):
    """Where each row's prompt lies among its tokens, and how much of it is kept.

    Attributes:
        start: [B] its first token.
        stop: [B] where it ends.
        budget: [B] how many of its tokens are kept.
        recent: [B] how many of its last tokens are kept whatever their score.
    """

    start: Tensor
    stop: Tensor
    budget: Tensor
    recent: Tensor


@dataclass(frozen=True)
class Compress:
    """Prunes the cache of a prompt to the tokens that score highest; for `generate` and `pruned_attention`.

    Of a prompt of n tokens ceil((1 - ratio) n) are kept in each layer and key/value head, by the mean over the query
    heads that read it:

    - "window": the first four and the last (StreamingLLM, arXiv 2309.17453); "random": any;
    - "knorm": those with the smallest keys, of both maps together (arXiv 2406.11430);
    - "h2o": those with the most attention of all queries that may see them (arXiv 2306.14048);
    - "snap": of the last queries, each token with its four neighbours (arXiv 2404.14469);
    - "tova": of the last query, by the mean over all heads of a layer (arXiv 2401.06104);
    - "diff": as "snap", by the size of what multiplies the values, abs(map 1 - lambda map 2).

    In differential layers "h2o", "snap" and "tova" read the mean of a head's two maps.

    Args:
        method: a name in `METHODS`.
        ratio: share of the prompt's tokens that are dropped, 0 to below 1.
        window: the last tokens, which are kept by every method, but no more of them than half of what is kept; "snap"
            and those like it read their queries.
        seed: of "random".

    Raises:
        ValueError: an unknown method, or a ratio or window out of its range.
    """

    method: str = "snap"
    ratio: float = 0.5
    window: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r} of pruning: choose one of {', '.join(METHODS)}")
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio, the share of the prompt to drop, must be 0 to below 1, got {self.ratio}")
        method = METHODS[self.method]
        least = int(method.weights is not None and method.observed == "window")
        if self.window < least:
            raise ValueError(f"window must be at least {least} for {self.method}, got {self.window}")

    def count(self, tokens: int) -> int:
        """Return how many of a prompt's tokens are kept."""
        return max(1, tokens - math.floor(round(self.ratio * tokens, 9)))  # rounded, since 0.29 * 100 is below 29

    @torch.no_grad()
    def prefill(
        self, model: LanguageModel, tokens: Tensor, padding: Tensor | None, more: int
    ) -> tuple[Tensor, KVCache]:
        """Return `LanguageModel.hidden` of the prompts, and a cache of the tokens that are kept.

        Arguments are those of `diffvision.models.language.generation.Compression`.

        Raises:
            ValueError: the model is plain and the method reads two maps.
        """
        batch, length = tokens.shape
        cache = model.new_cache(batch, length)
        stop = torch.full((batch,), length, device=tokens.device)
        start = torch.zeros_like(stop) if padding is None else padding
        generator = torch.Generator().manual_seed(self.seed)
        keeps: list[Tensor] = []
        with captured(model, lambda call: keeps.append(self.select_tokens(call, start, stop, generator))):
            hidden = model.hidden(tokens, cache=cache, padding=padding)
        budget = self._prompts(start, stop).budget
        count = int(budget.max())
        # Kept tokens in their order at the right; at the left of shorter prompts, slots that are masked.
        indices = [keep.byte().argsort(dim=-1, stable=True)[..., -count:] for keep in keeps]
        cache.keep(indices, count + more, None if padding is None else count - budget)
        return hidden, cache

    def select_tokens(
        self, call: Call, start: Int[Tensor, "B"], stop: Int[Tensor, "B"], generator: torch.Generator | None = None
    ) -> Bool[Tensor, "B Hk N"]:
        """Return which tokens a layer keeps of each row's prompt, the tokens from `start` to before `stop`.

        Args:
            call: of the layer, whose queries and keys are of the same tokens, from the row's first on.
            start: [B].
            stop: [B].
            generator: of "random", on the CPU; by default a new one with the seed.

        Returns:
            [B, Hk, N] up to the last prompt's end; False outside of the prompt.

        Raises:
            ValueError: the layer does not have what the method reads, or its past is not in keys and values.
        """
        method = METHODS[self.method]
        if isinstance(call.layer, AttentionLayer):
            call.layer.check_cacheable()
        if method.differential and call.lam is None:
            raise ValueError(
                f"{self.method} reads the two maps of a differential layer, and {call.name} has one: choose one of "
                f"{', '.join(plain_methods())}"
            )
        prompts = self._prompts(start, stop)
        position = torch.arange(int(stop.max()), device=call.k.device)
        recent = position >= (stop - prompts.recent)[:, None]
        real = (position >= start[:, None]) & (position < stop[:, None])
        if method.weights is None:
            generator = generator or torch.Generator().manual_seed(self.seed)
            scores = self._score_without_queries(call, prompts, position, generator)
        else:
            scores = self._score_by_queries(call, prompts, recent, method)
        scores = scores.masked_fill(recent[:, None], torch.inf).masked_fill(~real[:, None], -torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, position.expand_as(order))
        return rank < prompts.budget[:, None, None]

    def _prompts(self, start: Tensor, stop: Tensor) -> Prompts:
        counts = (stop - start).tolist()
        budget = torch.tensor([self.count(tokens) for tokens in counts], device=stop.device)
        return Prompts(start, stop, budget, (budget // 2).clamp(max=self.window))

    def _score_without_queries(
        self, call: Call, prompts: Prompts, position: Tensor, generator: torch.Generator
    ) -> Float[Tensor, "B Hk N"]:
        """Return scores, of which the highest are kept, by the methods that read no queries."""
        batch, heads = call.q.shape[0], _count_kv_heads(call)
        if self.method == "knorm":
            keys = call.k[..., : len(position), :]
            return _mean_over_groups(-keys.float().square().sum(dim=(2, 4)).sqrt(), heads)
        if self.method == "random":
            return torch.rand(batch, heads, len(position), generator=generator).to(position.device)
        offset = position - prompts.start[:, None]
        scores = torch.where((offset >= 0) & (offset < SINKS), len(position), offset)
        return scores[:, None].expand(-1, heads, -1).float()

    def _score_by_queries(
        self, call: Call, prompts: Prompts, recent: Tensor, method: Method
    ) -> Float[Tensor, "B Hk N"]:
        """Return scores, of which the highest are kept, by the attention that a method's queries give each key."""
        assert method.weights is not None
        longest = int((prompts.stop - prompts.start).max())
        count = {"window": min(self.window, longest), "all": longest, "last": 1}[method.observed]
        scores = _scores_of_last(call, prompts, count)
        weights = method.weights(scores)
        seen = scores.allowed.sum(dim=-2).clamp(min=1).squeeze(2)  # [B, 1 or H, N] queries that see a key
        mean = weights.sum(dim=-2) / seen
        if method.observed == "last":
            mean = mean.mean(dim=1, keepdim=True).expand_as(mean)
        if method.pooled:  # what is kept anyway lends nothing to its neighbours
            mean = F.avg_pool1d(mean.masked_fill(recent[:, None], 0), POOLED, stride=1, padding=POOLED // 2)
        return _mean_over_groups(mean, _count_kv_heads(call))


def plain_methods() -> list[str]:
    """Return the methods that any model can have: they do not read two maps."""
    return [name for name, method in METHODS.items() if not method.differential]


@contextmanager
def pruned_attention(model: nn.Module, compress: Compress, prompts: Int[Tensor, "B"]) -> Iterator[None]:
    """Within the block, let tokens after a prompt attend only to its kept tokens and to each other.

    This computes what a pruned cache does, for whole rows and any model, and saves no memory.

    Args:
        model: a model as `analysis.capture.captured` takes it, which reads rows of B sequences from their first token
            on, padded on the right if at all.
        compress: what is kept.
        prompts: [B] the number of tokens in each row's prompt.

    Raises:
        ValueError: as `Compress.select_tokens`.
    """
    generator = torch.Generator().manual_seed(compress.seed)

    def see(call: Call) -> Scores:
        keep = compress.select_tokens(call, torch.zeros_like(prompts), prompts, generator)
        scores = call.scores()
        _, heads, _, queries, keys = scores.logits.shape
        position = torch.arange(keys, device=prompts.device)
        behind = position >= prompts[:, None]  # [B, N]
        visible = F.pad(keep, (0, keys - keep.shape[-1])) | behind[:, None]
        visible = visible.repeat_interleave(heads // keep.shape[1], dim=1)[:, :, None, None]
        return scores._replace(allowed=scores.allowed & (visible | ~behind[:, None, None, -queries:, None]))

    with captured(model, see):
        yield


def _count_kv_heads(call: Call) -> int:
    """Return the number of key/value heads; transformers' keys are captured repeated for each head."""
    return max(1, call.k.shape[1] // getattr(call.layer, "num_key_value_groups", 1))


def _mean_over_groups(scores: Float[Tensor, "B H N"], heads: int) -> Float[Tensor, "B Hk N"]:
    """Return the mean over the heads that read a key/value head."""
    return scores.unflatten(1, (heads, -1)).mean(dim=2)


def _scores_of_last(call: Call, prompts: Prompts, count: int) -> Scores:
    """Return the scores of the last `count` queries of each row's prompt, over the keys up to the last prompt's end.

    Queries that a shorter prompt does not have may attend to nothing, and so have maps of zeros.
    """
    keys = int(prompts.stop.max())
    query = prompts.stop[:, None] - count + torch.arange(count, device=prompts.stop.device)  # [B, Q]
    position = torch.arange(keys, device=query.device)
    allowed = (position >= prompts.start[:, None, None]) & (position <= query[..., None])
    row = query.clamp(min=0)[:, None, :, None]  # [B, 1, Q, 1]

    def rows_of(tensor: Tensor) -> Tensor:  # [B or 1, H, M, ...] -> [B, H, Q, ...]
        whole = tensor.expand(len(query), -1, -1, -1)
        return whole.gather(2, row.expand(-1, whole.shape[1], -1, whole.shape[3]))

    mask = allowed[:, None]
    if call.mask is not None:
        given = call.mask.reshape((1,) * (4 - call.mask.dim()) + call.mask.shape)[..., :keys]
        mask = mask & (rows_of(given) if given.shape[2] > 1 else given)
    lam = call.lam
    if lam is not None and lam.shape[2] > 1:
        lam = rows_of(lam)
    q = rows_of(call.q.flatten(1, 2)).unflatten(1, call.q.shape[1:3])
    k = call.k[..., :keys, :]
    return dataclasses.replace(call, q=q, k=k, lam=lam, mask=mask, is_causal=False).scores()
