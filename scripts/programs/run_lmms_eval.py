"""Unmodified lmms-eval on a vision-language model and files of POPE, against `diffvision evaluate-vlm`.

    python -m venv .venv-lmms && .venv-lmms/bin/pip install "lmms_eval==0.7.3" -e ".[hf]"
    .venv-lmms/bin/python scripts/programs/run_lmms_eval.py MODEL --data data/scenes-vqa/test

lmms-eval finds our models by its entry point, and the tasks, with its own metrics of POPE, in a folder that this script
writes. Both programs ask the same questions, so every metric must be equal, also of the answers that lmms-eval logged.
Exit status 1 if one is not.
"""

import argparse
import json
import sys
from pathlib import Path

from datasets import Dataset, Image

from diffvision.evaluation.vision_language.questions import QuestionSet, read_sets
from shown import Shown, versions

METRICS = ("accuracy", "precision", "recall", "f1")
TASK = """\
task: scenes_{name}
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_visual: !function pope_utils.pope_doc_to_visual
doc_to_text: !function pope_utils.pope_doc_to_text
doc_to_target: answer
generation_kwargs:
  max_new_tokens: {tokens}
  do_sample: false
  until: []
lmms_eval_specific_kwargs:
  default:
    pre_prompt: ""
    post_prompt: ""
process_results: !function pope_utils.pope_process_results
metric_list:
"""
METRIC = """\
  - metric: pope_{metric}
    aggregation: !function pope_utils.pope_aggregate_{metric}
    higher_is_better: true
"""
LMMS_NAMES = {"f1": "f1_score"}


def write_task(questions: QuestionSet, folder: Path, tokens: int) -> None:
    """Write a task of lmms-eval with the questions and images of a set, and lmms-eval's own metrics of POPE."""
    rows = [
        {
            "question_id": str(row["question_id"]),
            "question": row["text"],
            "answer": row["label"],
            "image": str(questions.image_paths(row)[0]),
        }
        for row in questions.rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{questions.name}.parquet"
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(file)
    text = TASK.format(name=questions.name, file=file, tokens=tokens)
    text += "".join(METRIC.format(metric=LMMS_NAMES.get(metric, metric)) for metric in METRICS)
    (folder / f"{questions.name}.yaml").write_text(text)
    (folder / "pope_utils.py").write_text("from lmms_eval.tasks.pope.utils import *\n")


def write_answers(questions: QuestionSet, samples: Path, file: Path) -> None:
    """Write the answers that lmms-eval logged as an answer file."""
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    by_number = {row["doc_id"]: row["filtered_resps"] for row in logged}
    answers = [by_number[number] for number in range(len(questions.rows))]
    texts = [answer[0] if isinstance(answer, list) else answer for answer in answers]
    rows = [{"question_id": row["question_id"], "text": text} for row, text in zip(questions.rows, texts, strict=True)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="question files of POPE, or their folder")
    parser.add_argument("--tokens", type=int, default=8, help="most tokens of an answer")
    parser.add_argument("--work", type=Path, default=Path("runs/programs/lmms_eval"), help="an empty or new folder")
    args = parser.parse_args()
    print(versions("lmms_eval", "torch", "transformers", "diffvision"), flush=True)
    shown = Shown(args.work.resolve())
    model, data = str(args.model.resolve()), [str(path.resolve()) for path in args.data]
    sets = read_sets(data, tasks=["pope"])
    for questions in sets:
        write_task(questions, shown.folder / "tasks", args.tokens)
    tasks = ",".join(f"scenes_{one.name}" for one in sets)
    command = [sys.executable, "-m", "lmms_eval", "--model", "diffvision", "--model_args", f"model={model}"]
    command += ["--include_path", "tasks", "--tasks", tasks, "--batch_size", "8", "--device", "cpu"]
    # With another verbosity its exit status is 0 even if the evaluation failed.
    command += ["--verbosity", "DEBUG", "--log_samples", "--output_path", "lmms_eval"]
    shown.run("lmms_eval", command, lines=12, only="|")
    evaluate = [sys.executable, "-m", "diffvision", "evaluate-vlm"]
    settings = ["--data", ",".join(data), "--tasks", "pope", "--device", "cpu"]
    settings += ["--max_new_tokens", str(args.tokens), "--batch_size", "8"]
    shown.run("ours", [*evaluate, model, *settings, "--output", "ours"], lines=30)
    for one in sets:
        (samples,) = shown.folder.glob(f"lmms_eval/**/*_samples_scenes_{one.name}.jsonl")
        write_answers(one, samples, shown.folder / "logged" / f"{one.name}.jsonl")
    shown.run("logged", [*evaluate, "--answers", "logged", *settings, "--output", "again"], lines=0)
    (file,) = shown.folder.glob("lmms_eval/**/*_results.json")
    theirs = json.loads(file.read_text())["results"]
    (ours,) = json.loads((shown.folder / "ours" / "results.json").read_text())["models"].values()
    (again,) = json.loads((shown.folder / "again" / "results.json").read_text())["models"].values()
    for one in sets:
        for metric in METRICS:
            their = theirs[f"scenes_{one.name}"][f"pope_{LMMS_NAMES.get(metric, metric)},none"]
            key = f"{one.name}/lmms_eval/{metric}"
            equal = abs(their - ours[key]) < 1e-12 and ours[key] == again[key]
            shown.check(f"{one.name}: {metric}", equal, f"lmms-eval {their:.6f}, ours {ours[key]:.6f}")
        detail = ", ".join(
            f"{key} {ours[f'{one.name}/{key}']:.4f}" for key in ("f1", "llava/f1", "yes_ratio", "unparsed")
        )
        shown.check(f"{one.name}: {len(one.rows)} questions", ours == again, detail)
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
