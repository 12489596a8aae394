"""The blind baseline of composition: how likely a language model finds captions, which it reads without the images.

Sets whose wrong captions are less plausible than the right ones are solved in this way, without looking (Hsieh et al.
2023, SugarCrepe, arXiv 2306.14610; Lin et al. 2024, arXiv 2306.01879).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffvision.evaluation.cache import Cache, Rows, digest, in_pieces, join_rows, model_digest
from diffvision.evaluation.distributed import gather_rows, rank_and_world
from diffvision.evaluation.language.needle import start_tokens
from diffvision.evaluation.language.perplexity import perplexity_samples
from diffvision.evaluation.language.scoring import device_of
from diffvision.opening import Model

BATCHES = 64  # of a piece of the cache
WINDOW = 512  # tokens that are read at a time; few captions have more
PROBE = "A probe: 1 2 3, Größe 你好 🙂"  # distinguishes tokenizers


class Blind:
    """A language model that scores captions; each caption is scored once, whatever the number of evaluations.

    Args:
        model: a language model with its tokenizer.
        batch_size: captions that are read together.
        progress: wraps an iterable in a progress bar, given also its description; None for silence.
        cache: keeps scores, those too of an evaluation that is ended.

    Raises:
        ValueError: an image model, one with new weights, or one without a tokenizer.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int = 16,
        progress: Callable[[Any, str], Iterable] | None = None,
        cache: Cache | None = None,
    ) -> None:
        if not model.is_language or model.weights is None:
            fault = "has new weights" if model.is_language else "is a model of images"
            raise ValueError(
                f"{model.name} {fault}: --blind takes a trained language model, such as a run's folder or .ckpt file, "
                "or a folder of transformers"
            )
        self.model = model
        if model.tokenizer is None:
            raise ValueError(
                f"blind is {model.name}, which came without a tokenizer: put its tokenizer.json next to it"
            )
        self.batch_size, self.cache = batch_size, cache
        self.progress = progress or (lambda batches, description: batches)
        self._known: dict[str, float] = {}

    def log_likelihoods(self, texts: Sequence[str]) -> Tensor:
        """Return the mean log-likelihood of a token of each text, in nats, float64 [T]; a blank text has -inf.

        The mean, so that a caption is not the likelier for being the shorter. A text begins after the tokenizer's start
        token. With several ranks each scores a share; all must call this together, with the same texts.
        """
        unknown = [text for text in dict.fromkeys(texts) if text not in self._known]
        rank, world = rank_and_world()
        start, stop = (len(unknown) * r // world for r in (rank, rank + 1))
        batches = [unknown[first : min(first + self.batch_size, stop)] for first in range(start, stop, self.batch_size)]

        def scored(numbers: Sequence[int]) -> Iterator[tuple[Rows, None]]:
            for number in self.progress(numbers, "captions without images"):
                yield {"scores": self._scores(batches[number])}, None

        identity = digest(model=self._identity, batch_size=self.batch_size, texts=batches) if self.cache else ""
        pieces = in_pieces(self.cache, identity, len(batches), BATCHES, scored, f"rank{rank}-of-{world}-")
        rows = join_rows([rows for rows, _ in pieces])
        scores = gather_rows(rows.get("scores"), device_of(self.model.module), torch.float64)
        self._known |= dict(zip(unknown, scores.tolist(), strict=True))
        return torch.tensor([self._known[text] for text in texts], dtype=torch.float64)

    def _scores(self, texts: Sequence[str]) -> Tensor:
        """Return the mean log-likelihood a token of each text, without its image."""
        tokenizer: Any = self.model.tokenizer
        begin = start_tokens(tokenizer)
        documents = [torch.tensor([*begin, *tokenizer.encode(text)], dtype=torch.int64) for text in texts]
        scores = torch.full((len(texts),), -torch.inf, dtype=torch.float64)
        if all(len(document) < 2 for document in documents):
            return scores
        losses = perplexity_samples(
            self.model.module, documents, window=min(self.model.max_length or WINDOW, WINDOW), batch_size=len(documents)
        )["nll"]
        assert losses.weights is not None
        total = torch.zeros(len(texts), dtype=torch.float64).index_add(0, losses.units, losses.values)
        count = losses.weights.new_zeros(len(texts)).index_add(0, losses.units, losses.weights)
        return torch.where(count > 0, -total / count, scores)

    @cached_property
    def _identity(self) -> list[Any]:
        """Return what scores depend on, besides the texts."""
        tokenizer: Any = self.model.tokenizer
        device = str(device_of(self.model.module))
        return [model_digest(self.model.module), tokenizer.encode(PROBE), start_tokens(tokenizer), device]
