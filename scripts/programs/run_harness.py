"""Unmodified lm-eval-harness on an exported language model, and on the same made differential by `adapt`.

    python -m venv .venv-harness && .venv-harness/bin/pip install lm_eval accelerate -e ".[hf]"
    diffvision data make stdlib data/stdlib
    diffvision export runs/.../final.ckpt exported                      # of a model of the standard variant
    .venv-harness/bin/python scripts/programs/run_harness.py exported data/stdlib/validation

The task is made of the text (`scripts/programs/harness_task.py`). The adapted model (V2) computes what the first one
does before training, so both must answer alike. Prints the tables; exit status 1 if anything in it failed.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM

import diffvision
from diffvision.models.language.hugging_face import as_native, as_transformers
from shown import Shown, versions

METRICS = ("acc,none", "acc_norm,none")


def adapted(exported: Path, folder: Path) -> None:
    """Write the exported model as V2, in a folder of the same kind."""
    host = AutoModelForCausalLM.from_pretrained(exported)
    as_transformers(diffvision.adapt(as_native(host), "v2")).save_pretrained(folder)
    for file in exported.glob("tokenizer*"):
        shutil.copy(file, folder)


def measured(shown: Shown, model: Path, name: str) -> dict[str, float]:
    """Return what the harness measures of a folder."""
    command = [sys.executable, "-m", "diffvision.run", "lm_eval", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={model}", "--include_path", "next_line", "--tasks", "next_line"]
    shown.run(name, [*command, "--batch_size", "8", "--output_path", f"results-{name}"])
    file = max(shown.folder.glob(f"results-{name}/**/results*.json"))
    results = json.loads(file.read_text())["results"]["next_line"]
    return {metric: results[metric] for metric in METRICS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "exported", type=Path, help="a folder of `diffvision export`, of a model of the standard variant"
    )
    parser.add_argument("text", help="text shards that the questions are made of")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--work", type=Path, default=Path("runs/programs/harness"), help="an empty or new folder")
    args = parser.parse_args()
    print(versions("lm_eval", "torch", "transformers", "diffvision"))
    shown = Shown(args.work)
    task = Path(__file__).with_name("harness_task.py").resolve()
    text = str(Path(args.text).resolve())
    shown.run("task", [sys.executable, str(task), text, "next_line", "--samples", str(args.samples)])
    exported = args.exported.resolve()
    adapted(exported, shown.folder / "adapted")
    before, after = measured(shown, exported, "exported"), measured(shown, Path("adapted"), "adapted")
    for metric in METRICS:
        # A tie may fall the other way.
        alike = abs(before[metric] - after[metric]) < 1.5 / args.samples
        shown.check(f"{metric.split(',')[0]}: exported, adapted", alike, f"{before[metric]:.4f}, {after[metric]:.4f}")
    return shown.end()


if __name__ == "__main__":
    sys.exit(main())
