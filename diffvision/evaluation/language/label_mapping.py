"""A many-shot task that needs no dataset: the made-up name that each kind of word has in a context.

The words that are asked for are never among the demonstrations, so the answer must come from the kind of the word; it
cannot be copied from a line with the same word.
"""

from __future__ import annotations

import random

from diffvision.data.datasets.mapping_text import KINDS, TEMPLATE, draw_mapping
from diffvision.evaluation.language.many_shot import Example, Task


def label_mapping_tasks(
    count: int, *, classes: int = 4, queries: int = 16, demonstrations: int = 256, seed: int = 0
) -> list[Task]:
    """Return tasks with a mapping each; contexts of `diffvision.data.datasets.mapping_text`.

    Args:
        count: how many tasks.
        classes: kinds of words in each, 2 to as many as there are.
        queries: words that are asked for in each, all different; they are in none of its demonstrations.
        demonstrations: pairs to draw demonstrations from, of the other words of the kinds; these words repeat.

    Raises:
        ValueError: classes out of range; more queries than leave each kind a word for the demonstrations.
    """
    if not 2 <= classes <= len(KINDS):
        raise ValueError(f"classes is {classes}: give 2 to {len(KINDS)}, the kinds of words there are")
    most = classes * (min(len(words.split()) for words in KINDS.values()) - 1)
    if queries > most:
        raise ValueError(
            f"queries is {queries}, over the {most} words of {classes} classes that no demonstration shows: give at "
            f"most {most}, or more mappings"
        )
    asked_of_each = -(-queries // classes)
    tasks = []
    for number in range(count):
        draw = random.Random(f"mapping {seed} {number}")
        names = draw_mapping(draw, classes)
        kinds = list(names)
        words = {kind: KINDS[kind].split() for kind in kinds}
        for kind in kinds:
            draw.shuffle(words[kind])
        asked = [(kinds[index % classes], index // classes) for index in range(queries)]
        shown = [kinds[index % classes] for index in range(max(demonstrations, classes))]
        tasks.append(
            Task(
                [Example(draw.choice(words[kind][asked_of_each:]), names[kind]) for kind in shown],
                [Example(words[kind][index], names[kind]) for kind, index in asked],
                TEMPLATE,
                f"mapping {seed}/{number}",
            )
        )
    return tasks
