"""Language models of every attention variant in lm-eval (lm-evaluation-harness), without conversion.

    python -m diffvision.evaluation.language.lm_eval --tasks hellaswag --model_args model=MODEL --model diffvision

This registers the model "diffvision" and runs lm-eval's own command; nothing of ours imports this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from diffvision.evaluation.distributed import resolve_device
from diffvision.evaluation.language.scoring import padded_batches
from diffvision.evaluation.output_files import bar
from diffvision.models.language.generation import generate
from diffvision.models.modes import evaluating
from diffvision.opening import open_model


@register_model("diffvision")
class DiffVisionLM(LM):
    """Scores and continues texts for lm-eval's tasks, tokenized as by its model "hf".

    Args:
        model: as in `open_model`.
        tokenizer: as in `open_model`.
        batch_size: texts in a batch.
        device: auto, cpu, cuda, cuda:1, ...
        **_: other arguments of lm-eval, which are ignored.

    Raises:
        ValueError: it is not one of our language models, or has no trained weights.
        FileNotFoundError: no such model, or no tokenizer.
    """

    def __init__(
        self, model: str, tokenizer: str | None = None, batch_size: int | str = 8, device: str | None = None, **_: Any
    ) -> None:
        super().__init__()
        opened = open_model(model, tokenizer=tokenizer, device=resolve_device(device or "auto")).for_text()
        if opened.library != "language":
            raise ValueError(f"{model} is a model of transformers: use lm-eval's --model hf")
        if opened.tokenizer is None:
            raise FileNotFoundError(f"no tokenizer.json next to {opened.weights}: give tokenizer=PATH")
        self._batch_size, self._tokenizer, self._device = int(batch_size), opened.tokenizer, opened.device
        self._model: Any = opened.module
        self._ends = opened.ends
        self._length: int = opened.config["max_length"]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether greedy decoding writes it."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            before = self._tokenizer.encode(context.rstrip())  # a space belongs to the word after it
            whole = self._tokenizer.encode(context + continuation)
            pairs.append((self._started(before), whole[len(before) :]))
        return self._score(pairs)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the model's max_length."""
        sums = []
        for (text,) in (request.args for request in requests):
            tokens = self._started([]) + self._tokenizer.encode(text)
            starts = range(1, len(tokens), self._length)
            ends = [min(start + self._length, len(tokens)) for start in starts]
            windows = [
                (tokens[max(0, end - self._length - 1) : start], tokens[start:end])
                for start, end in zip(starts, ends, strict=True)
            ]
            sums.append(sum(score for score, _ in self._score(windows)))
        return sums

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return a continuation of each context, cut before the strings that end it."""
        texts: list[str] = []
        for settings, group in itertools.groupby((one.args for one in requests), key=lambda args: args[1]):
            contexts = [context for context, _ in group]
            for start in bar(range(0, len(contexts), self._batch_size), "texts"):
                texts += self._continue(contexts[start : start + self._batch_size], settings)
        return texts

    def _started(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a context with their start token; of an empty one the end of the text before."""
        start = self._tokenizer.start_id
        return ([] if start is None else [start]) + tokens or [self._tokenizer.eos_id]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether each of its tokens is the likeliest."""
        counts = [len(continuation) for _, continuation in pairs]
        if wrong := [count for count in counts if not 1 <= count <= self._length]:
            raise ValueError(f"a continuation must have 1 to {self._length} tokens of its own, got {wrong[0]}")
        scores: list[Any] = [None] * len(pairs)
        rows = [(context + continuation)[-self._length - 1 :] for context, continuation in pairs]
        with evaluating(self._model):
            for numbers, tokens, lengths in bar([*padded_batches(rows, self._batch_size)], "likelihoods"):
                tokens = tokens.to(self._device)
                hidden = self._model.hidden(tokens[:, :-1])
                for row, (number, length) in enumerate(zip(numbers, lengths.tolist(), strict=True)):
                    first = length - counts[number]
                    targets = tokens[row, first:length, None]
                    logs = self._model.logits(hidden[row, first - 1 : length - 1]).log_softmax(-1)
                    greedy = bool((logs.argmax(-1, keepdim=True) == targets).all())
                    scores[number] = (logs.gather(-1, targets).sum().item(), greedy)
        return scores

    def _continue(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        """Return a batch's continuations under lm-eval's `gen_kwargs`."""
        limit = int(settings.get("max_gen_toks", settings.get("max_new_tokens", 256)))
        samples = settings.get("do_sample")
        temperature = 0.0 if samples is False else float(settings.get("temperature", 1 if samples else 0))
        until = settings.get("until") or []
        ends = [end for end in ([until] if isinstance(until, str) else until) if end]
        new: list[list[int]] = [[] for _ in contexts]

        def has_ended(row: int, token: int) -> bool:
            new[row].append(token)
            text = self._tokenizer.decode(new[row])
            return any(end in text for end in ends)

        rows = [self._started(self._tokenizer.encode(context)) for context in contexts]
        with evaluating(self._model):
            generate(
                self._model,
                [row[-max(1, self._length - limit) :] for row in rows],
                max_new_tokens=limit,
                temperature=temperature,
                top_k=settings.get("top_k") if temperature else None,
                top_p=settings.get("top_p") if temperature else None,
                stop=self._ends,
                vocab_size=self._tokenizer.vocab_size,
                on_token=has_ended,
            )
        texts = [self._tokenizer.decode(row) for row in new]
        for end in ends:
            texts = [text.partition(end)[0] for text in texts]
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
