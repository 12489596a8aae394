"""`arithmetic`: worded problems with sentences that distract (`arithmetic_text`), as rows of prompt and response.

The test asks for more steps and among more distracting sentences than training shows, about people of other names.
"""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diffvision.data.datasets.arithmetic_text import LEAST_HIGHEST, MOST_PEOPLE, all_names, compose
from diffvision.data.shards.writer import write_about, write_lines
from diffvision.progress import track

MORE_STEPS = 3


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
    least = {"documents": 1, "steps": 1, "distractors": 0, "highest": LEAST_HIGHEST, "evaluated": 1}
    given = {"documents": documents, "steps": steps, "distractors": distractors, "highest": highest}
    for name, value in {**given, "evaluated": evaluated}.items():
        if value < least[name]:
            raise ValueError(f"{name} must be at least {least[name]}, got {value}")
    if (people := 2 * (steps + MORE_STEPS) + 4 * distractors) > MOST_PEOPLE:
        raise ValueError(
            f"steps {steps} and distractors {distractors} need {people} people, and there are names for "
            f"{MOST_PEOPLE}: give less of one"
        )
    files = {split: directory / f"{split}.jsonl" for split in ("train", "validation", "test")}
    if there := [file for file in files.values() if file.exists()]:
        raise ValueError(f"{there[0]} is there already: remove it, or choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    of_cells = dict.fromkeys((0, distractors // 2, distractors, 2 * distractors, 4 * distractors))
    cells = [(k, d) for k in range(1, steps + MORE_STEPS + 1) for d in of_cells]  # of the test
    counts = {"train": documents, "validation": 10 * evaluated, "test": evaluated * len(cells)}
    seen: set[str] = set()
    for split, count in counts.items():
        draw = random.Random(f"{split} {seed}")
        shapes = (
            cells[n % len(cells)] if split == "test" else _draw_shape(draw, steps, distractors) for n in range(count)
        )
        rows = _rows(split, draw, shapes, highest, seen)
        write_lines(files[split], (json.dumps(row) for row in track(rows, f"writing {split}", count)))
    write_about(directory, source="made by diffvision data make arithmetic", licence="CC0-1.0", problems=counts)
    return ", ".join(f"{count:,} problems in {split}" for split, count in counts.items())


def _draw_shape(draw: random.Random, steps: int, distractors: int) -> tuple[int, int]:
    return draw.randint(1, steps), draw.randint(0, distractors)


def _rows(
    split: str, draw: random.Random, shapes: Iterable[tuple[int, int]], highest: int, seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each (steps, distractors), with prompts that were not seen."""
    names = all_names()[split == "test"]
    for number, (k, d) in enumerate(shapes):
        problem = compose(draw, names, steps=k, distractors=d, highest=highest)
        while problem.prompt in seen:
            problem = compose(draw, names, steps=k, distractors=d, highest=highest)
        seen.add(problem.prompt)
        yield {
            "id": f"{split}-{number:06d}",
            "prompt": problem.prompt,
            "response": problem.response,
            "answer": str(problem.answer),
            "steps": k,
            "distractors": d,
        }
