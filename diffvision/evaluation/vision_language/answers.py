"""Answers to questions about images: generated greedily, or read from the files that other projects wrote."""

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
Asked = tuple[str, Sequence[Image.Image]]
"""A question and its images."""


@torch.no_grad()
def generate_answers(model: Any, processor: Any, asked: Sequence[Asked], max_new_tokens: int) -> list[str]:
    """Return greedy answers to questions, in one batch that is padded on the left.

    Args:
        model: an image-text-to-text model of transformers, ours among them.
        processor: as in `tokenize_questions`.
        asked: questions, each with its images.
        max_new_tokens: most tokens of an answer.

    Raises:
        ValueError: as `tokenize_questions`, or more tokens than the model reads.
    """
    inputs = tokenize_questions(processor, asked).to(model.device, model.dtype)
    length = inputs["input_ids"].shape[1]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length + max_new_tokens > limit:
        raise ValueError(
            f"a question has {length} tokens, its images' among them, and the model reads {limit}: lower "
            f"max_new_tokens={max_new_tokens}, or give smaller images"
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


def tokenize_questions(processor: Any, asked: Sequence[Asked]) -> Any:
    """Return a model's inputs for questions; images come before the question, whose own placeholders are left out.

    Args:
        processor: of transformers, with a chat template.
        asked: questions, each with its images.

    Raises:
        ValueError: no chat template, or an image that would take too much memory.
    """
    if not getattr(processor, "chat_template", None):
        raise ValueError("the processor has no chat template: put a chat_template.jinja next to the model")
    marker = getattr(processor, "image_token", None) or PLACEHOLDER
    prompts = []
    for text, images in asked:
        try:
            for image in images:
                check_image(image, processor.image_processor)
        except BadSample as error:
            raise ValueError(f"{error} for the question {text[:60]!r}: cut the image, or leave it out") from None
        question = {"type": "text", "text": text.replace(marker, "").strip()}
        message = {"role": "user", "content": [*({"type": "image"} for _ in images), question]}
        prompts.append(processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
    return processor(
        text=prompts,
        images=[[*images] for _, images in asked if images] or None,
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
    """Return a model's answers to a set, and write them to a file.

    Args:
        vlm: with `model` and `processor`.
        questions: the set.
        prompt: what is asked, with {question} in it.
        max_new_tokens: most tokens of an answer.
        batch_size: questions at a time.
        file: JSON lines {"question_id", "text"}, written batch by batch.
        progress: wraps the batches in a progress bar.

    Raises:
        ValueError: a prompt without {question}; an image that is none.
    """
    if QUESTION not in prompt:
        raise ValueError(f"prompt must have {QUESTION} where the question belongs, got {prompt!r}")
    texts: list[str] = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    starts = range(0, len(questions.rows), batch_size)
    for start in progress(starts, f"{questions.name}, answers"):
        rows = questions.rows[start : start + batch_size]
        asked = [(prompt.replace(QUESTION, row["text"]), _images(questions, row)) for row in rows]
        new = generate_answers(vlm.module, vlm.processor, asked, max_new_tokens)
        if file is not None:
            lines = [{"question_id": row["question_id"], "text": text} for row, text in zip(rows, new, strict=True)]
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
    return [str(rows[id]["text"]) for id in ids]


def _images(questions: QuestionSet, row: Any) -> list[Image.Image]:
    images = []
    for path in questions.image_paths(row):
        try:
            images.append(decode_image(path.read_bytes()))
        except BadSample as error:
            raise ValueError(f"{path}: {error}; mend it, or leave its questions out") from error
    return images
