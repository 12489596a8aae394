"""Answers to questions about images: generated greedily, or read from a file of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from diffvision.data.conversations import PLACEHOLDER, check_image
from diffvision.data.images.decode import decode_image
from diffvision.data.rows import read_rows
from diffvision.data.shards.sample import BadSample
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.evaluation.vision_language.questions import QuestionSet

QUESTION = "{question}"
"""The place of the question in a prompt."""
ImageQuestion = tuple[str, Sequence[Image.Image]]
"""A question and its images."""


@torch.no_grad()
def generate_answers(model: Any, processor: Any, questions: Sequence[ImageQuestion], max_new_tokens: int) -> list[str]:
    """Generate greedy answers to a batch of questions.

    Args:
        model: an image-text-to-text model of transformers, ours among them.
        processor: as in `tokenize_questions`.
        questions: each with its images.
        max_new_tokens: most tokens of an answer.

    Raises:
        ValueError: as `tokenize_questions`, or more tokens than the model reads.
    """
    inputs = tokenize_questions(processor, questions).to(model.device, model.dtype)
    length = inputs["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length + max_new_tokens > limit:
        raise ValueError(
            f"question, images and answer must have at most {limit} tokens, got {length} and max_new_tokens="
            f"{max_new_tokens}: lower it, or shrink the images"
        )
    ends = model.generation_config.eos_token_id
    out = model.generate(
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
    return processor.batch_decode(out[:, length:], skip_special_tokens=True)


def tokenize_questions(processor: Any, questions: Sequence[ImageQuestion]) -> Any:
    """Return a model's inputs for questions, padded on the left.

    Images come before the question; image placeholders in its text are removed.

    Args:
        processor: of transformers, with a chat template.
        questions: each with its images.

    Raises:
        ValueError: no chat template, or an image that would take too much memory.
    """
    if not getattr(processor, "chat_template", None):
        raise ValueError("the processor has no chat template: put a chat_template.jinja next to the model")
    marker = getattr(processor, "image_token", None) or PLACEHOLDER
    prompts = []
    for text, images in questions:
        try:
            for image in images:
                check_image(image, processor.image_processor)
        except BadSample as error:
            raise ValueError(
                f"{error} for the question {text[:60]!r}: resize the image, or remove the question"
            ) from None
        question = {"type": "text", "text": text.replace(marker, "").strip()}
        message = {"role": "user", "content": [*({"type": "image"} for _ in images), question]}
        prompts.append(processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    return processor(
        text=prompts,
        images=[[*images] for _, images in questions if images] or None,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )


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
    """Ask a model the questions of a set, and write its answers to a file.

    Args:
        vlm: with `model` and `processor`.
        questions: the set.
        prompt: the text that the model gets, with {question} where the question belongs.
        max_new_tokens: most tokens of an answer.
        batch_size: questions at a time.
        file: JSON lines {"question_id", "text", "of": a digest of question and images}, written batch by batch.
        progress: wraps the batches in a progress bar.

    Raises:
        ValueError: a prompt without {question}; an image that cannot be read.
    """
    if QUESTION not in prompt:
        raise ValueError(f"prompt must contain {QUESTION}, got {prompt!r}")
    digests = [] if file is None else questions.compute_digests()
    texts: list[str] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    starts = range(0, len(questions.rows), batch_size)
    for start in progress(starts, f"{questions.name}, answers"):
        rows = questions.rows[start : start + batch_size]
        batch = [(prompt.replace(QUESTION, row["text"]), _images(questions, row)) for row in rows]
        new = generate_answers(vlm.module, vlm.processor, batch, max_new_tokens)
        if file is not None:
            lines = [
                {"question_id": row["question_id"], "text": text, "of": digest}
                for row, text, digest in zip(rows, new, digests[start : start + batch_size], strict=True)
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
        ValueError: a line that is not an answer, or answers to other questions than the set's.
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
                f"line {number} of {path} is not an answer ({error!r}): it must have question_id and text"
            ) from error
    ids = [str(row["question_id"]) for row in questions.rows]
    if other := sorted({*ids} ^ rows.keys()):
        raise ValueError(
            f"{path} must answer the {len(ids)} questions of {questions.path.name}, got {len(rows)} answers: "
            f"{other[0]} is in one of the two files only"
        )
    if "of" in rows[ids[0]] and [rows[id].get("of") for id in ids] != questions.compute_digests():
        raise ValueError(f"{path} has answers to other questions or images than {questions.path}: generate them again")
    return [str(rows[id]["text"]) for id in ids]


def _images(questions: QuestionSet, row: Any) -> list[Image.Image]:
    images = []
    for path in questions.image_paths(row):
        try:
            images.append(decode_image(path.read_bytes()))
        except BadSample as error:
            raise ValueError(f"cannot read {path} ({error}): replace it, or remove its questions") from error
    return images
