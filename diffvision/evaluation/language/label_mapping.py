"""A many-shot task that needs no dataset: which made-up name does each kind of word have in this context?

A context has lines such as "pear: dax" and "wolf: wug"; the names of the kinds are drawn anew for every context, so
the mapping can only be learned from it. `training_documents` are contexts of the same distribution, to mix into the
training text of small models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from diffvision.evaluation.language.many_shot import Example, Task

TEMPLATE = "{text}: {label}\n"
KINDS = {
    "fruit": "apple pear plum cherry grape lemon peach banana orange mango fig melon",
    "animal": "wolf bear lion horse sheep goat tiger rabbit mouse camel fox deer",
    "colour": "red blue green yellow purple brown pink grey white black violet scarlet",
    "tool": "hammer saw drill wrench chisel pliers spade rake axe shovel file clamp",
    "body": "hand foot knee elbow nose ear neck finger toe shoulder ankle wrist",
    "weather": "rain snow wind fog hail storm frost thunder cloud sleet mist breeze",
    "garment": "shirt coat hat scarf glove sock shoe dress skirt belt jacket boot",
    "room": "kitchen cellar attic bedroom hall pantry study nursery lounge porch garage stable",
}
NAMES = "dax wug blick toma fep zorp kiki gazzer modi lorp tulver pim"


def label_mapping_tasks(
    count: int, *, classes: int = 4, queries: int = 16, demonstrations: int = 256, seed: int = 0
) -> list[Task]:
    """Tasks with a mapping each.

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
        names = _mapping(draw, classes)
        kinds = list(names)
        shown = [_example(draw, kinds[place % classes], names) for place in range(max(demonstrations, classes))]
        asked = [_example(draw, kinds[place % classes], names) for place in range(queries)]
        tasks.append(Task(shown, asked, TEMPLATE, f"mapping {seed}/{number}"))
    return tasks


def training_documents(
    count: int, *, classes: tuple[int, int] = (2, 8), shots: tuple[int, int] = (8, 64), seed: int = 0
) -> Iterator[str]:
    """Contexts of the same distribution, a mapping each, to mix into training text.

    Args:
        count: how many.
        classes, shots: least and most in a document.
        seed: other seeds give other documents; the tasks' mappings and words are drawn apart from them.
    """
    for number in range(count):
        draw = random.Random(f"mapping training {seed} {number}")
        names = _mapping(draw, draw.randint(*classes))
        lines = [_example(draw, draw.choice(list(names)), names) for _ in range(draw.randint(*shots))]
        yield "".join(TEMPLATE.format(text=text, label=label) for text, label in lines)


def _mapping(draw: random.Random, classes: int) -> dict[str, str]:
    return dict(zip(draw.sample(list(KINDS), classes), draw.sample(NAMES.split(), classes), strict=True))


def _example(draw: random.Random, kind: str, names: dict[str, str]) -> Example:
    return Example(draw.choice(KINDS[kind].split()), names[kind])
