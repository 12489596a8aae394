"""Mathematical questions: greedy answers, compared with the right ones by math-verify.

A file is JSON lines {"question", "answer"}, as GSM8K's, or {"prompt", "answer"}, as `data make arithmetic` writes them.
The right answer is what stands after the last `####` of "answer", or all of it. Programs
extract answers by different rules, and their accuracies differ by several points, so compare models by one rule.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffvision.evaluation.language.generations import continue_greedily, max_prompt_tokens, stop_at
from diffvision.evaluation.language.needle import start_tokens
from diffvision.evaluation.language.scoring import Progress, silent
from diffvision.evaluation.per_sample import PerSample
from diffvision.models.modes import evaluating
from diffvision.opening import Model

QUESTION = "{question}"
_KEYS = ("question", "prompt")
_SECONDS = 5  # that math-verify may take for an answer


class Question(NamedTuple):
    """A question and its right answer; the id is FILE:LINE."""

    id: str
    text: str
    answer: str


def read_questions(paths: Sequence[str], *, count: int | None = None, seed: int = 0) -> list[Question]:
    """Return all questions of the files, or `count` of each, drawn at random.

    Raises:
        FileNotFoundError; ValueError: a line is not a question with an answer, or a file has none.
    """
    questions: list[Question] = []
    for path in map(Path, paths):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} must have questions, and is empty")
        own = [_question(path, number, line) for number, line in enumerate(lines, start=1)]
        few = count is not None and count < len(own)
        questions += random.Random(seed).sample(own, count) if few and count else own
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    try:
        row: Any = json.loads(line)
        text = next(row[key] for key in _KEYS if isinstance(row.get(key), str))
        answer = str(row["answer"]).rpartition("####")[2].strip()
    except (ValueError, LookupError, AttributeError, StopIteration):
        answer = ""
    if not answer:
        raise ValueError(f"{path}, line {number} must be JSON with question and answer, got {line[:60]}")
    return Question(f"{path}:{number}", text, answer)


def mathematics(
    model: Model,
    questions: Sequence[Question],
    *,
    template: str = "Question: {question}\nAnswer:",
    new_tokens: int = 512,
    file: Path | None = None,
    batch_size: int = 8,
    progress: Progress = silent,
) -> dict[str, PerSample | float]:
    """Return the accuracy of greedy answers, and the shares of those without an answer or at the limit of tokens.

    Args:
        model: with its tokenizer.
        questions: of one or several files.
        template: the prompt, with {question} in it; what stands before it ends an answer, since a base model continues
            with another question.
        new_tokens: the limit of an answer.
        file: JSON lines of the answers to write; None for none.
        batch_size: questions at a time; those of one length are together.

    Raises:
        ValueError: math-verify is missing, or there is no room for a prompt.
    """
    is_right = _verifier()
    room = max_prompt_tokens(model, new_tokens)
    tokenizer: Any = model.tokenizer
    prompts = []
    for question in questions:
        tokens = [*start_tokens(tokenizer), *tokenizer.encode(template.replace(QUESTION, question.text))]
        if room is not None and len(tokens) > room:
            raise ValueError(f"{question.id} has {len(tokens)} tokens, and there is room for {room}: lower new_tokens")
        prompts.append(tokens)
    stop = template.partition(QUESTION)[0].strip()
    stops = (stop,) if stop else ()
    rows: dict[int, dict[str, Any]] = {}
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with evaluating(model.module):
        for batch in progress(batches, "answers"):
            written = continue_greedily(model, [prompts[n] for n in batch], max_new_tokens=new_tokens, stops=stops)
            for number, new in zip(batch, written, strict=True):
                text, right = tokenizer.decode(new), questions[number].answer
                end = stop_at(text, stops)
                verdict, at_limit = is_right(right, text[:end]), end is None and len(new) == new_tokens
                rows[number] = {"id": questions[number].id, "text": text[:end], "right": verdict, "at_limit": at_limit}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(rows[number]) + "\n" for number in range(len(rows))))
    each = {
        "accuracy": [rows[number]["right"] is True for number in range(len(rows))],
        "without_answer": [rows[number]["right"] is None for number in range(len(rows))],
        "at_limit": [rows[number]["at_limit"] for number in range(len(rows))],
    }
    units = torch.arange(len(questions))
    return {name: PerSample(torch.tensor(values), units) for name, values in each.items()}


def _verifier() -> Any:
    """Return (right answer, text) -> whether the text's answer is right; None if math-verify finds none in it."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ValueError("math needs math-verify: pip install 'diffvision[math]'") from None

    def is_right(gold: str, text: str) -> bool | None:
        found = parse(text.rpartition("####")[2], parsing_timeout=_SECONDS)
        expected = parse(f"${gold}$", parsing_timeout=_SECONDS) or parse(gold, parsing_timeout=_SECONDS)
        return verify(expected, found, timeout_seconds=_SECONDS) if found else None

    return is_right
