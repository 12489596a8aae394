"""A vision-language model's answer to a question, and where in the images it looked for each word of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffvision.analysis.capture import Call, captured
from diffvision.analysis.maps import compute_layer_maps
from diffvision.evaluation.vision_language.answers import generate_tokens
from diffvision.inspection.inputs import Picture, TransformedPicture
from diffvision.models.modes import evaluating

MOST_TOKENS = 48  # of an answer


class Answer(NamedTuple):
    """An answer, and the maps of the tokens that predict its words: means over layers, heads and a word's tokens."""

    question: str
    words: list[str]
    images: dict[str, TransformedPicture]  # by title, as the model gets them
    maps: dict[str, Tensor]  # by kind, [words, images, rows, columns]


@torch.no_grad()
def inspect_answer(vlm: Any, pictures: Sequence[Picture], question: str, layers: Sequence[int] | None = None) -> Answer:
    """Return the greedy answer of an image-text-to-text model of transformers, ours among them.

    Raises:
        ValueError: as `generate_tokens`; an image is not one grid of tokens, or a layer does not exist.
    """
    model, processor, count = vlm.module, vlm.processor, len(pictures)
    asked = [(question, [one.image for one in pictures])]
    inputs, whole = generate_tokens(model, processor, asked, MOST_TOKENS)
    pixels, read = inputs["pixel_values"].float().cpu(), inputs["input_ids"].shape[1]
    places = (inputs["input_ids"][0] == model.config.image_token_id).nonzero().flatten()
    rows = round(math.sqrt(len(places) / count * pixels.shape[-2] / pixels.shape[-1])) or 1
    if pixels.ndim != 4 or len(pixels) != count or len(places) % (rows * count):
        raise ValueError(f"an image is not one grid of tokens in {vlm.name}: give a model that does not tile images")
    words, of_word = _group_tokens_by_word(whole[0, read:].tolist(), processor.tokenizer)
    tokens = whole[:, : read + of_word.shape[1] - 1]  # the last one is predicted and not read
    calls: list[dict[str, Tensor]] = []

    def see(call: Call) -> None:
        kinds = compute_layer_maps(call).by_kind()
        calls.append({kind: maps[:, read - 1 :, places].mean(0).float().cpu() for kind, maps in kinds.items()})

    with evaluating(model), captured(model.get_decoder(), see):
        model(**{**inputs, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, use_cache=False)
    if not {*(layers or ())} <= {*range(len(calls))}:
        raise ValueError(f"layers must be numbers from 0 to {len(calls) - 1} for {vlm.name}, got {layers}")
    chosen, maps = [calls[number] for number in layers or range(len(calls))], {}
    for kind in dict.fromkeys(kind for one in chosen for kind in one):
        mean = torch.stack([one[kind] for one in chosen if kind in one]).mean(0)
        maps[kind] = (of_word @ mean).unflatten(-1, (count, rows, -1))
    average, spread = (torch.tensor(getattr(processor.image_processor, f"image_{name}")) for name in ("mean", "std"))
    colours = (pixels.movedim(1, -1) * spread + average).clamp(0, 1).numpy()
    images = {one.name: TransformedPicture(pixels[i], colours[i], None) for i, one in enumerate(pictures)}
    return Answer(question, words, images, maps)


def _group_tokens_by_word(tokens: Sequence[int], tokenizer: Any) -> tuple[list[str], Tensor]:
    """Return the words of an answer, and the part that each token has in each word's mean, [words, tokens]."""
    kept = [token for token in tokens if token not in tokenizer.all_special_ids] or [*tokens[:1]]
    texts = ["", *(tokenizer.decode(kept[: count + 1]) for count in range(len(kept)))]
    pieces = [after[len(before) :] for before, after in itertools.pairwise(texts)]
    number = torch.tensor([index > 0 and piece[:1].isspace() for index, piece in enumerate(pieces)]).cumsum(0)
    of_word = (number == number.unique()[:, None]).float()
    words = ["".join(itertools.compress(pieces, row)).strip() for row in of_word]
    return words, of_word / of_word.sum(1, keepdim=True)
