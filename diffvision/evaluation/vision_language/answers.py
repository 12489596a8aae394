"""Answers to questions about images: generated greedily, or read from the files that other projects wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from diffvision.data.conversations import PLACEHOLDER, check_image
from diffvision.data.images.decode import decode_image
from diffvision.data.rows import read_rows
from diffvision.data.shards.sample import BadSample
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.evaluation.vision_language.questions import QuestionSet

QUESTION = "{question}"
Asked = tuple[str, Sequence[Image.Image]]
"""A question and its images."""


def generate_answers(model: Any, processor: Any, asked: Sequence[Asked], max_new_tokens: int) -> list[str]:
    """Return greedy answers to questions, as `generate_tokens` generates them."""
    inputs, out = generate_tokens(model, processor, asked, max_new_tokens)
    return processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def generate_tokens(
    model: Any, processor: Any, asked: Sequence[Asked], max_new_tokens: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs for questions in one batch, padded on the left, and these with greedy answers.

    Args:
        model: an image-text-to-text model of transformers, ours among them.
        processor: its processor, with a chat template. Images come before the question, whose placeholders are left
            out.
        asked: questions, each with its images.
        max_new_tokens: most tokens of an answer.

    Raises:
        ValueError: no chat template, an image that would take too much memory, or more tokens than the model reads.
    """
    if not getattr(processor, "chat_template", None):
        raise ValueError("the processor has no chat template: put a chat_template.jinja next to the model")
    marker = getattr(processor, "image_token", None) or PLACEHOLDER
    for text, images in asked:
        try:
            for image in images:
                check_image(image, processor.image_processor)
        except BadSample as error:
            raise ValueError(f"{error} for the question {text[:60]!r}: cut the image, or leave it out") from None
    prompts = [
        [{"role": "user", "content": [*({"type": "image"} for _ in images), {"type": "text", "text": text}]}]
        for text, images in ((text.replace(marker, "").strip(), images) for text, images in asked)
    ]
    inputs = processor(
        text=[processor.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in prompts],
        images=[[*images] for _, images in asked if images] or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    ).to(model.device, model.dtype)
    read = inputs["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and read + max_new_tokens > limit:
        raise ValueError(
            f"a question has {read} tokens, its images' among them, and the model reads {limit}: lower "
            f"max_new_tokens={max_new_tokens}, or give smaller images"
        )
    ends = model.generation_config.eos_token_id
    out: Tensor = model.generate(
        **inputs,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        eos_token_id=processor.tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    return dict(inputs), out


def answer_questions(
    vlm: Any,
    questions: QuestionSet,
    *,
    prompt: str = QUESTION,
    max_new_tokens: int = 128,
    batch_size: int = 8,
    file: Path | None = None,
    progress: Progress = silent,
) -> list[str]:
    """Return a model's answers to a set, and write them to a file.

    Args:
        vlm: with `model` and `processor`.
        questions: the set.
        prompt: what is asked, with {question} in it.
        max_new_tokens: most tokens of an answer.
        batch_size: questions at a time.
        file: JSON lines {"question_id", "text", "of": a digest of question and images}, written batch by batch.
        progress: wraps the batches in a progress bar.

    Raises:
        ValueError: a prompt without {question}; an image that is none.
    """
    if QUESTION not in prompt:
        raise ValueError(f"prompt must have {QUESTION} where the question belongs, got {prompt!r}")
    prints, texts = questions.fingerprints(), []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    starts = range(0, len(questions.rows), batch_size)
    for start in progress(starts, f"{questions.name}, answers"):
        rows = questions.rows[start : start + batch_size]
        asked = [(prompt.replace(QUESTION, row["text"]), _images(questions, row)) for row in rows]
        new = generate_answers(vlm.module, vlm.processor, asked, max_new_tokens)
        if file is not None:
            lines = [
                {"question_id": row["question_id"], "text": text, "of": of}
                for row, text, of in zip(rows, new, prints[start : start + batch_size], strict=True)
            ]
            with file.open("a", encoding="utf-8") as opened:
                opened.write("".join(f"{json.dumps(line)}\n" for line in lines))
        texts += new
    return texts


def read_answers(path: Path, questions: QuestionSet) -> list[str]:
    """Return the answers to a set from a file of JSON lines {"question_id", "text" or "answer"}, in the set's order.

    Args:
        path: the file, or a folder with a file of the set's name.
        questions: the set.

    Raises:
        ValueError: a line that is no answer, or answers to other questions than the set's.
    """
    if path.is_dir():
        path = path / f"{questions.name}.jsonl"
    rows: dict[str, dict[str, Any]] = {}
    for number, row in read_rows(path):
        try:
            id, text = str(row["question_id"]), row["text"] if "text" in row else row["answer"]
            if text is None or rows.setdefault(id, row := {**row, "text": text}) != row:
                raise ValueError(f"{text!r:.40} for {id}, which has {rows.get(id, {}).get('text')!r:.40}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is no answer ({error!r}): write question_id, and text"
            ) from error
    ids = [str(row["question_id"]) for row in questions.rows]
    if other := sorted({*ids} ^ rows.keys()):
        raise ValueError(
            f"{path} has {len(rows)} answers, {questions.path.name} {len(ids)} questions, and {other[0]} is in one of "
            "them: give the answers to these questions"
        )
    if "of" in rows[ids[0]] and [rows[id].get("of") for id in ids] != questions.fingerprints():
        raise ValueError(f"{path} has answers to other questions or images than {questions.path}: generate them again")
    return [str(rows[id]["text"]) for id in ids]


def _images(questions: QuestionSet, row: Any) -> list[Image.Image]:
    images = []
    for path in questions.image_paths(row):
        try:
            images.append(decode_image(path.read_bytes()))
        except BadSample as error:
            raise ValueError(f"{path}: {error}; mend it, or leave its questions out") from error
    return images
