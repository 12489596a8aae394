"""Writes a task for lm-eval-harness from local text: which of four lines comes next in an unseen file.

    python scripts/programs/harness_task.py data/stdlib/validation runs/next_line --samples 200
    diffvision export runs/.../final.ckpt runs/exported
    diffvision run lm_eval --model hf --model_args pretrained=runs/exported --include_path runs/next_line \\
        --tasks next_line

The harness is unmodified; `diffvision run` registers our classes with transformers before it starts.
"""

import argparse
import json
import random
from pathlib import Path

from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.tokenize import documents_of

CONTEXT, CHOICES = 6, 4  # lines
TASK = """\
task: next_line
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def questions(source: str, count: int, seed: int) -> list[dict]:
    """Return contexts of a few lines, with the line that follows among lines from elsewhere in the same file."""
    draw = random.Random(seed)
    files = [[line for line in text.splitlines() if line.strip()] for text in documents_of(ShardSet(source))]
    files = [lines for lines in files if len(set(lines)) > 4 * (CONTEXT + CHOICES)]
    made = []
    for _ in range(count):
        lines = draw.choice(files)
        index = draw.randrange(CONTEXT, len(lines))
        others = sorted(set(lines) - {lines[index]})
        choices = [lines[index], *draw.sample(others, CHOICES - 1)]
        draw.shuffle(choices)
        context = "\n".join(lines[index - CONTEXT : index]) + "\n"
        made.append({"context": context, "choices": choices, "answer": choices.index(lines[index])})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="text shards")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    file = (args.directory / "next_line.jsonl").resolve()
    lines = [json.dumps(question) for question in questions(args.source, args.samples, args.seed)]
    file.write_text("\n".join(lines) + "\n")
    (args.directory / "next_line.yaml").write_text(TASK.format(file=file))
    print(f"{len(lines)} questions in {args.directory}; chance is {100 / CHOICES:.0f}%")


if __name__ == "__main__":
    main()
