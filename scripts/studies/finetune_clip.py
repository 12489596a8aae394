"""Fine-tune the bundled CLIP in the ways of docs/guides/finetune.md, and write their figures as JSON.

    python scripts/studies/finetune_clip.py 0 --work runs/finetune_clip --output docs/benchmarks/finetune.json

The numbers are seeds. The pictures are those of the page's Python; every way is evaluated on them and on the digits of
pretraining. Results in the working folder are not computed again.
"""

import argparse
import json
import os
import re
from pathlib import Path

import torch

from diffvision.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guides/finetune.md"
EVALUATED = "photos,data/digits/zero_shot"
WAYS = {
    "lit": ["--model.lock_image=0"],
    "full": [],
    "v2": ["--model.model=local-dir:v2", "--model.pretrained=null"],
}
ALPHAS = (0.25, 0.5, 0.75)


def run(*arguments: str) -> None:
    if main([*arguments]) != 0:
        raise SystemExit(f"diffvision {' '.join(arguments)} failed")


def measure(model: str, data: str = EVALUATED, task: str = "zero_shot") -> dict[str, float]:
    """Return a model's top-1 accuracy on each set."""
    run("evaluate", model, "--data", data, "--tasks", task, "--num_workers=0", "--output=measured.json")
    records = json.loads(Path("measured.json").read_text())
    return {record["dataset"]: record["metrics"]["acc1"] for record in records}


def prepare() -> None:
    if not Path("photos").exists():
        run("data", "make", "digits", "data/digits")
        (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
        exec(compile(code, str(PAGE), "exec"), {})
        run("adapt", "CLIP-nano.digits", "v2")


def of_way(way: str, seed: int) -> dict[str, float]:
    """Train one way with a seed, or interpolate its weights, and return its accuracies."""
    file = Path(f"{way.replace(' ', '_')}_{seed}.json")
    if file.is_file():
        return json.loads(file.read_text())
    if way in WAYS:
        model = Path("runs", file.stem, "version_0")
        named = [f"--seed_everything={seed}", f"--trainer.logger.init_args.name={file.stem}"]
        if not (model / "checkpoints/best.ckpt").is_file():
            run("fit", "--config=clip/finetune.yaml", *named, *WAYS[way])
    else:
        model, alpha = Path("wise", file.stem), way.rpartition(" ")[2]
        run("interpolate", "CLIP-nano.digits", f"runs/full_{seed}/version_0", str(model), f"--alpha={alpha}")
    found = measure(str(model))
    file.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *(f"full, alpha {alpha}" for alpha in ALPHAS)])
    given = parser.parse_args()
    output = given.output and given.output.absolute()
    given.work.mkdir(parents=True, exist_ok=True)
    os.chdir(given.work)
    prepare()
    results = {seed: {way: of_way(way, seed) for way in given.ways} for seed in given.seeds}
    if output:
        probe = measure("CLIP-nano.digits", "photos", "linear_probe")
        content = {"pretrained": measure("CLIP-nano.digits"), "linear_probe": probe, "seeds": results}
        about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        output.write_text(json.dumps({**content, **about}, indent=1) + "\n")
