"""A many-shot task that needs no dataset: which made-up name does each kind of word have in this context?"""

from __future__ import annotations

import random

from diffvision.data.mapping_text import KINDS, TEMPLATE, draw_mapping, draw_word
from diffvision.evaluation.language.many_shot import Example, Task


def label_mapping_tasks(
    count: int, *, classes: int = 4, queries: int = 16, demonstrations: int = 256, seed: int = 0
) -> list[Task]:
    """Tasks with a mapping each; contexts of `diffvision.data.mapping_text`.

    Args:
        count: how many tasks.
        classes: kinds of words in each, 2 to as many as there are.
        queries: words that are asked for in each, drawn from all of its classes' words.
        demonstrations: pairs to draw demonstrations from; words repeat.

    Raises:
        ValueError: classes out of range.
    """
    if not 2 <= classes <= len(KINDS):
        raise ValueError(f"classes is {classes}: give 2 to {len(KINDS)}, the kinds of words there are")
    tasks = []
    for number in range(count):
        draw = random.Random(f"mapping {seed} {number}")
        names = draw_mapping(draw, classes)
        shown, asked = (
            [_example(draw, list(names)[place % classes], names) for place in range(count)]
            for count in (max(demonstrations, classes), queries)
        )
        tasks.append(Task(shown, asked, TEMPLATE, f"mapping {seed}/{number}"))
    return tasks


def _example(draw: random.Random, kind: str, names: dict[str, str]) -> Example:
    return Example(draw_word(draw, kind), names[kind])
