"""Greedy answers to prompts, of our models and of transformers', row by row in a file from which a run resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diffvision.evaluation.language.scoring import Progress, unseen
from diffvision.evaluation.records import Records, fingerprint
from diffvision.models.language.generation import generate
from diffvision.models.modes import evaluating
from diffvision.opening import Model

StoppedBy = Literal["end", "stop", "length"]
"""What ended an output: the token that ends a document, a stop string, or the limit of new tokens."""


@dataclass(frozen=True)
class Prompt:
    """What a model continues.

    Attributes:
        id: of the row, unique.
        tokens: the prompt, start token included.
        cut: what was left out so that the model can read the prompt: tokens of a document, or examples.
    """

    id: str
    tokens: list[int]
    cut: int = 0


@dataclass(frozen=True)
class Generation:
    """What a model wrote after a prompt.

    Attributes:
        id: of the prompt.
        output: the text, up to the stop string.
        tokens: how many were generated, those of a stop string included.
        cut: as in `Prompt`.
        stopped_by: what ended it.
    """

    id: str
    output: str
    tokens: int
    cut: int
    stopped_by: StoppedBy


def generate_rows(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stops: Sequence[str] = (),
    file: Path | None = None,
    settings: Any = None,
    batch_size: int = 8,
    progress: Progress = unseen,
) -> list[Generation]:
    """Return the greedy continuation of each prompt, in their order; what the file has is not generated again.

    Args:
        model: with its tokenizer.
        prompts: each with room for the new tokens (see `room_for`).
        max_new_tokens: most tokens of an output.
        stops: strings that end an output; they are not part of it.
        file: JSON lines of what was generated, appended batch by batch; None for no file.
        settings: what the outputs depend on besides prompt and stops, such as a digest of the model; a file of others
            is refused.
        batch_size: prompts at a time; those of one length are together.

    Raises:
        ValueError: no tokenizer; two prompts of one id; a file of other prompts or settings.
    """
    tokenizer_of(model)
    check_unique([prompt.id for prompt in prompts])
    records = Records(file, {"max_new_tokens": max_new_tokens, "stops": list(stops), "settings": settings})
    inputs = {prompt.id: fingerprint(prompt.tokens) for prompt in prompts}
    missing = [prompt for prompt in prompts if records.get(prompt.id, inputs[prompt.id]) is None]
    missing.sort(key=lambda prompt: -len(prompt.tokens))
    batches = [missing[start : start + batch_size] for start in range(0, len(missing), batch_size)]
    with evaluating(model.module):
        for batch in progress(batches, "answers"):
            tokens = continued(model, [prompt.tokens for prompt in batch], max_new_tokens=max_new_tokens, stops=stops)
            rows = [_row(prompt, new, model.tokenizer, stops, max_new_tokens)
                    for prompt, new in zip(batch, tokens, strict=True)]  # fmt: skip
            records.add([(prompt.id, inputs[prompt.id], row) for prompt, row in zip(batch, rows, strict=True)])
    return [_generation(records, prompt.id, inputs[prompt.id]) for prompt in prompts]


def tokenizer_of(model: Model) -> Any:
    """Return a model's tokenizer; ValueError if it came without one."""
    if model.tokenizer is None:
        raise ValueError(f"{model.name} came without a tokenizer: give one, such as a tokenizer.json")
    return model.tokenizer


def check_unique(ids: Sequence[str]) -> None:
    """Raise a ValueError that names an id which two rows have."""
    if len(set(ids)) < len(ids):
        again = next(id for number, id in enumerate(ids) if id in ids[:number])
        raise ValueError(f"two rows have the id {again!r}: give each its own")


def room_for(model: Model, max_new_tokens: int) -> int | None:
    """Return the most tokens that a prompt may have; None where the model does not say.

    Raises:
        ValueError: the model reads no more than the new tokens.
    """
    if model.max_length is None:
        return None
    if max_new_tokens >= model.max_length:
        raise ValueError(
            f"new_tokens is {max_new_tokens}, and {model.name} reads {model.max_length} tokens in all: give fewer new "
            "ones"
        )
    return model.max_length - max_new_tokens


def continued(
    model: Model, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stops: Sequence[str] = ()
) -> list[list[int]]:
    """Return the new tokens of each prompt, greedily and in one batch, up to a stop string or the end of the text."""
    tokenizer = model.tokenizer

    def is_stopped(new: Sequence[int]) -> bool:
        return bool(stops) and stop_at(tokenizer.decode(list(new)), stops) is not None

    module: Any = model.module
    if model.host != "language":
        return _continue_by_transformers(module, tokenizer, prompts, max_new_tokens, is_stopped)
    new: list[list[int]] = [[] for _ in prompts]

    def on_token(index: int, token: int) -> bool:
        new[index].append(token)
        return is_stopped(new[index])

    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "vocab_size": tokenizer.vocab_size}
    return generate(module, prompts, stop=ends, on_token=on_token, **limits)


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string in a text begins; None if it has none."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=None)


def _continue_by_transformers(
    module: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    is_stopped: Callable[[Sequence[int]], bool],
) -> list[list[int]]:
    """Return new tokens by transformers' `generate`, prompts padded on the left."""
    from transformers import GenerationConfig, StoppingCriteriaList

    longest = max(map(len, prompts))
    pad = tokenizer.eos_id or 0
    tokens = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=module.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=module.device)

    lengths: dict[int, int] = {}  # of outputs with a stop string, which are filled up afterwards

    def stopped(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
        for index, row in enumerate(sequences[:, longest:].tolist()):
            if index not in lengths and is_stopped(row):
                lengths[index] = len(row)
        return torch.tensor([index in lengths for index in range(len(sequences))], device=sequences.device)

    default = getattr(module, "generation_config", None)
    ends = getattr(default, "eos_token_id", None)
    ends = {tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
    )
    module.generation_config = GenerationConfig()  # a model's own sampling would be merged with ours
    try:
        out = module.generate(
            tokens, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([stopped])
        )
    finally:
        module.generation_config = default
    new = [row[: lengths.get(index)] for index, row in enumerate(out[:, longest:].tolist())]
    return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in new]


def _row(prompt: Prompt, new: list[int], tokenizer: Any, stops: Sequence[str], max_new_tokens: int) -> dict[str, Any]:
    text = tokenizer.decode(new)
    stop = stop_at(text, stops)
    stopped_by: StoppedBy = "stop" if stop is not None else "length" if len(new) == max_new_tokens else "end"
    return {"output": text[:stop], "tokens": len(new), "cut": prompt.cut, "stopped_by": stopped_by}


def _generation(records: Records, id: str, of: str) -> Generation:
    row = records.get(id, of)
    assert row is not None
    return Generation(id, row["output"], row["tokens"], row["cut"], row["stopped_by"])
