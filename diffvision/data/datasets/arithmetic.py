"""`arithmetic`: worded problems with sentences that distract (`arithmetic_text`), as rows of prompt and response.

The test asks for more steps and among more distracting sentences than training shows, about people of other names.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffvision.data.datasets.arithmetic_text import LEAST_HIGHEST, MOST_PEOPLE, all_names, compose
from diffvision.data.shards.writer import write_about, write_lines
from diffvision.progress import track

MORE_STEPS = 3
Row = dict[str, Any]


def make_arithmetic(
    directory: str | Path,
    documents: int = 100_000,
    steps: int = 5,
    distractors: int = 4,
    highest: int = 999,
    evaluated: int = 100,
    seed: int = 0,
) -> str:
    """Write worded arithmetic problems with distracting sentences, as rows of prompt and response.

    They are train.jsonl, validation.jsonl and test.jsonl.

    A row is {"id", "prompt", "response", "answer", "steps", "distractors"}. Training has 1 to `steps` steps and 0 to
    `distractors` distracting sentences, and validation is like it. The test has as many problems of each of 1 to
    `steps` + 3 steps with each of 0, a half, one, two and four times `distractors`.

    Args:
        directory: the folder to write; it must have none of the files yet.
        documents: training problems.
        steps: the most lines of a solution in training.
        distractors: the most distracting sentences in training.
        highest: the largest number.
        evaluated: validation problems divided by ten, and test problems of each number of steps and distractors.
        seed: other seeds give other problems.

    Raises:
        ValueError: the directory has such files already, or a number is out of range.
    """
    directory = Path(directory)
    for name, value, least in (
        ("documents", documents, 1),
        ("steps", steps, 1),
        ("distractors", distractors, 0),
        ("highest", highest, LEAST_HIGHEST),
        ("evaluated", evaluated, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
    if (people := 2 * (steps + MORE_STEPS) + 4 * distractors) > MOST_PEOPLE:
        raise ValueError(
            f"steps {steps} and distractors {distractors} need {people} people, and there are names for "
            f"{MOST_PEOPLE}: give less of one"
        )
    files = {split: directory / f"{split}.jsonl" for split in ("train", "validation", "test")}
    if there := [file for file in files.values() if file.exists()]:
        raise ValueError(f"{there[0]} is there already: remove it, or choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    cells = test_cells(steps, distractors)
    counts = {"train": documents, "validation": 10 * evaluated, "test": evaluated * len(cells)}
    seen: set[str] = set()
    for split, count in counts.items():
        rows = _rows(split, count, cells, steps, distractors, highest, seed, seen)
        write_lines(files[split], (json.dumps(row) for row in track(rows, f"writing {split}", count)))
    write_about(directory, source="made by diffvision data make arithmetic", licence="CC0-1.0", problems=counts)
    return ", ".join(f"{count:,} problems in {split}" for split, count in counts.items())


def test_cells(steps: int, distractors: int) -> list[tuple[int, int]]:
    """Return the numbers of steps and distractors that the test has."""
    numbers = dict.fromkeys((0, distractors // 2, distractors, 2 * distractors, 4 * distractors))
    return [(k, d) for k in range(1, steps + MORE_STEPS + 1) for d in numbers]


def _rows(
    split: str,
    count: int,
    cells: list[tuple[int, int]],
    steps: int,
    distractors: int,
    highest: int,
    seed: int,
    seen: set[str],
) -> Iterator[Row]:
    """Yield the rows of a split, none of which was seen."""
    draw, names = random.Random(f"{split} {seed}"), all_names()[split == "test"]
    for number in range(count):
        k, d = cells[number % len(cells)]
        if split != "test":
            k, d = draw.randint(1, steps), draw.randint(0, distractors)
        problem = compose(draw, names, steps=k, distractors=d, highest=highest)
        while (prompt := problem.prompt) in seen:
            problem = compose(draw, names, steps=k, distractors=d, highest=highest)
        seen.add(prompt)
        yield {
            "id": f"{split}-{number:06d}",
            "prompt": prompt,
            "response": problem.response,
            "answer": str(problem.answer),
            "steps": k,
            "distractors": d,
        }
